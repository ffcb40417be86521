# SPDX-License-Identifier: Apache-2.0
"""Score accuracy on labeled data: of a classifier, or of an embedding by neighbors and a probe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from saccade.core.checks import did_you_mean
from saccade.core.errors import SaccadeError, ShapeError
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.evaluation.decisions import Decider, Run
from saccade.exporter.evaluation.evaluated_model import DataSplit, EvaluatedModel, origin
from saccade.exporter.evaluation.examples import ExampleAnswers, ExampleSamples, labelled_answers
from saccade.exporter.evaluation.tasks import EvaluateOptions, Inputs
from saccade.models.data.datasets import (
    HELD_OUT,
    Dataset,
    is_unlabelled,
    joined_sha256,
    load_data,
    unlabelled_images,
)
from saccade.models.data.listops import (
    CLASS_NAMES,
    VOCABULARY,
    Expressions,
    Grammar,
    as_bytes,
    listops,
    most_tokens,
)
from saccade.models.data.options import DataOptions
from saccade.models.data.samples.images import Images, pixels_sha256
from saccade.models.data.samples.source import DataDescription
from saccade.models.data.sequences import SampleInputs, sequences
from saccade.models.data.splits import SPLITS, drawn_rows, stratified_split
from saccade.models.data.token_states import SUFFIXES, token_states
from saccade.models.scores.by_class import ClassAnswers
from saccade.models.scores.classification import (
    correct,
    dino_probe_predict,
    knn_predict,
    probe_predict,
)
from saccade.models.scores.results import EvaluationResult, proportion
from saccade.models.sparo.config import PROBE_FEATURES

_TOP5_CLASSES = 6  # with fewer classes, top-5 is nearly always right


@dataclass(frozen=True)
class LabeledInputs(DataSplit):
    """One split of the data in the form of the model's inputs.

    Shapes: inputs [n ...] by name, labels [n] int64.
    """

    inputs: dict[str, np.ndarray]
    labels: np.ndarray
    class_names: tuple[str, ...]
    originals: Images | None = None  # the images as rows of their files

    @property
    def samples(self) -> tuple[str, ...]:
        """Return what the user calls each sample."""
        files = self.originals
        if files is None:
            return tuple(f"sample {row}" for row in range(len(self.labels)))
        return tuple(files.source.row_name(int(row)) for row in files.rows)


def top1(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score the share of samples whose most probable label is correct.

    Raises: SaccadeError if the data's classes differ from the model's.
    """
    data = of_model(model, test_inputs(model, options))
    scores = model.component("")(data.inputs)["logits"]
    right = correct(scores, data.labels)
    proportions = [proportion("top-1", right)]
    if scores.shape[-1] >= _TOP5_CLASSES:
        proportions.append(proportion("top-5", correct(scores, data.labels, top=5)))
    result = model.result("top1", data, proportions, right)
    if options.by_class or options.mistakes:
        given = data.labels, scores.argmax(-1), data.class_names, data.samples
        result = replace(result, answers=ClassAnswers(*given))
    return result


def test_inputs(model: EvaluatedModel, options: EvaluateOptions) -> LabeledInputs:
    """Return the samples for top-1: images, token states or ListOps, depending on the model.

    Raises: SaccadeError if the data does not fit it.
    """
    return split_inputs(model, options, options.split or HELD_OUT)


def split_inputs(model: EvaluatedModel, options: EvaluateOptions, split: str) -> LabeledInputs:
    """The samples of one split, whatever the model takes.

    Raises: SaccadeError if the data does not fit it.
    """
    return _expressions(model, options, split) or labelled_inputs(model, options, split)


def logits_of(model: EvaluatedModel) -> Run:
    """Return a model as a function from inputs to logits."""
    return lambda inputs: model.component("").answer(inputs)["logits"]


def decide(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Decider:
    """Return the model and the samples of one split, with the labels where the data has some.

    Raises: SaccadeError if the data's classes are not the model's.
    """
    if options.data is not None and is_unlabelled(Path(options.data)):
        images = unlabelled_images(Path(options.data), model.images())
        given = logits_of(model), logits_of, {"image": images}, None
        digest = cache(partial(pixels_sha256, images))
        return Decider(*given, name=Path(options.data).name, digest=digest)
    data = of_model(model, split_inputs(model, options, split))
    return Decider(logits_of(model), logits_of, data.inputs, data.labels, **origin(data))


def labelled_inputs(model: EvaluatedModel, options: EvaluateOptions, split: str) -> LabeledInputs:
    """Return one split of labeled images, or of whatever else the model takes.

    Raises: SaccadeError if the data does not fit it.
    """
    taken = SampleInputs.of(
        {spec.name: spec.shape for spec in model.component("", "image").inputs},
        model.runtime_metadata.get("vocabulary", ()),
    )
    if taken.is_image:
        data = labelled_images(model, options, split)
        given = {"image": data.images}, data.labels, data.class_names, data.originals
        return LabeledInputs(*given, **origin(data))
    if options.data is None:
        what = "token states" if taken.kind == "tokens" else taken.kind
        raise SaccadeError(
            f"{model.name}: takes {what}, which saccade cannot generate. Pass --data with your own "
            "(see docs/data.md)."
        )
    return _sequences(options.data, split, taken, options)


def _sequences(
    path: str, split: str, taken: SampleInputs, options: EvaluateOptions
) -> LabeledInputs:
    """Return `limit` samples of one split; token states stay in their file if large."""
    if taken.plain_tokens and Path(path).suffix.lower() in SUFFIXES:
        texts = token_states(path, split, DataDescription.of(options.labels, options.data_root))
        if texts.tokens.shape[1:] != (taken.most, taken.width):
            raise ShapeError(
                f"{path}: token states are {texts.tokens.shape[1:]} (tokens, width), expected "
                f"{(taken.most, taken.width)}. Pass the data that the model was trained on."
            )
        inputs, labels = _limited(texts.inputs, texts.labels, options.limit)
        given = inputs, labels, texts.class_names
        return LabeledInputs(
            *given, name=texts.name, digest=lambda: texts.sha256, split=texts.split
        )
    found = sequences(path, split, taken, options.asked)
    inputs, labels = _limited(found.inputs, found.labels, options.limit)
    return LabeledInputs(inputs, labels, found.class_names, **origin(found))


def _limited(
    inputs: Mapping[str, np.ndarray], labels: np.ndarray, limit: int | None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rows = drawn_rows(len(labels), limit)
    if rows is None:
        return dict(inputs), labels
    return {name: array[rows] for name, array in inputs.items()}, labels[rows]


def labelled_images(model: EvaluatedModel, options: EvaluateOptions, split: str) -> Dataset:
    """Return `limit` images of one split, in the model's size.

    Raises: SaccadeError if the model takes no image.
    """
    data = load_data(
        options.data or "shapes", split, preprocessing=model.images(), asked=options.asked
    )
    return data.first(options.limit)


def of_model(model: EvaluatedModel, data: LabeledInputs) -> LabeledInputs:
    """Return the data with the model's labels: by name, or by number if it has no names.

    The data may lack some of the model's classes, and have them in another order.
    Raises: SaccadeError if samples are of a class that the model does not know.
    """
    names = data.class_names
    if names == model.labels:
        return data
    # Classes without names are numbered, in the order of the model's outputs.
    numbered = names == tuple(str(index) for index in range(len(names)))
    if numbered and len(names) <= len(model.labels) and not {*names} <= {*model.labels}:
        return replace(data, class_names=model.labels)
    index_of = {label: index for index, label in enumerate(model.labels)}
    present = [names[index] for index in np.unique(data.labels)]
    if foreign := [name for name in present if name not in index_of]:
        raise SaccadeError(
            f"{data.name}: found {len(names)} classes ({_first_names(names)}), expected the "
            f"{len(model.labels)} labels of {model.name} ({_first_names(model.labels)}); "
            f"{foreign[0]!r:.80} is none of them.{did_you_mean(foreign[0], model.labels)} Pass "
            "other data with --data, name its classes (for images, their folders) as the labels, "
            "or pass the labels of its classes, in their order, with --labels FILE."
        )
    mapped = np.array([index_of.get(name, -1) for name in names], dtype=np.int64)
    return replace(data, labels=mapped[data.labels], class_names=model.labels)


def _first_names(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _expressions(
    model: EvaluatedModel, options: EvaluateOptions, split: str
) -> LabeledInputs | None:
    """Return ListOps expressions for a model that reads their characters or text, or None."""
    shapes = {spec.name: spec.shape for spec in model.component("").inputs}
    kind = next((name for name in ("characters", "bytes") if name in shapes), None)
    own = options.data not in (None, "listops")
    if kind is None or own or (kind == "bytes" and options.data is None):
        return None
    known = tuple(model.runtime_metadata.get("vocabulary", ()))
    if kind == "characters" and known != VOCABULARY:
        raise SaccadeError(
            f"{model.name}: reads other characters than those of listops. Pass --data with your "
            "own (see docs/data.md)."
        )
    split = {HELD_OUT: "test", "val": "validation"}.get(split, split)
    parts = SPLITS if split == "all" else (split,)
    drawn = [_drawn(kind, int(shapes[kind][1]), part, options.limit) for part in parts]
    most = slice(options.limit)
    inputs = {
        kind: np.concatenate([part.characters for part in drawn])[most],
        "length": np.concatenate([part.length for part in drawn])[most],
    }
    labels = np.concatenate([part.labels for part in drawn])[most]
    hashes = [part.sha256 for part in drawn]
    digest = partial(joined_sha256, hashes)
    return LabeledInputs(inputs, labels, CLASS_NAMES, name="listops", digest=digest, split=split)


def _drawn(kind: str, most: int, split: str, count: int | None) -> Expressions:
    if kind == "characters":
        return listops(split, count, grammar=Grammar(max_tokens=most))
    return as_bytes(listops(split, count, grammar=Grammar(max_tokens=most_tokens(most))), most)


def load_inputs(variant: VariantFiles, data: str, count: int, skip_bad: int = 0) -> Inputs:
    """Return the first samples that fit the model, whatever it takes.

    Shapes: by name [n ...], n at most `count`.
    Raises: SaccadeError if no data fits the model.
    """
    role = variant.main.variant.role
    taken = SampleInputs.of(
        {spec.name: spec.shape for spec in variant.main.inputs},
        variant.runtime_metadata.get("vocabulary", ()),
    )
    if taken.kind in ("characters", "bytes") and data == "listops":
        drawn = _drawn(taken.kind, taken.most, "test", count)
        return {role: {taken.kind: drawn.characters, "length": drawn.length}}
    if not taken.is_image:
        samples = _sequences(
            data, HELD_OUT, taken, EvaluateOptions(limit=max(2, count), skip_bad=skip_bad)
        )
        return {role: {name: array[:count] for name, array in samples.inputs.items()}}
    asked = DataOptions(skip_bad=skip_bad)
    dataset = load_data(data, HELD_OUT, preprocessing=variant.images(), asked=asked)
    return {role: {"image": dataset.images[:count]}}


def labelled_examples(
    models: Sequence[EvaluatedModel], options: EvaluateOptions, chosen: np.ndarray
) -> ExampleAnswers:
    """Return the most probable label of the chosen images or expressions."""
    data = of_model(models[0], test_inputs(models[0], options))
    inputs = {name: array[chosen] for name, array in data.inputs.items()}
    truths = [data.class_names[label] for label in data.labels[chosen]]
    samples = ExampleSamples(inputs.get("image"), _as_text(models[0], inputs), truths)
    taken = {models[0].preprocessing: inputs}
    answers = []
    for model in models:
        if (own := model.preprocessing) not in taken:
            more = test_inputs(model, options).inputs
            taken[own] = {name: array[chosen] for name, array in more.items()}
        outputs = model.component("")(taken[own])
        answers.append(labelled_answers(model, data.class_names, outputs))
    return samples, answers


def _as_text(model: EvaluatedModel, inputs: dict[str, np.ndarray]) -> list[str]:
    """Return the text that a model of characters or bytes reads; empty for other models."""
    kind = next((name for name in ("characters", "bytes") if name in inputs), None)
    if kind is None:
        return []
    rows = zip(inputs[kind], inputs["length"], strict=True)
    if kind == "bytes":
        return [bytes(row[: int(length)]).decode(errors="replace") for row, length in rows]
    # Symbols of a formal language are words, letters are not.
    words = (*model.runtime_metadata["vocabulary"], "\N{REPLACEMENT CHARACTER}")
    between = "" if all(len(word) == 1 for word in words) else " "
    return [between.join(words[code] for code in row[: int(length)]) for row, length in rows]


def knn(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score top-1 of the weighted vote of the 20 nearest training images.

    Source: Caron et al. 2021, Emerging Properties in Self-Supervised Vision Transformers.
    """
    train, test = (_coded(model, options, split) for split in ("train", _scored(options)))
    classes = len(test.data.class_names)
    labels = knn_predict(*train.pair, test.codes, classes=classes)
    return _result(model, "knn", "20-NN top-1", test.data, labels)


def probe(model: EvaluatedModel, options: EvaluateOptions) -> EvaluationResult:
    """Score top-1 of a linear classifier on the frozen model, by the protocol of `--probe`.

    The validation samples choose the penalty of `logistic` and `adamw`, and are then learned from
    as well; if they are the ones to score, a tenth of the training samples chooses it.
    """
    output = PROBE_FEATURES if options.probe == "dino" else "embedding"
    train, test = (_coded(model, options, split, output) for split in ("train", _scored(options)))
    if options.probe == "dino":
        labels = dino_probe_predict(*train.pair, test.codes, seed=options.seed)
        protocol = f"SGD for 100 epochs on {test.codes.shape[1]} features of the last blocks"
        return _result(model, "probe", "linear probe top-1", test.data, labels, protocol)
    if own := test.data.split == "validation":
        tenth = max(1, len(train.data.labels) // 10)
        parts = stratified_split(train.data.labels, validation=tenth, test=0)
        train, validation = train.part(parts["train"]), train.part(parts["validation"])
    else:
        validation = _coded(model, options, "validation")
    labels, penalty = probe_predict(
        *train.pair, *validation.pair, test.codes, method=options.probe, seed=options.seed
    )
    chosen = "a tenth of the training samples" if own else "the validation samples"
    name = "AdamW for 10 epochs, weight decay" if options.probe == "adamw" else "L2 penalty"
    protocol = f"{name} {penalty:.3g}, chosen on {chosen}"
    return _result(model, "probe", "linear probe top-1", test.data, labels, protocol)


@dataclass(frozen=True)
class _Embeddings:
    """Samples and their embeddings.

    Shapes: codes [n e], labels [n].
    """

    data: LabeledInputs
    codes: np.ndarray
    labels: np.ndarray

    @property
    def pair(self) -> tuple[np.ndarray, np.ndarray]:
        return self.codes, self.labels

    def part(self, rows: np.ndarray) -> "_Embeddings":
        return _Embeddings(self.data, self.codes[rows], self.labels[rows])


def _result(
    model: EvaluatedModel,
    task: str,
    name: str,
    test: LabeledInputs,
    labels: np.ndarray,
    protocol: str = "",
) -> EvaluationResult:
    right = labels == test.labels
    return model.result(task, test, [proportion(name, right)], right, protocol)


def _scored(options: EvaluateOptions) -> str:
    if options.split in ("train", "all"):
        raise SaccadeError(
            f"--split {options.split}: this task learns from the training samples, expected others "
            "to score. Pass --split validation or --split test."
        )
    return options.split or HELD_OUT


def _coded(
    model: EvaluatedModel, options: EvaluateOptions, split: str, output: str = "embedding"
) -> _Embeddings:
    data = labelled_inputs(model, options, split)
    outputs = model.component("", "image")(data.inputs)
    if output not in outputs:
        raise SaccadeError(
            f"--probe dino: found no output {output} of {model.name}, expected the class token of "
            f"its last blocks. Export a SPARO that has one with --outputs {output}, or choose "
            "--probe adamw."
        )
    return _Embeddings(data, outputs[output], data.labels)
