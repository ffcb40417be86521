# SPDX-License-Identifier: Apache-2.0
"""What a user asks of a sweep."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from saccade.export.evaluation.options import TaskName
from saccade.export.variants import PRECISIONS, check_chosen
from saccade.plugins.errors import SaccadeError
from saccade.plugins.path_fields import PathFields
from saccade.serving.bench_options import BenchOptions

RUNTIME: Final = "onnxruntime"
RTX: Final = "tensorrt-rtx"
ENGINES = (RUNTIME, RTX)


@dataclass(frozen=True)
class SweepOptions(PathFields):
    """Which budgets and precisions, how they are measured, and where everything goes."""

    out: Path  # folder of the sweep: artefacts, report, and what an interrupted run goes on from
    # digits, digits-sum, shapes, tetrominoes, a folder of class folders, or an .npz; its test
    # part is read; default: what the model was trained on, or else the family's generated data
    data: str | None = None
    budget: tuple[float | str, ...] = ()  # 1,0.5 or t3,t1 or exact,fast; default: the family's own
    precision: tuple[str, ...] = ("fp32",)  # fp32, fp16, bf16, int8: each at each budget
    engine: tuple[str, ...] = (RUNTIME,)  # what runs them; tensorrt-rtx is built, not measured
    name: str | None = None  # the model's name, by default the checkpoint's stem
    slots: Path | None = None  # a selection of slots, as `saccade select` writes it
    task: TaskName | None = None  # what is scored; default: the family's own
    limit: int | None = None  # test samples to score, at most
    server: bool = True  # whether to measure through a server of its own, too
    op_library: bool = False  # custom ops by our library's kernels, not by their function bodies
    seconds: float = 1.5  # measured time a point, over all rounds
    rounds: int = 3  # variants take turns this often
    concurrency: tuple[int, ...] = (1, 4, 16)  # clients that wait for an answer each
    seed: int = 0  # of the order of the turns
    jobs: int | None = None  # exports at a time; default: one a core
    retry: bool = False  # try again what failed before
    force: bool = False  # start again, whatever stands at --out

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chosen("precision", self.precision, PRECISIONS)
        check_chosen("engine", self.engine, ENGINES)
        if RUNTIME not in self.engine:
            raise SaccadeError(
                f"--engine is {','.join(self.engine)}: the frontier is measured in {RUNTIME}. "
                f"Add it: --engine {','.join((RUNTIME, *self.engine))}."
            )
        if self.jobs is not None and not 1 <= self.jobs <= 256:
            raise SaccadeError(f"--jobs is {self.jobs}, expected 1 to 256.")
        self.bench(self.out)

    @property
    def processes(self) -> int:
        """Exports at a time."""
        if self.jobs is not None:
            return self.jobs
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

    def bench(self, out: Path) -> BenchOptions:
        """The same measurement as `saccade bench` takes it."""
        names = ("data", "task", "limit", "server", "op_library", "seconds", "rounds")
        given = {name: getattr(self, name) for name in (*names, "concurrency", "seed")}
        return BenchOptions(out, **given)
