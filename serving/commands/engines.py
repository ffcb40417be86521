# SPDX-License-Identifier: Apache-2.0
"""Commands on engines: what they take and answer; the verbs are elsewhere."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from saccade.export.runtimes.options import BuildOptions
from saccade.serving.commands.artefacts import Answer, flat


def build(
    artefact: Positional[Path],
    options: Annotated[BuildOptions, flat],
    json: bool = False,
) -> Answer:
    """Build a TensorRT engine of every variant, once its network has the promised types.

    Args:
        artefact: what `saccade export` wrote.
        json: machine-readable answer on standard output.
    """
    if options.locked:
        from saccade.export.runtimes.tensorrt.locked import rebuild
        from saccade.export.runtimes.tensorrt.locked import render as render_locked

        report = rebuild(artefact, options)
        code = 0 if report.identical else 1
        return Answer(report.to_dict(), render_locked(report), json, exit_code=code)
    from saccade.export.runtimes.build import build as verb

    built = verb(artefact, options)
    return Answer(built.to_dict(), built.table(), json)
