# SPDX-License-Identifier: Apache-2.0
"""Work in processes of its own: some at a time, and none outlives the sweep."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.serving.server import die_with_parent as leash

_POLL_S = 0.05


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, what it printed, and what it complained of."""

    key: str
    code: int
    output: str
    complaint: str


def run_all(
    module: str, tasks: Mapping[str, dict[str, Any]], folder: Path, *, at_a_time: int
) -> Iterator[Ended]:
    """`python -m module TASK` for each task, a JSON object; each as it ends.

    They are killed with this process, and when the caller stops asking. What they print passes
    through a hidden folder in `folder`, which is left behind only where this process is killed.
    """
    waiting = list(tasks.items())
    running: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix=".children.", dir=folder) as temporary:
        place = Path(temporary)
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    key, task = waiting.pop(0)
                    running[key] = _started(module, task, place / key)
                ended = [key for key, process in running.items() if process.poll() is not None]
                for key in ended:
                    yield _ended(key, running.pop(key).returncode, place / key)
                if not ended:
                    time.sleep(_POLL_S)
        finally:
            for process in running.values():
                process.kill()
                process.wait()


def run_one(module: str, task: dict[str, Any], folder: Path) -> Ended:
    """One such process."""
    (ended,) = run_all(module, {"one": task}, folder, at_a_time=1)
    return ended


def _started(module: str, task: dict[str, Any], place: Path) -> "subprocess.Popen[bytes]":
    # The processes share the cores: threads of each would wait for one another.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    own = [sys.executable, "-m", module, json.dumps(task)]
    with _output(place).open("wb") as output, _complaint(place).open("wb") as complaint:
        # Its own session: a Ctrl-C reaches the parent alone, which then ends this process.
        return subprocess.Popen(
            leash.leashed(own),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=complaint,
            env=environment,
            start_new_session=True,
        )


def _ended(key: str, code: int, place: Path) -> Ended:
    output, complaint = (
        path.read_text(errors="replace") for path in (_output(place), _complaint(place))
    )
    return Ended(key, code, output, complaint.strip())


def _output(place: Path) -> Path:
    return place.with_name(f"{place.name}.out")


def _complaint(place: Path) -> Path:
    return place.with_name(f"{place.name}.err")
