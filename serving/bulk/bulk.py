# SPDX-License-Identifier: Apache-2.0
"""Bulk inference: answer every input of a source once, and write a Parquet data set."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import saccade
from saccade.core.errors import GateFailed, SaccadeError, require
from saccade.core.files import json_bytes
from saccade.core.leftovers import only_writer, temporary_folder
from saccade.core.progress import Report, bar, pace, progress_of, reporting
from saccade.core.sizes import counted
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.model_repository.router.routes import PolicyRoute
from saccade.serving.bulk import runners
from saccade.serving.bulk.answers import AnswerForm, form_of
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.bulk.place import EXTRA, Place
from saccade.serving.bulk.plan import (
    ANSWERS,
    CSV,
    ERRORS,
    MANIFEST,
    SCHEMA,
    SUCCESS,
    VERSION,
    BulkPlan,
    Columns,
    ModelInputs,
    check_same,
    hash_of,
    index_of,
    part_name,
    read_plan,
    write_plan,
)
from saccade.serving.bulk.shard import QUESTION, BulkJob, FinishedShard
from saccade.serving.bulk.sources import BulkSource
from saccade.serving.client.router_view import RouterView
from saccade.serving.client.wire import choice
from saccade.serving.local.in_process import view_in
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.policies import policies_of
from saccade.serving.repository.preflight.repository import open_repository
from saccade.serving.repository.runtimes.tensorrt import MAX_IMAGES_FLAG, SmallProfile

ASKS = ("classify", "answer", "segment")  # answers of different variants can be compared
_PARAMETERS = ("policy", "max_risk", "strict")

_OWN = ("beam", "max_length", "slots", "seed")


@dataclass(frozen=True)
class BulkReport:
    """Report of a finished job."""

    out: str
    variant: str
    answers: int
    errors: int
    kept: int  # answers and errors of shards that an earlier run finished
    seconds: float
    csv: bool = False  # whether the answers are also there as CSV

    @property
    def per_second(self) -> float:
        """Inputs per second of this run."""
        return (self.answers + self.errors - self.kept) / max(1e-9, self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "inputs_per_second": self.per_second}

    def to_text(self) -> str:
        """Return the report as text for a terminal."""
        new = self.answers + self.errors - self.kept
        kept = f", {self.kept:,} of them from an earlier run" if self.kept else ""
        speed = f"in {self.seconds:.1f} s ({self.per_second:,.0f} per second)"
        lines = [
            f"{counted(self.answers, 'answer')} by {self.variant} and "
            f"{counted(self.errors, 'error')}{kept}. This run processed "
            f"{counted(new, 'input')} {speed}.",
            f"{self.out}/{ANSWERS}: the answers, a Parquet data set",
            *([f"{self.out}/{CSV}: the same as CSV"] if self.csv else []),
        ]
        if self.errors:
            lines.append(f"{self.out}/{ERRORS}: the id of each unanswered input, with the reason")
        return "\n".join(lines)


def bulk(
    artefact: ArtefactFolder | Path | str, options: BulkOptions, *, progress: Report | None = bar
) -> BulkReport:
    """Answer every input of a source once, and write the answers as Parquet.

    To resume an interrupted job, make the same call again: finished shards are not repeated.

    Raises: SaccadeError if there is no input, an id occurs twice, `out` contains a different job,
        the model cannot answer `ask`, or a shard fails; GateFailed with more errors than
        `max_errors`; MissingPackage.
    """
    require("pyarrow", extra=EXTRA)
    artefact, out = ArtefactFolder.open(artefact), Place(options.out)
    Place(options.input).reach("--input")
    if options.data_root is not None:
        root = Place(options.data_root)
        root.reach("--data-root")
        if not root.exists():
            raise SaccadeError(f"{root}: no such folder. Name one that exists with --data-root.")
    out.reach("--out")
    began = time.monotonic()
    with (
        reporting(progress),
        runners.runner_of(options) as runner,
        _only_one(out),
        temporary_folder("bulk") as place,
    ):
        repository = _repository(artefact, place / "repository", options, runner)
        plan = _planned(artefact, repository, out, options)
        left, kept = _left(out, plan)
        job = BulkJob(options.out, str(repository))
        counts = _run(job, plan, left, kept, options, runner)
        return _finished(out, plan, counts, sum(kept), began)


def _repository(
    artefact: ArtefactFolder, out: Path, options: BulkOptions, runner: runners.Runner
) -> Path:
    """Write the repository that answers, and check that this machine's GPUs can run it."""
    try:
        deploy(artefact, options.repository(out, runners.threads_of(options)))
    except SmallProfile as error:
        raise SmallProfile(str(error).replace(MAX_IMAGES_FLAG, "--batch")) from error
    if runner.gpus:
        for model in open_repository(out).models:
            model.served.check_gpus(model, runner.gpus)
    return out


def _engines(repository: Path) -> dict[str, str]:
    return {
        f"{model.name} {capability}": engine.file.sha256
        for model in open_repository(repository).models
        for capability, engine in model.engines.items()
    }


def _planned(
    artefact: ArtefactFolder, repository: Path, out: Place, options: BulkOptions
) -> BulkPlan:
    view = view_in(repository / artefact.model)
    routes, parameters = _routes(repository, artefact.model), _parameters(options)
    followed = without_policy(parameters) != parameters
    form = form_of(
        view, options.ask, options.top, options.dtype, csv=options.csv, by_policy=followed
    )
    check_followed(parameters, view, form)
    old = read_plan(out)
    columns = Columns(options.column, options.id_column, options.question_column)
    wanted = _wanted(view, form.ask, routes["preprocessing"])
    listed = BulkSource(Place(options.input), columns, wanted, options.data_root).entries()
    plan = BulkPlan(
        schema=SCHEMA,
        version=VERSION,
        model=artefact.model,
        variant=_chosen(repository, artefact.model, without_policy(parameters), _given(options)),
        sha256={variant.name: variant.sha256 for variant in artefact.variants},
        runtime=options.runtime,
        processor="gpu" if options.on_gpu else "cpu",
        engines=_engines(repository),
        policies_sha256=policies_sha256(policies_of(routes)),
        input=options.input,
        listing_sha256=hash_of(listed),
        inputs=listed.num_rows,
        shard=options.shard,
        batch=options.batch,
        parameters=parameters,
        form=form,
        columns=columns,
        wanted=wanted,
        data_root=options.data_root,
    )
    if old is None:
        write_plan(out, plan, listed)
    else:
        check_same(out, old, plan)
    return plan


def _run(
    job: BulkJob,
    plan: BulkPlan,
    left: list[int],
    kept: tuple[int, int],
    options: BulkOptions,
    runner: runners.Runner,
) -> tuple[int, int]:
    """Run the shards; return the final numbers of answers and errors, including `kept`."""
    answers, errors = kept
    _check_errors(errors, options)
    if not left:
        return answers, errors
    began, done_here, begun = time.monotonic(), 0, dict[int, int]()
    with progress_of("bulk", plan.inputs) as advance, closing(runner.run(job, left)) as results:
        advance(answers + errors)
        for done in results:
            if isinstance(done, FinishedShard):
                answers, errors = answers + done.answers, errors + done.errors
                inputs = done.answers + done.errors - begun.pop(done.shard, 0)
            else:
                inputs = done.inputs - begun.get(done.shard, 0)
                begun[done.shard] = done.inputs
            done_here += inputs
            advance(inputs, f"{pace(done_here, began)} per second, {counted(errors, 'error')}")
            _check_errors(errors, options)
    return answers, errors


def _check_errors(errors: int, options: BulkOptions) -> None:
    if options.max_errors is not None and errors > options.max_errors:
        raise GateFailed(
            f"{counted(errors, 'input')} could not be answered, but --max-errors allows "
            f"{options.max_errors}. See {Place(options.out).join(ERRORS)} for the reasons. "
            "Finished shards are kept: to resume, run the same command with a larger --max-errors."
        )


def _left(out: Place, plan: BulkPlan) -> tuple[list[int], tuple[int, int]]:
    """Return the shards without a file of answers, and the answers and errors of the others."""
    done = {index_of(name) for name, _ in out.join(ANSWERS).files() if name.startswith("part-")}
    wrong = {index_of(name) for name, _ in out.join(ERRORS).files() if name.startswith("part-")}
    inputs = sum(min(plan.shard, plan.inputs - index * plan.shard) for index in done)
    errors = sum(_errors(out, index) for index in done & wrong)
    return sorted(set(range(plan.shards)) - done), (inputs - errors, errors)


def _errors(out: Place, index: int) -> int:
    import pyarrow.parquet as pq

    with out.join(f"{ERRORS}/{part_name(index)}").open() as file:
        return int(pq.ParquetFile(file).metadata.num_rows)


def _finished(
    out: Place, plan: BulkPlan, counts: tuple[int, int], kept: int, began: float
) -> BulkReport:
    answers, errors = counts
    if answers + errors != plan.inputs:
        raise SaccadeError(
            f"{out}: has {counted(answers, 'answer')} and {counted(errors, 'error')}, expected "
            f"{plan.inputs:,} in all: its files were changed. Choose another --out."
        )
    seconds = time.monotonic() - began
    by = answered_by(plan.variant, plan.parameters)
    report = BulkReport(str(out), by, answers, errors, kept, round(seconds, 3), plan.form.csv)
    manifest = {**asdict(plan), **report.to_dict(), "saccade": saccade.__version__}
    out.join(MANIFEST).write(json_bytes(manifest))
    out.join(SUCCESS).write(f"{answers + errors}\n".encode())
    return report


def _routes(repository: Path, model: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((repository / model / "1" / "routes.json").read_bytes())
    return content


def _chosen(repository: Path, model: str, parameters: dict[str, str], own: list[str]) -> str:
    """Return the variant that the router will choose.

    Raises: SaccadeError with the router's message if it would refuse.
    """
    router: Any = "saccade.model_repository.router"
    routes = import_module(f"{router}.routes").read_routes(repository / model / "1" / "routes.json")
    choose = import_module(f"{router}.choose")
    try:
        return str(choose.choose(routes, parameters, tuple(own)).name)
    except choose.RequestRefused as error:
        raise SaccadeError(f"--budget {parameters.get('budget')}: {error}") from None


def _parameters(options: BulkOptions) -> dict[str, str]:
    followed = options.policy is not None or options.max_risk is not None
    # All answers of a job are certified: if a variant fails, the job fails and can be resumed.
    by = choice(options.budget, policy=options.policy, max_risk=options.max_risk, strict=followed)
    return by | {name: str(getattr(options, name)) for name in _given(options)}


def _given(options: BulkOptions) -> list[str]:
    return [name for name in _OWN if getattr(options, name) is not None]


def _wanted(view: RouterView, ask: str, images: Mapping[str, Any] | None) -> ModelInputs:
    component = view.components[view.main_role]
    names = [spec["name"] for spec in component["inputs"]]
    encoded = tuple(name for name in names if name in component["encoded"])
    optional = component.get("optional", ())
    question = QUESTION in names and ask == "answer"
    beside = {*encoded, *optional, *([QUESTION] if question else [])}
    numbers = tuple(name for name in names if name not in beside)
    most = {"max_image_mib": images["max_image_mib"]} if images else {}
    return ModelInputs(encoded, numbers, question, **most)


@contextmanager
def _only_one(out: Place) -> Iterator[None]:
    if not out.is_local:
        yield
        return
    if out.exists() and out.is_file():
        raise SaccadeError(f"{out}: is a file, expected a folder. Choose another one with --out.")
    try:
        out.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaccadeError(
            f"{out}: cannot be written ({error.strerror}). Choose another --out."
        ) from error
    with only_writer(out.path):
        yield


def check_followed(parameters: Mapping[str, str], view: RouterView, form: AnswerForm) -> None:
    """Check that the named policy exists and that this kind of answer can follow one.

    Raises: SaccadeError if not.
    """
    name, risk = (parameters.get(key) for key in _PARAMETERS[:2])
    if name is None and risk is None:
        return
    view.require_policies()
    if name is not None and name not in view.policies:
        raise SaccadeError(
            f"--policy: found {name!r:.60}, expected a policy of {view.model}: "
            f"{', '.join(view.policies)}."
        )
    if form.ask not in ASKS:
        raise SaccadeError(
            f"--ask {form.ask} cannot follow a policy, because these answers of different variants "
            "cannot be compared. Drop the policy, or pass --ask classify."
        )
    if "slots" in parameters:
        raise SaccadeError(
            f"--slots {parameters['slots']} cannot be combined with a policy, which is certified "
            "for the number of slots of the training. Drop one of them."
        )


def without_policy(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a request without those of the policy."""
    return {key: value for key, value in parameters.items() if key not in _PARAMETERS}


def policies_sha256(policies: tuple[PolicyRoute, ...]) -> str:
    """Return the hash of a repository's policies; empty if it has none."""
    if not policies:
        return ""
    return hashlib.sha256(json_bytes([asdict(policy) for policy in policies])).hexdigest()


def answered_by(variant: str, parameters: Mapping[str, str]) -> str:
    """Return the variant or the policy of a job, in words."""
    if "policy" in parameters:
        return f"policy {parameters['policy']}"
    if "max_risk" in parameters:
        return f"the policy of risk {parameters['max_risk']}"
    return variant
