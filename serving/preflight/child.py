# SPDX-License-Identifier: Apache-2.0
"""The throw-away process of the checks: each is announced, made, and told as a line of JSON.

What a repository holds is loaded here: a library or a model that kills this process is found by
the announcement that nothing follows.
"""

import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from saccade.serving.preflight.examine import steps
from saccade.serving.preflight.opened import opened
from saccade.serving.preflight.target import Gpu, Target

_NICENESS = 10  # a server beside it goes first


def main(folder: str, start: str, target: str, unloadable: str) -> None:
    """Make the checks of a repository from number `start` on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    # What is loaded may print: only this file writes where the findings are read.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    every = steps(opened(Path(folder)), _target(target), frozenset(json.loads(unloadable)))
    for number, (check, model, run) in enumerate(every):
        if number >= int(start):
            print(json.dumps({"begins": [check, model]}), file=lines)
            print(json.dumps({"finding": asdict(run())}), file=lines)
    print(json.dumps({"done": True}), file=lines)


def _target(text: str) -> Target:
    content: dict[str, Any] = json.loads(text)
    return Target(**{**content, "gpus": tuple(Gpu(**each) for each in content["gpus"])})


if __name__ == "__main__":
    main(*sys.argv[1:])
