# SPDX-License-Identifier: Apache-2.0
"""`saccade calibrate`: chains of variants that stop early, certified on the user's own data."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError, require
from saccade.core.machine import this_machine
from saccade.core.progress import Report, bar, reporting
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FrontierEntry, cost_shares
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.artefact.precedence import chosen_place, runtime_name
from saccade.exporter.artefact.variant import PRECISIONS
from saccade.exporter.evaluation.calibration_samples import AnsweredSamples, Variants, answered
from saccade.exporter.evaluation.decisions import Decisions, Segments
from saccade.exporter.evaluation.embedding_samples import TASK, embedding_task
from saccade.exporter.evaluation.evaluated_model import (
    subjects_of_folder,
    trained_on,
)
from saccade.exporter.evaluation.tasks import tasks_of
from saccade.exporter.policy.answers import Answers
from saccade.exporter.policy.certify import Certificate, MissingCertificate, certify
from saccade.exporter.policy.classes import OTHERS, certify_classes, class_samples
from saccade.exporter.policy.maps import SpaceMap
from saccade.exporter.policy.options import MIN_ARI, CalibrateOptions
from saccade.exporter.policy.policy import (
    Policy,
    PolicyFile,
    check_kind,
    policy_of,
    texts_sha256,
    with_answers,
    write_policies,
)
from saccade.exporter.runtimes.runtime import runtime_named
from saccade.models.entry import EvaluationTask

_MOST_ROWS = 10  # classes in a table for a terminal

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Calibration:
    """The policies that were certified and written, and the risks that were not."""

    path: Path | None  # None: nothing was certified, so nothing was written
    content: PolicyFile | None
    refused: tuple[MissingCertificate, ...]
    maps: tuple[SpaceMap, ...] = ()  # of embeddings

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The certified policies, in the order of the risks."""
        return () if self.content is None else self.content.policies

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "path": None if self.path is None else str(self.path),
            "calibration": None if self.content is None else self.content.to_dict(),
            "refused": [vars(one) for one in self.refused],
            **({"maps": [asdict(one) for one in self.maps]} if self.maps else {}),
        }

    @property
    def exit_code(self) -> int:
        """1 if a risk was not certified."""
        return 1 if self.refused else 0

    def to_text(self) -> Any:
        """A row per policy, for a terminal."""
        return rendered(self.content, self.refused, self.maps)


def calibrate(
    folder: ArtefactFolder | Path | str,
    options: CalibrateOptions,
    *,
    progress: Report | None = bar,
) -> Calibration:
    """Certify the cheapest chain of variants for each risk, and write the policies.

    The policies and the answers they were made from are written beside `frontier.json`. A
    certificate is valid only for traffic that is like the data.

    Raises: SaccadeError if the model's family cannot stop early, nothing was measured, the data
        does not fit or is too small for any certificate. GateFailed is not raised: a risk that the
        data does not certify is in `refused`.
    """
    folder = ArtefactFolder.open(folder)
    if options.embedding:
        task, how = TASK, embedding_task(folder)
        _check_choice(folder)
    else:
        task, how = _task(folder)
    _check_comparison(folder, how, options)
    check_kind(folder.path, options.name, embeds=options.embedding)
    require("scipy.stats", extra="bench")
    measured = _measured(folder, options)
    full = _full(folder, measured, options)
    runtime = runtime_named(options.runtime)
    runtime.require()
    if options.data is None:
        options = replace(options, data=trained_on(folder.checkpoint))
    with reporting(progress):
        models = subjects_of_folder(folder, runtime, kernels=options.op_library)
        models = [model for model in models if model.name in measured]
        asked = answered(Variants(folder, tuple(models), measured, full), how, options)
    names = _class_names(folder, asked) if options.per_class else None
    search = partial(certify_classes, names=names) if names else certify
    certified = search(
        asked.answers,
        options.risk,
        confidence=options.confidence,
        against=options.against,
        steps=options.steps,
    )
    refused = tuple(one for one in certified if isinstance(one, MissingCertificate))
    maps = () if asked.neighborhood is None else asked.neighborhood.maps
    passed = [one for one in certified if isinstance(one, Certificate)]
    if not passed:
        return Calibration(None, None, refused, maps)
    content = _content(folder, options, task, asked, measured[full], passed)
    content = replace(content, class_names=names)
    content, arrays = with_answers(content, asked.answers)
    folder.check_files()
    path = write_policies(folder.path, content, arrays)
    return Calibration(path, content, refused, maps)


def _content(
    folder: ArtefactFolder,
    options: CalibrateOptions,
    task: str,
    asked: AnsweredSamples,
    entry: FrontierEntry,
    passed: Sequence[Certificate],
) -> PolicyFile:
    """Return the policies without their answers' hash; `entry` is the full model's measurement."""
    data, answers = asked.data, asked.answers
    return PolicyFile(
        name=options.name,
        model=folder.model,
        task=task,
        against=options.against,
        confidence=options.confidence,
        most_steps=options.steps,
        data=data.data,
        data_sha256=data.data_sha256,
        split=options.split,
        seed=options.seed,
        samples=answers.n,
        learn=answers.learn,
        runtime=entry.runtime,
        device=entry.device,
        full=answers.variants[answers.full].variant,
        variants=answers.variants,
        answers_sha256="",
        policies=tuple(policy_of(options.policy_name(one.risk), one, answers) for one in passed),
        **_comparison(data, answers, options),
        **_choice(asked.chose, options),
        **(vars(asked.neighborhood) if asked.neighborhood else {}),
    )


def _comparison(
    data: Decisions | Segments, answers: Answers, options: CalibrateOptions
) -> dict[str, Any]:
    """The fields of a policy file that only segmentations or zero-shot labels have."""
    if answers.agreement is not None:
        return {"min_ari": options.min_ari or MIN_ARI}
    if isinstance(data, Decisions) and data.labelling is not None:
        labels, templates = data.labelling
        return {"labels_sha256": texts_sha256(labels), "templates_sha256": texts_sha256(templates)}
    return {}


def _choice(chose: Decisions | Segments | None, options: CalibrateOptions) -> dict[str, Any]:
    """The fields of a policy file that chains chosen on other data have."""
    if chose is None:
        return {}
    split = options.choose_split or "all"
    return {
        "choose_data": chose.data, "choose_data_sha256": chose.data_sha256, "choose_split": split,
    }  # fmt: skip


def _class_names(folder: ArtefactFolder, asked: AnsweredSamples) -> tuple[str, ...]:
    """The names of all classes; those of a model without names are their places."""
    labelling = asked.data.labelling if isinstance(asked.data, Decisions) else None
    names = labelling[0] if labelling else folder.variants[0].labels
    count = int(asked.answers.classes.max()) + 1
    return names if len(names) >= count else tuple(map(str, range(count)))


def _task(folder: ArtefactFolder) -> tuple[str, EvaluationTask]:
    """The first task of the family in which answers of variants can be compared.

    Raises: SaccadeError for a family without such a task, or a folder with a single variant.
    """
    family = folder.manifests[0].variant.family
    for name, task in tasks_of(family).items():
        if task.decide or task.segments:
            _check_choice(folder)
            return name, task
    raise SaccadeError(
        f"{folder}: family '{family}' cannot stop early: its variants do not choose one of several "
        "classes, so saccade cannot tell whether two of them give the same answer. Calibrate a "
        "model that classifies (also zero-shot), answers questions or segments images."
    )


def _check_comparison(
    folder: ArtefactFolder, task: EvaluationTask, options: CalibrateOptions
) -> None:
    """Check that the answers can be compared as requested.

    Raises: SaccadeError if not.
    """
    if task.segments and options.against == "labels":
        raise SaccadeError(
            f"--against labels: {folder} segments images, and its slots have no labels that could "
            "be right or wrong. Pass --against full, which compares with the full model."
        )
    if options.per_class and not task.decide:
        raise SaccadeError(
            f"--per-class: certifies each class, but {folder} does not answer with classes. Drop "
            "it, or calibrate a model that classifies."
        )
    if options.templates is not None and "text" not in task.roles:
        raise SaccadeError(
            f"--templates {options.templates}: turns class names into sentences for zero-shot "
            f"models, but {folder} has classes or slots of its own. Drop it."
        )
    if options.min_ari is not None and not task.segments:
        raise SaccadeError(
            f"--min-ari {options.min_ari:g}: compares segmentations, but {folder} answers with "
            "classes, which are equal or not. Drop it."
        )


def _check_choice(folder: ArtefactFolder) -> None:
    """Check that easy samples can stop earlier than hard ones.

    Raises: SaccadeError for a folder with a single variant.
    """
    if len(folder.variants) == 1:
        checkpoint = shlex.quote(str(folder.path / folder.manifests[0].parent.name))
        raise SaccadeError(
            f"{folder}: found 1 variant ({folder.variants[0].name}), expected at least two, so "
            "that easy samples can stop at a cheaper one. Export more budgets, or smaller images "
            f"(--budget r224,r160): saccade export {checkpoint} --budget 1,0.5,0.25 --out "
            f"{shlex.quote(str(folder))} --force"
        )


def _measured(folder: ArtefactFolder, options: CalibrateOptions) -> dict[str, FrontierEntry]:
    """What was measured of each variant with one runtime on one machine, by the variant's name.

    Raises: SaccadeError if nothing was measured with the runtime that answers, or on several
        machines of which none is named.
    """
    shas = {variant.sha256: variant.name for variant in folder.variants}
    every = folder.frontier.entries if folder.frontier else ()
    every = tuple(entry for entry in every if entry.sha256 in shas)
    entries = [entry for entry in every if runtime_name(entry.runtime) == options.runtime]
    machines = sorted({(entry.device, entry.runtime) for entry in entries})
    here = this_machine(runtime_named(options.runtime).label())
    chosen = chosen_place(machines, options.device, (here.device, here.runtime))
    if not entries:
        others = " and ".join(sorted({entry.runtime for entry in every}))
        what = (
            f"was measured with {others}, not with {options.runtime}"
            if others
            else ("nothing was measured")
        )
        raise SaccadeError(
            f"{folder}: {what}, but a policy is the cheapest by measured time. "
            f"Run: {_bench_command(folder, options)}"
        )
    if chosen is None:
        listed = "; ".join(f"{own} ({runtime})" for own, runtime in machines)
        named = f"--device is {options.device!r}" if options.device else "no --device is given"
        raise SaccadeError(
            f"{folder}: was measured on {listed}, but {named}. Name one of these machines with "
            "--device."
        )
    return {
        shas[entry.sha256]: entry for entry in entries if (entry.device, entry.runtime) == chosen
    }


def _bench_command(folder: ArtefactFolder, options: CalibrateOptions) -> str:
    """A command that measures the folder, to paste into a shell."""
    report = folder.path.with_name(f"{folder.path.name}-report")
    measured = f"{shlex.quote(str(folder))} --runtime {options.runtime}"
    if options.data is not None:
        measured += f" --data {shlex.quote(options.data)} --split {options.split}"
    return f"saccade bench {measured} --out {shlex.quote(str(report))}"


def _full(
    folder: ArtefactFolder, measured: Mapping[str, FrontierEntry], options: CalibrateOptions
) -> str:
    """The variant that the others are compared with: of the largest budget, the most precise.

    In a group, a cheaper one may be better: then it is the most expensive one that no other
    dominates.

    Raises: SaccadeError if it was not measured.
    """
    budgets = cost_shares(folder.variants, measured)

    def rank(variant: VariantFiles) -> tuple[bool, bool, float, int]:
        entry = measured.get(variant.name)
        dominated = variant.in_group and entry is not None and entry.dominated_by is not None
        precision = PRECISIONS.index(variant.main.variant.precision)
        return not variant.main.step_only, not dominated, budgets[variant.name], -precision

    full = max(folder.variants, key=rank)
    if full.name not in measured:
        raise SaccadeError(
            f"{folder}: {full.name}, the full model, was not measured. "
            f"Run: {_bench_command(folder, options)} --force"
        )
    return full.name


def rendered(
    content: PolicyFile | None,
    refused: Sequence[MissingCertificate],
    maps: Sequence[SpaceMap] = (),
) -> "Group":
    """Return a row per map and per policy, then what was not certified and why."""
    from rich.console import Group
    from rich.text import Text

    parts: list[object] = [Text(str(one), "" if one.used else "red") for one in maps]
    parts += [] if content is None else [_table(content)]
    if content is not None and content.class_names is not None:
        for policy in content.policies:
            parts += _classes(content, policy) if policy.classes else []
    parts += [Text(line, "red") for line in map(refusal, refused)]
    return Group(*parts)  # type: ignore[arg-type]


def _table(content: PolicyFile) -> object:
    from rich import box
    from rich.table import Table

    loss = "answers other than the full model's"
    if content.against == "labels":
        loss = "loss of accuracy against the full model"
    elif content.min_ari is not None:
        loss = f"segmentations with an ARI below {content.min_ari:g} to the full model's"
    elif content.embeds:
        loss = f"nearest neighbors, in {content.vectors:,} vectors, other than the full model's"
    tested = content.samples - content.learn
    samples = f"{tested:,} of {content.samples:,} samples of {content.data}"
    if content.choose_data is not None:
        samples = f"{tested:,} samples of {content.data}, chosen on {content.learn:,} others"
    table = Table(
        title=f"{loss}: certified on {samples}",
        box=box.SIMPLE,
        padding=(0, 1),
        caption=(
            f"Traffic like this data loses at most the risk, with {100 * content.confidence:g} % "
            "confidence. Observed: what these samples lost. Bound: that with a margin for luck. "
            f"Speed: as measured on {content.device}, {content.runtime}."
        ),
        caption_justify="left",
    )
    table.add_column("policy", no_wrap=True)
    table.add_column("chain: share of the samples that end there")
    for heading in ("risk", "observed", "bound", "times the full\nmodel's speed"):
        table.add_column(heading, justify="right")
    for policy in content.policies:
        table.add_row(
            policy.name,
            _chain(policy),
            *(f"{100 * share:.2f} %" for share in (policy.risk, policy.observed, policy.bound)),
            f"{policy.full_seconds / policy.seconds:.1f}",
        )
    return table


def _classes(content: PolicyFile, policy: Policy) -> list[object]:
    """Return the classes of a policy that are nearest to its risk, beside all samples together."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    own = [one for one in policy.classes if one.name != OTHERS]
    others, every = policy.classes[len(own) :], len(content.class_names or ())
    least = class_samples(policy.risk, content.confidence, content.against)
    risk = f"at most {100 * policy.risk:g} %"
    lines = f"{policy.name}: {len(own):,} of {every:,} classes lose {risk} each, as do all."
    if len(own) > _MOST_ROWS:
        lines += f" The {_MOST_ROWS} nearest to it; --json has all."
    if rest := every - len(own):
        lines += (
            f"\nThe other {rest:,} have fewer than {least:,} samples that certify: only the full "
            "model answers with them.\nA step before may answer their samples with a certified "
            f"class: {f'{risk} of them together' if others else 'without a limit'}."
        )
    table = Table(box=box.SIMPLE, padding=(0, 1))
    table.add_column("class")
    for heading in ("samples", "observed", "bound"):
        table.add_column(heading, justify="right")
    shown = (*sorted(own, key=lambda one: -one.bound)[:_MOST_ROWS], *others)
    rows = [(one.name, one.samples, one.observed, one.bound) for one in shown]
    tested = content.samples - content.learn
    for name, n, *shares in (("all samples", tested, policy.observed, policy.bound), *rows):
        table.add_row(name, f"{n:,}", *(f"{100 * share:.2f} %" for share in shares))
    return [Text(lines), table]


def _chain(policy: Policy) -> str:
    return "\n".join(f"{step.variant}: {step.share:.0%}" for step in policy.steps)


def refusal(one: MissingCertificate) -> str:
    """Return why no policy of a risk was certified, and what to do."""
    if one.bound <= one.risk:
        return (
            f"risk {one.risk:g}: the cheapest chain that meets it is not faster than the full "
            "model, as measured in frontier.json. If that was measured on a busy machine, measure "
            "again with `saccade bench`; otherwise pass a larger --risk, or export smaller budgets."
        )
    of = f" of {one.worst}" if one.worst else ""
    start = (
        f"risk {one.risk:g}: not certified for anything cheaper than the full model. The bound "
        f"reached{of} is {one.bound:.4f}"
    )
    if one.samples is None:
        return f"{start}, and no number of such samples would do. Pass a larger --risk."
    return f"{start}; {one.samples:,} samples{of} would do. Pass more data, or a larger --risk."
