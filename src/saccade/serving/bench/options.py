# SPDX-License-Identifier: Apache-2.0
"""Options of what measures variants, and of a benchmark."""

import math
from dataclasses import dataclass
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.exporter.evaluation.options import TaskName
from saccade.exporter.runtimes.runtime import DEFAULT, RuntimeName
from saccade.path_fields import PathFields


@dataclass(frozen=True)
class MeasureOptions(PathFields):
    """Options of a measurement: subject, duration, and where the report goes."""

    out: Path  # folder for report.json, report.html and frontier.png
    # digits, digits-sum, shapes, tetrominoes, a folder of class folders, or an .npz; its test
    # part is read; default: what the model was trained on, or else the family's generated data
    data: str | None = None
    force: bool = False  # replace what stands at --out
    task: TaskName | None = None  # what is scored; default: the family's own
    limit: int | None = None  # test samples to score, at most
    server: bool = True  # also measure through a server; --no-server: measure in process only
    runtime: RuntimeName = DEFAULT  # what runs the variants
    # run custom ops by our kernels where they can be built; --no-op-library: run custom ops by
    # their ONNX function bodies
    op_library: bool = True
    seconds: float = 1.5  # measured time per point, over all rounds
    rounds: int = 5  # variants take turns this often; intervals of speeds need two or more
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


@dataclass(frozen=True)
class BenchOptions(MeasureOptions):
    """Options of a benchmark: subject, duration, and where the report goes."""

    # let this measurement replace a larger one (more samples, a server, rounds) in frontier.json
    replace_frontier: bool = False
    url: str | None = None  # in place of a folder: a server that runs already, HOST:PORT of gRPC
    model: str | None = None  # with --url, the router to measure; default: the only one there
