# SPDX-License-Identifier: Apache-2.0
"""Commands on budgets: what each takes and answers; the verbs are elsewhere."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from saccade.serving.bench.sweep.choice import ChooseOptions
from saccade.serving.bench.sweep.options import SweepOptions
from saccade.serving.commands.artefacts import Answer, flat


def sweep(
    checkpoint: Positional[Path],
    options: Annotated[SweepOptions, flat],
    json: bool = False,
) -> Answer:
    """Export and measure budgets and precisions of a checkpoint; goes on where it was stopped.

    A point that fails stands in the report with its reason, and makes the exit code 1.

    Args:
        checkpoint: a .safetensors file written by saccade.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.bench.report import render
    from saccade.serving.bench.sweep.sweep import sweep as verb

    found = verb(checkpoint, options)
    return Answer(found.to_dict(), render(found.to_dict()), json, exit_code=found.exit_code)


def choose(
    folder: Positional[Path],
    options: Annotated[ChooseOptions, flat],
    json: bool = False,
) -> Answer:
    """Which variant the router takes for a budget, a score or a latency, and why.

    Args:
        folder: what `saccade sweep` wrote, or an artefact folder with its frontier.json.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.bench.sweep.choice import choose as verb

    found = verb(folder, options)
    return Answer(found.to_dict(), found.text(), json, exit_code=0 if found.chosen else 1)
