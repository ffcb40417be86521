# SPDX-License-Identifier: Apache-2.0
"""Labels without training: prompts to class vectors, and image codes against them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade.errors import SaccadeError, require
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.files import read_lines
from saccade.models.sparo import zero_shot
from saccade.models.sparo.zero_shot import default_templates, prompts
from saccade.serving.client.text_tokens import text_tokens

_TEXTS_A_RUN = 64


@dataclass(frozen=True)
class Labelling:
    """Labels and the sentences they are put into, `{}` being the label's place.

    Raises: SaccadeError if there is no label, one is empty or double, or a template has no place.
    """

    labels: tuple[str, ...]
    templates: tuple[str, ...] = ()  # none: the sentence that fits the model's words

    def __post_init__(self) -> None:
        prompts(self.labels, self.templates or ("{}",))
        odd = [label for label in self.labels if not label.strip() or "\n" in label]
        if odd or len(set(self.labels)) < len(self.labels):
            twice = sorted({label for label in self.labels if self.labels.count(label) > 1})
            raise SaccadeError(
                f"labels: found {odd[:3]} that are no single line and {twice[:3]} more than "
                "once, expected distinct strings. Correct the list."
            )

    def of(self, metadata: Mapping[str, Any]) -> "Labelling":
        """The same with templates, as the runtime metadata of a variant asks for."""
        usual = default_templates(metadata["tokenizer"])
        return self if self.templates else replace(self, templates=usual)

    def prompts(self) -> list[str]:
        """All sentences, those of the first label first."""
        return [text for prompt_set in prompts(self.labels, self.templates) for text in prompt_set]

    def vectors(self, codes: np.ndarray) -> np.ndarray:
        """The class vectors of the labels.

        Shapes: codes [labels x templates d], as `prompts` orders them -> float32 [labels d].
        """
        grouped = codes.astype(np.float64).reshape(len(self.labels), len(self.templates), -1)
        return zero_shot.class_vectors(grouped).astype(np.float32)


def read_labelling(labels: Path | None, templates: Path | None) -> Labelling | None:
    """Labels and templates of two text files, a line each; none where no labels are given.

    Raises: SaccadeError if a file cannot be read or does not fit.
    """
    if labels is None:
        if templates is not None:
            raise SaccadeError("--templates was given without --labels. Give both, or neither.")
        return None
    return Labelling(
        read_lines(labels, "label"), read_lines(templates, "template") if templates else ()
    )


def class_vectors(folder: ArtefactFolder, labelling: Labelling) -> dict[str, np.ndarray]:
    """By variant, a vector a label, computed here with the variant's text component.

    Raises: SaccadeError if the model has no text component.
    """
    vectors = {}
    for variant in folder.variants:
        if not {"image", "text"} <= set(variant.components):
            raise SaccadeError(
                f"--labels: {variant.name} has no text component, so no label can be turned into a "
                "vector. Leave the option out."
            )
        written = labelling.of(variant.runtime_metadata)
        tokens = text_tokens(written.prompts(), variant.runtime_metadata)
        run = _text_component(folder.file(variant.components["text"]))
        codes = [run(tokens[at : at + _TEXTS_A_RUN]) for at in range(0, len(tokens), _TEXTS_A_RUN)]
        vectors[variant.name] = written.vectors(np.concatenate(codes))
    return vectors


def probabilities(
    codes: np.ndarray, vectors: np.ndarray, metadata: Mapping[str, Any]
) -> np.ndarray:
    """Probability of each label for each image.

    Shapes: codes [n d], vectors [labels d] -> float64 [n labels].
    """
    unit = zero_shot.unit(codes.astype(np.float64))
    logits = zero_shot.zero_shot_logits(unit, vectors, float(metadata["logit_scale"]))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _text_component(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    onnxruntime: Any = require("onnxruntime", extra="cpu")
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda tokens: np.asarray(session.run(["embedding"], {name: tokens})[0])
