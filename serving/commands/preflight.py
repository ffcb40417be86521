# SPDX-License-Identifier: Apache-2.0
"""The command `preflight`: what it takes and answers."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from saccade.serving.commands.artefacts import Answer, flat
from saccade.serving.repository.preflight.verb import PreflightOptions


def preflight(
    repository: Positional[Path],
    options: Annotated[PreflightOptions, flat],
    json: bool = False,
) -> Answer:
    """Check a repository for what would make the server fail late; exit 1 if anything would.

    Args:
        repository: what `saccade repository` wrote.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.repository.preflight.report import render
    from saccade.serving.repository.preflight.verb import preflight as verb

    report = verb(repository, options)
    return Answer(report.to_dict(), render(report), json, exit_code=0 if report.passed else 1)
