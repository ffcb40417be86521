# SPDX-License-Identifier: Apache-2.0
"""Options of a sweep."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from saccade.core.errors import SaccadeError
from saccade.core.machine import cores
from saccade.core.schema import Range
from saccade.exporter.artefact.variant import PRECISIONS, check_chosen
from saccade.exporter.runtimes.runtime import DEFAULT, Runtime, runtime_named, runtimes
from saccade.models.budget import BudgetLike
from saccade.serving.bench.options import MeasureOptions


@dataclass(frozen=True)
class SweepOptions(MeasureOptions):
    """Options of a sweep: budgets, precisions, those of a benchmark, and its folder."""

    out: Path  # folder of the sweep: artefacts, report, and finished work to resume from
    budget: tuple[BudgetLike, ...] = ()  # 1,2/3,0.5 or t3,t1 or exact,fast; default: the family's
    precision: tuple[str, ...] = ("fp32",)  # fp32, fp16, bf16, int8; each is tried at every budget
    engine: tuple[str, ...] = (DEFAULT,)  # runtimes; tensorrt-rtx is built, not measured
    name: str | None = None  # name of the model; default: the checkpoint's stem
    slots: Path | None = None  # a selection of slots, written by `saccade select`
    # exports at the same time; default: one per core
    jobs: Annotated[int, Range(1, 256)] | None = None
    retry: bool = False  # try points that failed before again

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chosen("precision", self.precision, PRECISIONS)
        measured = runtime_named(self.runtime)
        if measured.builds:
            raise SaccadeError(
                f"--runtime is {self.runtime}, but a sweep measures runtimes that run the exported "
                f"files, and {measured.title} builds its own files. Leave it out, and measure it "
                "with `saccade bench`."
            )
        anywhere = [runtime.name for runtime in runtimes() if runtime.builds_anywhere]
        check_chosen("engine", self.engine, (self.runtime, *anywhere))
        if self.runtime not in self.engine:
            raise SaccadeError(
                f"--engine is {','.join(self.engine)}, but the frontier is measured with "
                f"{self.runtime}. Add it: --engine {','.join((self.runtime, *self.engine))}"
            )

    @property
    def built(self) -> tuple[Runtime, ...]:
        """The runtimes whose engines are built for each point, but not measured."""
        return tuple(runtime_named(name) for name in self.engine if name != self.runtime)

    @property
    def processes(self) -> int:
        """Number of exports at the same time."""
        return cores() if self.jobs is None else self.jobs
