# SPDX-License-Identifier: Apache-2.0
"""Options of a benchmark."""

import math
from dataclasses import dataclass
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.exporter.evaluation.options import TaskName
from saccade.exporter.runtimes.runtime import DEFAULT, RuntimeName
from saccade.path_fields import PathFields


@dataclass(frozen=True)
class BenchOptions(PathFields):
    """Options of a benchmark: subject, duration, and where the report goes."""

    out: Path  # folder for report.json, report.html and frontier.png
    # digits, digits-sum, shapes, tetrominoes, a folder of class folders, or an .npz; its test
    # part is read; default: what the model was trained on, or else the family's generated data
    data: str | None = None
    force: bool = False  # replace what stands at --out
    task: TaskName | None = None  # what is scored; default: the family's own
    limit: int | None = None  # test samples to score, at most
    server: bool = True  # whether to measure through a server of its own, too
    runtime: RuntimeName = DEFAULT  # what runs the variants
    op_library: bool = True  # custom ops by our kernels where they can be built, else by bodies
    seconds: float = 1.5  # measured time a point, over all rounds
    rounds: int = 3  # variants take turns this often
    concurrency: tuple[int, ...] = (1, 4, 16)  # clients that wait for an answer each
    seed: int = 0  # of the order of the turns

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit is not None and self.limit < 2:
            raise SaccadeError(f"--limit is {self.limit}, expected at least 2.")
        if not (math.isfinite(self.seconds) and 0.01 <= self.seconds <= 3600):
            raise SaccadeError(f"--seconds is {self.seconds}, expected 0.01 to 3600.")
        if not 1 <= self.rounds <= 1000:
            raise SaccadeError(f"--rounds is {self.rounds}, expected 1 to 1000.")
        if not self.concurrency or not all(1 <= count <= 256 for count in self.concurrency):
            raise SaccadeError(
                f"--concurrency is {self.concurrency}, expected numbers from 1 to 256, like 1,4,16."
            )
