# SPDX-License-Identifier: Apache-2.0
"""The worker of the checks: each is announced, made, and told.

What a repository holds is loaded here: a library or a model that kills this process is found by
the announcement that nothing follows.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from saccade.serving.repository.preflight.examine import steps
from saccade.serving.repository.preflight.opened import opened
from saccade.serving.repository.preflight.target import Gpu, Target
from saccade.worker import Say


def main(request: dict[str, Any], say: Say) -> None:
    """Make the checks of a repository from number `start` on."""
    repository, unloadable = opened(Path(request["folder"])), frozenset(request["unloadable"])
    every = steps(repository, _target(request["target"]), unloadable)
    for number, (check, model, run) in enumerate(every):
        if number >= request["start"]:
            say({"begins": [check, model]})
            say({"finding": asdict(run())})
    say({"done": True})


def _target(content: dict[str, Any]) -> Target:
    return Target(**{**content, "gpus": tuple(Gpu(**each) for each in content["gpus"])})
