# SPDX-License-Identifier: Apache-2.0
"""Options of a sweep."""

from dataclasses import dataclass
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.exporter.artefact.variant import PRECISIONS, check_chosen
from saccade.exporter.runtimes.runtime import DEFAULT, Runtime, runtime_named, runtimes
from saccade.machine import cores
from saccade.models.budget import BudgetLike
from saccade.serving.bench.options import BenchOptions


@dataclass(frozen=True)
class SweepOptions(BenchOptions):
    """Options of a sweep: budgets, precisions, those of a benchmark, and where everything goes."""

    out: Path  # folder of the sweep: artefacts, report, and what an interrupted run goes on from
    budget: tuple[BudgetLike, ...] = ()  # 1,2/3,0.5 or t3,t1 or exact,fast; default: the family's
    precision: tuple[str, ...] = ("fp32",)  # fp32, fp16, bf16, int8: each at each budget
    engine: tuple[str, ...] = (DEFAULT,)  # what runs them; tensorrt-rtx is built, not measured
    name: str | None = None  # the model's name, by default the checkpoint's stem
    slots: Path | None = None  # a selection of slots, as `saccade select` writes it
    jobs: int | None = None  # exports at a time; default: one a core
    retry: bool = False  # try again what failed before

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chosen("precision", self.precision, PRECISIONS)
        measured = runtime_named(self.runtime)
        if measured.builds:
            raise SaccadeError(
                f"--runtime {self.runtime}: a sweep measures what runs the exported files, and "
                f"{measured.title} has to build its own. Leave it out; `saccade bench` measures it."
            )
        anywhere = [runtime.name for runtime in runtimes() if runtime.builds_anywhere]
        check_chosen("engine", self.engine, (self.runtime, *anywhere))
        if self.runtime not in self.engine:
            raise SaccadeError(
                f"--engine is {','.join(self.engine)}: the frontier is measured in {self.runtime}. "
                f"Add it: --engine {','.join((self.runtime, *self.engine))}."
            )
        if self.jobs is not None and not 1 <= self.jobs <= 256:
            raise SaccadeError(f"--jobs is {self.jobs}, expected 1 to 256.")

    @property
    def built(self) -> tuple[Runtime, ...]:
        """The runtimes whose files are built of each point, and not measured."""
        return tuple(runtime_named(name) for name in self.engine if name != self.runtime)

    @property
    def processes(self) -> int:
        """Exports at a time."""
        return cores() if self.jobs is None else self.jobs
