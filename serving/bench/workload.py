# SPDX-License-Identifier: Apache-2.0
"""What a benchmark measures: the variants with their threads, their requests and their scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.core.errors import SaccadeError, require
from saccade.core.progress import progress_of
from saccade.core.verbosity import note
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.evaluation.evaluate import scores_of
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel, subjects_of_folder
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.exporter.evaluation.tasks import Inputs, inputs_of
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.runtime import Runtime, loaded, runtime_named
from saccade.models.checkpoint import Checkpoint
from saccade.models.scores.results import EvaluationResult
from saccade.plugins.execution import Ops
from saccade.serving.bench.by_threads import (
    Threads,
    counts,
    measure_threads,
    opened_with,
    share_of,
)
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.policies import ServedPolicies, served_policies_of
from saccade.serving.bench.policy_works import PolicyWorks, policy_works
from saccade.serving.bench.stopping import (
    Deadline,
    duration_text,
    first_look,
    next_look,
    samples_needed,
)
from saccade.serving.bench.work import Work, works_of
from saccade.serving.repository.installation import check_installation, find_installation
from saccade.serving.repository.runtimes.registry import served_runtime

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


def check_served_here(runtime: Runtime) -> None:
    """Check that the bundled server can run the runtime's files here.

    Raises: SaccadeError if it cannot.
    """
    if runtime.served is None or not served_runtime(runtime.name).bundled:
        raise SaccadeError(
            f"--runtime is {runtime.name}, but the bundled server does not have this runtime. To "
            "measure it without a server, pass --no-server."
        )
    check_installation(find_installation(), runtime.name)


def workload_of(folder: ArtefactFolder | Path | str, options: BenchOptions) -> Workload:
    folder = ArtefactFolder.open(folder)
    folder.check()  # before slow imports, and before the work
    for package in ("matplotlib", "plotly"):
        require(package, extra="bench")
    runtime = runtime_named(options.runtime)
    runtime.require()
    if options.server:
        check_served_here(runtime)
    deadline = Deadline(options.seconds)
    share = share_of(folder.variants, runtime)
    models = subjects_of_folder(folder, runtime, kernels=options.op_library, threads=share)
    ops = next((subject.ops for subject in models if subject.ops), None)
    asked = options.evaluation()
    data = options.data or _default_data(models, asked, folder)
    inputs = {one.name: inputs_of(one, data, DISTINCT_REQUESTS) for one in folder.variants}
    works = _works(folder.variants, models, inputs)

    def load(variant: VariantFiles, count: int) -> dict[str, Runner]:
        return loaded(runtime, folder, variant.components.values(), ops, threads=count)

    rates: dict[tuple[str, str], dict[int, float]] = {}
    with progress_of("threads", len(works)) as advance:
        for variant in folder.variants:
            advance(0, variant.name)
            own = works[variant.name]
            rates |= measure_threads(variant, own, counts(runtime, share), load)
            advance()
    # All variants answer each sample, one after the other.
    per_second = 1 / sum(1 / rates[own[0].key][share] for own in works.values())
    _announce(options, per_second)
    scores, asked = scores_within(
        models,
        asked,
        lambda: folder.checkpoint,
        per_second=per_second,
        deadline=deadline.part(_SCORING_SHARE),
    )
    results = {score.variant: score for score in scores}
    threads = Threads(share, rates)
    models = opened_with(models, folder.variants, threads, load)
    asked = replace(asked, data=data)
    samples = {name: result.samples for name, result in results.items()}
    policies = policy_works(folder, models, runtime, asked, samples)
    served = served_policies_of(policies, folder.variants) if options.server else ServedPolicies()
    works = _works(folder.variants, models, inputs)
    return Workload(folder, models, results, works, policies, served, ops, threads, asked, deadline)


def _default_data(
    models: Sequence[EvaluatedModel], asked: EvaluateOptions, folder: ArtefactFolder
) -> str:
    """Return the name of the data that is scored if none is given."""
    first, *_ = scores_of(models[:1], replace(asked, limit=2), lambda: folder.checkpoint)
    return first.data


def _works(
    variants: Sequence[VariantFiles],
    models: Sequence[EvaluatedModel],
    inputs: Mapping[str, Inputs],
) -> dict[str, list[Work]]:
    works = {}
    for variant, model in zip(variants, models, strict=True):
        runners = {role: component.run for role, component in model.components.items()}
        works[variant.name] = works_of(variant, inputs[variant.name], runners)
    return works


def _announce(options: BenchOptions, per_second: float) -> None:
    """Say how long it may take; the speeds of single rounds follow from the rates."""
    note(
        f"bench: all variants together answer {per_second:.3g} samples per second. It stops when "
        f"the intervals are narrow, at the latest after about {duration_text(options.seconds)}, of "
        f"which scoring may take {duration_text(_SCORING_SHARE * options.seconds)} (--seconds)."
    )


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
