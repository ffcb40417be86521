# SPDX-License-Identifier: Apache-2.0
"""`saccade predict`: answers of an artefact folder about images, without a server."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from saccade.core.errors import SaccadeError
from saccade.core.files import refuse_existing, write_atomically
from saccade.core.options import Options, flag
from saccade.core.sizes import counted
from saccade.exporter.runtimes.runtime import DEFAULT
from saccade.serving.client.answers import answers_csv
from saccade.serving.client.call_options import (
    AnswerOptions,
    CallOptions,
    CaptionOptions,
    ClassifyOptions,
    EmbedOptions,
    SegmentOptions,
    Top,
)
from saccade.serving.client.router_view import RouterView
from saccade.serving.commands import calls
from saccade.serving.commands.command import Answer, Artefacts, Images, Result
from saccade.serving.repository.runtimes.registry import ServedName

Task = Literal["classify", "answer", "caption", "segment", "embed"]


@dataclass(frozen=True)
class PredictOptions(Options):
    """Options of predict: those of the command that asks a server for the same answers."""

    task: Task | None = None  # kind of answer; default: the model's main one
    # use the largest variant within this budget: a number, or a name such as fast or t2
    budget: float | str | None = None
    min_score: float | None = None  # fastest variant whose lower 95 % bound is at least this
    max_latency_ms: float | None = None  # use the best variant with a measured p95 of at most this
    policy: str | None = None  # follow the policy of this name, written by `saccade calibrate`
    max_risk: float | None = None  # follow the cheapest policy certified for it; 0: full model
    # answer: refuse a question with words that the model does not know; with a policy: refuse if
    # an answer would not be certified
    strict: bool = False
    top: Top = 3  # classify and answer: labels per image
    labels: Path | None = None  # zero-shot: a text file with one label per line
    templates: Path | None = None  # with --labels: one prompt per line, with {} for the label
    question: str = ""  # answer: the question, the same for all images
    space: str | None = None  # embed: map into the space of the variant of this budget or name
    texts: Path | None = None  # embed, instead of images: a file with one sentence per line
    truncate: bool = False  # answer and embed: cut texts that are longer than the model reads
    beam: int | None = None  # caption: sentences kept at each step
    max_length: int | None = None  # caption: maximum number of words
    end: str | None = None  # caption: word that ends a sentence
    seed: int = 0  # segment: seed for the positions where the slots start
    slots: int | None = None  # segment: number of slots; default: as in training
    # embed: file for the vectors, by default embeddings.npz; segment: folder for the masks; others:
    # a .csv file for the answers
    out: Path | None = None
    raw: bool = False  # segment: write only the slots, as a PNG in which each index is a slot
    append: bool = False  # embed: add to an existing file of the same space
    force: bool = False  # replace existing files
    # onnxruntime or openvino, or tensorrt, whose plans run on GPUs
    runtime: ServedName = DEFAULT
    engines: tuple[str, ...] = ()  # with tensorrt: folders of `saccade build`, one per kind of GPU
    # gpu: ONNX Runtime's CUDA provider; default: cpu, for plans gpu
    instances: Literal["cpu", "gpu"] | None = None
    # use only these, such as fp32,int8; default: all in the folder
    precisions: tuple[str, ...] = ()
    device: str | None = None  # device whose measurements to use, if the folder has several
    threads: int | None = (
        None  # threads of one run; default: all cores, or as many as measured to pay
    )
    max_images: int | None = None  # most images per run of a plan; default: 64


@dataclass(frozen=True)
class _AnswerKind:
    """One kind of answer: the options of its command, and how to get it over a connection."""

    options: type[CallOptions]
    ask: Callable[[Sequence[Path], Any, calls.Connect], Answer]


_KINDS: Mapping[str, _AnswerKind] = {
    "classify": _AnswerKind(ClassifyOptions, calls.classification),
    "answer": _AnswerKind(AnswerOptions, calls.answers_to),
    "caption": _AnswerKind(CaptionOptions, calls.captions),
    "segment": _AnswerKind(SegmentOptions, calls.segmentation),
    "embed": _AnswerKind(EmbedOptions, calls.embedding),
}
_OF_THE_MODEL = ("runtime", "engines", "instances", "precisions", "device", "threads", "max_images")


def predict(folder: Artefacts, image: Images, options: PredictOptions) -> Result:
    """Answer about images without a server, from an artefact folder.

    Examples:
        # answer about images without a server
        saccade predict build/digits-sum cat.png dog.png
        # use at most a quarter of the budget
        saccade predict build/digits-sum cat.png --budget 0.25
    """
    from saccade.serving.local.artefact import load_artefact

    follows = options.policy is not None or options.max_risk is not None
    # A policy is certified for labels that its router knows; else they belong to the request.
    labels: dict[str, Any] = (
        {"labels": options.labels, "templates": options.templates} if follows else {}
    )
    own = {name: getattr(options, name) for name in _OF_THE_MODEL}
    spaces = follows or options.space is not None
    with load_artefact(folder, policies=spaces, **own, **labels) as model:
        view = model.view()
        task = _task_of(view, options)
        given = {name: value for name, value in _given(options) if name not in labels}
        table = _table_of(task, given)
        _check_used(task, given, view)
        kind = _KINDS[task]
        answer = kind.ask(image, kind.options(view.model, **given), lambda: nullcontext(model))
    return answer if table is None else _written(answer, table, options.force)


def _table_of(task: str, given: dict[str, Any]) -> Path | None:
    """Take --out from the options of an answer that is text; None if it is not given.

    Raises: SaccadeError if it is not the name of a CSV file or exists, or for arrays in CSV.
    """
    out, force = given.get("out"), given.get("force", False)
    is_table = out is not None and out.suffix.lower() == ".csv"
    if task in ("embed", "segment"):
        if is_table:
            raise SaccadeError(
                f"--out {out}: found a CSV file for --task {task}, expected "
                f"{'an .npz file: embeddings' if task == 'embed' else 'a folder: masks'} are "
                "arrays. Choose another --out."
            )
        return None
    if out is None:
        return None
    if not is_table:
        raise SaccadeError(f"--out {out}: expected a name that ends in .csv for --task {task}.")
    refuse_existing(out, force=force)
    given.pop("out")
    given.pop("force", None)
    return Path(out)


def _written(answer: Answer, out: Path, force: bool) -> Answer:
    write_atomically(out, answers_csv(answer.data), replace=force)
    refused = [row for row in answer.data if "error" in row]
    count = len(answer.data) - len(refused)
    data = {"out": str(out), "images": count, "refused": refused}
    return Answer(data, f"{out}: {counted(count, 'answer')}", answer.exit_code)


def _task_of(view: RouterView, options: PredictOptions) -> str:
    """Return the kind of answer: the one asked for, or the one that other options belong to.

    Raises: SaccadeError if the model does not answer in this way.
    """
    if options.task is None and "tokens" in view.inputs("text"):
        if options.labels is not None:
            return "classify"
        if options.texts is not None:
            return "embed"
    able = view.tasks
    if options.labels is not None and "tokens" in view.inputs("text"):
        able = (*able, "classify")
    task: str | None = options.task or (able[0] if able else None)
    if task is None or task not in able:
        raise SaccadeError(
            f"--task is {task}, but {view.model} is a model of family {view.family}, which "
            f"answers {' or '.join(able) or 'nothing about images'}. Leave --task out, or choose "
            "another model."
        )
    return task


def _given(options: PredictOptions) -> Iterator[tuple[str, Any]]:
    """Yield the options of the request that differ from their defaults."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name not in ("task", *_OF_THE_MODEL) and value != field.default:
            yield field.name, value


def _check_used(task: str, given: Mapping[str, Any], view: RouterView) -> None:
    """Refuse options that this kind of answer does not have.

    Raises: SaccadeError that names the first one, and the kinds of answers that have it.
    """
    for name in given:
        having = [
            kind
            for kind, one in _KINDS.items()
            if name in {field.name for field in fields(one.options)}
        ]
        if task not in having:
            raise SaccadeError(
                f"{flag(name)} is an option of {' and '.join(having)}, but "
                f"--task is {task} for {view.model}. Drop the option, or pass another --task."
            )
