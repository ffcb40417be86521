# SPDX-License-Identifier: Apache-2.0
"""Options of measurements and of a benchmark."""

import math
from dataclasses import dataclass
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.core.path_fields import PathFields
from saccade.exporter.evaluation.options import EvaluateOptions, SplitName, TaskName
from saccade.exporter.runtimes.runtime import DEFAULT, RuntimeName

_WINDOW_S = 0.3


@dataclass(frozen=True)
class MeasureOptions(PathFields):
    """Options of a measurement: subject, duration, and where the report goes."""

    out: Path  # folder for report.json, report.html and frontier.png
    # digits, digits-sum, shapes, tetrominoes, or your own data as for `saccade evaluate`; default:
    # the training data of the model, or else the family's generated data
    data: str | None = None
    # which samples to score, as for `saccade evaluate`; default: test, or validation if the data
    # has no test samples
    split: SplitName | None = None
    force: bool = False  # replace an existing folder at --out
    task: TaskName | None = None  # task to score; default: the family's main task
    limit: int | None = None  # most test samples to score
    server: bool = True  # also measure through a server; --no-server: measure in process only
    runtime: RuntimeName = DEFAULT  # runtime for the variants
    # run custom ops with saccade's kernels if they can be built; --no-op-library: run custom ops
    # with their ONNX function bodies
    op_library: bool = True
    # longest time for scores and speeds together; a benchmark stops earlier when it knows enough
    seconds: float = 300
    rounds: int = 5  # how often each variant is measured at most; intervals of speeds need two
    concurrency: tuple[int, ...] = (1, 4, 16)  # numbers of clients that each wait for an answer
    seed: int = 0  # seed for the order of the measurements

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit is not None and self.limit < 2:
            raise SaccadeError(f"--limit is {self.limit}, expected at least 2.")
        if not (math.isfinite(self.seconds) and 0.01 <= self.seconds <= 604_800):
            raise SaccadeError(f"--seconds is {self.seconds}, expected 0.01 to 604800 (a week).")
        if not 1 <= self.rounds <= 1000:
            raise SaccadeError(f"--rounds is {self.rounds}, expected 1 to 1000.")
        if not self.concurrency or not all(1 <= count <= 256 for count in self.concurrency):
            raise SaccadeError(
                f"--concurrency is {self.concurrency}, expected numbers from 1 to 256, such as "
                "1,4,16."
            )

    def evaluation(self, data: str | None = None) -> EvaluateOptions:
        """Return the options for scoring, on this data if none was given."""
        return EvaluateOptions(
            self.data or data, split=self.split, task=self.task, limit=self.limit
        )

    @property
    def window_s(self) -> float:
        """Length of one window of load. In process, a batch size is measured for a sixth of it."""
        return min(_WINDOW_S, self.seconds / 10)


@dataclass(frozen=True)
class BenchOptions(MeasureOptions):
    """Options of a benchmark: subject, duration, and where the report goes."""

    # let this measurement replace a larger one (more samples, a server, rounds) in frontier.json
    replace_frontier: bool = False
    url: str | None = None  # instead of a folder: gRPC address of a running server, HOST:PORT
    model: str | None = None  # with --url: the router to measure; default: the only one there
