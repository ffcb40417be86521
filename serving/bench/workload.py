# SPDX-License-Identifier: Apache-2.0
"""What a benchmark measures: the variants with their threads, their requests and their scores."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.core.errors import SaccadeError, require
from saccade.core.progress import progress_of
from saccade.core.verbosity import note
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.evaluation.evaluate import scores_of
from saccade.exporter.evaluation.evaluated_model import (
    EvaluatedModel,
    subjects_of_folder,
)
from saccade.exporter.evaluation.tasks import EvaluateOptions, inputs_of
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.runtime import Runtime, loaded, runtime_named
from saccade.models.checkpoint import Checkpoint
from saccade.models.scores.results import EvaluationResult
from saccade.plugins.contract import Ops
from saccade.serving.bench.in_process import BATCHES, LONGEST_CALL_S
from saccade.serving.bench.load import LEAST_ANSWERS, LONGER, WARMUP_S
from saccade.serving.bench.options import BenchOptions, MeasureOptions
from saccade.serving.bench.policies import (
    PolicyWorks,
    ServedPolicies,
    policy_works,
    served_policies_of,
)
from saccade.serving.bench.stopping import (
    Deadline,
    duration_text,
    first_look,
    next_look,
    samples_needed,
)
from saccade.serving.bench.work import Key, OpenVariant, Threads, Work, counts, share_of
from saccade.serving.repository.installation import check_installation, find_installation
from saccade.serving.repository.runtimes.registry import served_names, served_runtime

DISTINCT_REQUESTS = 64
IN_PROCESS_SHARE = 1 / 6  # of a window, for each of the seven batch sizes
_SCORING_SHARE = 0.5  # of --seconds
MOST_GENERATED = 5000  # samples of the largest generated data set
Results = tuple[EvaluationResult, ...]


@dataclass(frozen=True)
class Workload:
    """The variants to measure, their scores, and their requests."""

    folder: ArtefactFolder
    models: Sequence[EvaluatedModel]
    results: Mapping[str, EvaluationResult]
    works: Mapping[str, Sequence[Work]]
    policies: PolicyWorks
    served: ServedPolicies
    ops: Ops
    threads: Threads
    asked: EvaluateOptions  # with the number of samples that were scored
    deadline: Deadline

    @property
    def all_works(self) -> list[Work]:
        """The kinds of request of all variants."""
        return [work for works in self.works.values() for work in works]

    def round_s(self, options: BenchOptions) -> tuple[float, float]:
        """Return the expected seconds of one round in process, and through servers."""
        clients, window_s = options.concurrency, options.window_s
        rates = [self.threads.rate(work.key) for work in self.all_works]
        full, alone = max(rates), {1, *clients}
        with_policies = [*rates, *(full for _ in self.policies.works)]
        inside = sum(inside_s(rate, window_s * IN_PROCESS_SHARE) for rate in with_policies)
        if not options.server:
            return inside, 0.0
        through = sum(
            served_s(rate, clients, window_s) + served_s(rate, alone, window_s) for rate in rates
        )
        count = len(self.served.works) + self.served.full_alone
        return inside, through + count * served_s(full, alone, window_s)


def measured_runtime(options: MeasureOptions) -> Runtime:
    """Return the runtime to measure, and check that everything for a report is installed.

    Raises: MissingPackage for a package, SaccadeError if the bundled server cannot run the
        runtime's files here and is not left out.
    """
    for package in ("matplotlib", "plotly", "jinja2"):
        require(package, extra="bench")
    runtime = runtime_named(options.runtime)
    runtime.require()
    if not options.server:
        return runtime
    if runtime.name not in served_names() or not served_runtime(runtime.name).bundled:
        raise SaccadeError(
            f"--runtime is {runtime.name}, but the bundled server does not have this runtime. To "
            "measure it without a server, pass --no-server."
        )
    check_installation(find_installation(), runtime.name)
    return runtime


def workload_of(folder: ArtefactFolder | Path | str, options: BenchOptions) -> Workload:
    """Open and score the variants of a folder, and choose their threads and the policies.

    Raises: SaccadeError if the folder, the data or the machine do not fit.
    """
    folder = ArtefactFolder.open(folder)
    folder.check()  # before slow imports, and before the work
    runtime = measured_runtime(options)
    deadline = Deadline(options.seconds)
    share = share_of(folder.variants, runtime)
    models = subjects_of_folder(folder, runtime, kernels=options.op_library, threads=share)
    ops = next((subject.ops for subject in models if subject.ops), None)
    asked = options.evaluation()

    def checkpoint() -> Checkpoint | None:
        return folder.checkpoint

    def load(variant: VariantFiles, count: int) -> dict[str, Runner]:
        return loaded(runtime, folder, variant.components.values(), ops, threads=count)

    if (data := options.data) is None:
        first, *_ = scores_of(models[:1], replace(asked, limit=2), checkpoint)
        data = first.data
    opened = [
        OpenVariant(
            variant,
            inputs_of(variant, data, DISTINCT_REQUESTS, options.skip_bad),
            {role: component.run for role, component in model.components.items()},
            load,
        )
        for variant, model in zip(folder.variants, models, strict=True)
    ]
    rates: dict[Key, dict[int, float]] = {}
    with progress_of("threads", len(opened)) as advance:
        for one in opened:
            advance(0, one.variant.name)
            rates |= one.rates(counts(runtime, share))
            advance()
    # All variants answer each sample, one after the other.
    per_second = 1 / sum(1 / rates[one.variant.name, ""][share] for one in opened)
    note(
        f"bench: all variants together answer {per_second:.3g} samples per second. It stops when "
        f"the intervals are narrow, at the latest after about {duration_text(options.seconds)}, of "
        f"which scoring may take {duration_text(_SCORING_SHARE * options.seconds)} (--seconds)."
    )
    until = deadline.part(_SCORING_SHARE)
    scores, asked = scores_within(models, asked, checkpoint, per_second=per_second, deadline=until)
    results = {score.variant: score for score in scores}
    threads = Threads(share, rates)
    opened = [one.with_threads(threads) for one in opened]
    models = [_with_runners(model, one) for model, one in zip(models, opened, strict=True)]
    asked = replace(asked, data=data)
    samples = {name: result.samples for name, result in results.items()}
    policies = policy_works(folder, models, runtime, asked, samples)
    served = served_policies_of(policies, folder.variants) if options.server else ServedPolicies()
    works = {one.variant.name: one.works for one in opened}
    return Workload(folder, models, results, works, policies, served, ops, threads, asked, deadline)


def _with_runners(model: EvaluatedModel, opened: OpenVariant) -> EvaluatedModel:
    """Return the model with the components that are open with the chosen threads."""
    parts = model.components.items()
    return replace(model, components={r: replace(one, run=opened.runners[r]) for r, one in parts})


def scores_within(
    models: Sequence[EvaluatedModel],
    options: EvaluateOptions,
    checkpoint: Callable[[], Checkpoint | None],
    *,
    per_second: float,
    deadline: Deadline,
) -> tuple[Results, EvaluateOptions]:
    """Score all variants on the same samples; return the options with the limit that was used.

    All samples are scored if that takes seconds. Otherwise the first ones of a fixed random order
    are, and more of them until the intervals are narrow or the time is over.

    Units:  per_second is how many samples all variants together answer in a second.
    Raises: SaccadeError if the task or data do not fit the family.
    """
    count = first_look(per_second, deadline.seconds)
    generated = options.data is None or not Path(options.data).exists()
    if generated and count >= MOST_GENERATED:
        return scores_of(models, options, checkpoint), options
    while True:
        limit = count if options.limit is None else min(count, options.limit)
        asked, left = replace(options, limit=limit), deadline.left
        results = scores_of(models, asked, checkpoint)
        scored = len(results[0].samples)
        if limit == options.limit or scored < limit:
            return results, asked
        seconds = max(left - deadline.left, scored / per_second)
        values = {result.variant: result.samples for result in results}
        affordable = int(deadline.left * scored / seconds)
        more = next_look(scored, samples_needed(values), affordable)
        if more is None:
            return results, asked
        count = limit * more // scored  # a task may score several samples of one image


def inside_s(rate: float, window_s: float) -> float:
    """Return how long one round of all batch sizes takes in process.

    Units:  rate in inferences per second; window_s per batch size.
    """
    total = call = 0.0
    for size in BATCHES:
        if call > LONGEST_CALL_S:
            break
        call = size / rate
        total += max(window_s, call) + call
    return total


def served_s(rate: float, clients: Iterable[int], window_s: float) -> float:
    """Return how long one round takes through a server, with each of these numbers of clients.

    Units:  rate in inferences per second.
    """
    total = 0.0
    for count in clients:
        first = max(LEAST_ANSWERS, count) / rate
        total += WARMUP_S + (window_s if first <= window_s else LONGER * first) + count / rate
    return total
