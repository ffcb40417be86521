# SPDX-License-Identifier: Apache-2.0
"""Options of measurements: of a benchmark, and of a sweep."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from saccade.core.errors import SaccadeError
from saccade.core.machine import cores
from saccade.core.options import Options
from saccade.core.schema import Length, Natural, Range
from saccade.exporter.artefact.variant import PRECISIONS, check_chosen
from saccade.exporter.evaluation.tasks import EvaluateOptions, SampleLimit, SplitName, TaskName
from saccade.exporter.runtimes.runtime import (
    DEFAULT,
    Runtime,
    RuntimeName,
    runtime_named,
    runtimes,
)
from saccade.models.budget import BudgetLike

_WINDOW_S = 0.3
_WEEK_S = 604_800
_Clients = Annotated[int, Range(1, 256)]


@dataclass(frozen=True)
class MeasureOptions(Options):
    """Options of a measurement: subject, duration, and where the report goes."""

    out: Path  # folder for report.json, report.html and frontier.png; with --url: report.json
    # digits, digits-sum, shapes, signs, tetrominoes, or your own data (see docs/data.md); default:
    # the training data of the model, or else the family's generated data
    data: str | None = None
    # which samples to score, as for `saccade evaluate`; default: test, or validation if the data
    # has no test samples
    split: SplitName | None = None
    force: bool = False  # replace an existing folder at --out
    task: TaskName | None = None  # task to score; default: the family's main task
    limit: SampleLimit | None = None  # most test samples to score
    skip_bad: Natural = 0  # leave out at most this many unreadable rows
    server: bool = True  # also measure through a server; --no-server: measure in process only
    runtime: RuntimeName = DEFAULT  # runtime for the variants
    # run custom ops with saccade's kernels if they can be built; --no-op-library: run custom ops
    # with their ONNX function bodies
    op_library: bool = True
    # longest time for scores and speeds together; a benchmark stops earlier when it knows enough
    seconds: Annotated[float, Range(0.01, _WEEK_S)] = 300
    # how often each variant is measured at most; intervals of speeds need two
    rounds: Annotated[int, Range(1, 1000)] = 5
    # numbers of clients that each wait for an answer
    concurrency: Annotated[tuple[_Clients, ...], Length(1)] = (1, 4, 16)
    seed: int = 0  # seed for the order of the measurements

    groups: ClassVar[Mapping[str, str]] = {
        "data": "data split task limit skip_bad",
        "measurement": "server seconds rounds concurrency seed",
        "runtime": "runtime op_library",
    }

    def evaluation(self, data: str | None = None) -> EvaluateOptions:
        """Return the options for scoring, on this data if none was given."""
        return EvaluateOptions(
            self.data or data,
            split=self.split,
            task=self.task,
            limit=self.limit,
            skip_bad=self.skip_bad,
            runtime=self.runtime,
            op_library=self.op_library,
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

    groups: ClassVar[Mapping[str, str]] = {**MeasureOptions.groups, "server": "url model"}


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

    groups: ClassVar[Mapping[str, str]] = {
        "points": "budget precision engine name slots jobs",
        **MeasureOptions.groups,
    }

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
