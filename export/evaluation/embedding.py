# SPDX-License-Identifier: Apache-2.0
"""Score an embedding with nearest neighbors and with a linear probe."""

from dataclasses import dataclass

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.exporter.evaluation.classification import Labelled, labelled_inputs
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.models.data.datasets import HELD_OUT
from saccade.models.data.splits import stratified_split
from saccade.models.scores.classification import dino_probe_predict, knn_predict, probe_predict
from saccade.models.scores.results import EvaluationResult, proportion
from saccade.models.sparo.config import PROBE_FEATURES


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
class _Coded:
    """Samples and their embeddings.

    Shapes: codes [n e], labels [n].
    """

    data: Labelled
    codes: np.ndarray
    labels: np.ndarray

    @property
    def pair(self) -> tuple[np.ndarray, np.ndarray]:
        return self.codes, self.labels

    def part(self, rows: np.ndarray) -> "_Coded":
        return _Coded(self.data, self.codes[rows], self.labels[rows])


def _result(
    model: EvaluatedModel,
    task: str,
    name: str,
    test: Labelled,
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
) -> _Coded:
    data = labelled_inputs(model, options, split)
    outputs = model.component("", "image")(data.inputs)
    if output not in outputs:
        raise SaccadeError(
            f"--probe dino: found no output {output} of {model.name}, expected the class token of "
            f"its last blocks. Export a SPARO that has one with --outputs {output}, or choose "
            "--probe adamw."
        )
    return _Coded(data, outputs[output], data.labels)
