# SPDX-License-Identifier: Apache-2.0
"""Zero-shot labels: turn prompts into class vectors, and compare image codes with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, require
from saccade.core.files import read_lines
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.models.sparo import zero_shot
from saccade.models.sparo.zero_shot import default_templates, prompts
from saccade.serving.client.text_tokens import text_tokens

_TEXTS_A_RUN = 64


@dataclass(frozen=True)
class Labelling:
    """Labels and the templates they are inserted into, where `{}` marks the label's place.

    Raises: SaccadeError if there is no label, a label is empty or occurs twice, or a template has
        no `{}`.
    """

    labels: tuple[str, ...]
    templates: tuple[str, ...] = ()  # if empty, the sentence that suits the model's vocabulary

    def __post_init__(self) -> None:
        prompts(self.labels, self.templates or ("{}",))
        odd = [label for label in self.labels if not label.strip() or "\n" in label]
        if odd or len(set(self.labels)) < len(self.labels):
            twice = sorted({label for label in self.labels if self.labels.count(label) > 1})
            raise SaccadeError(
                f"labels: found {odd[:3]} that are not a single line and {twice[:3]} more than "
                "once, expected distinct single-line strings. Correct the list."
            )

    def of(self, metadata: Mapping[str, Any]) -> "Labelling":
        """Return the labels with the templates that a variant's runtime metadata asks for."""
        usual = default_templates(metadata["tokenizer"])
        return self if self.templates else replace(self, templates=usual)

    def prompts(self) -> list[str]:
        """Return all sentences, starting with those of the first label."""
        return [text for prompt_set in prompts(self.labels, self.templates) for text in prompt_set]

    def vectors(self, codes: np.ndarray) -> np.ndarray:
        """Return the class vectors of the labels.

        Shapes: codes [labels x templates d], in the order of `prompts` -> float32 [labels d].
        """
        grouped = codes.astype(np.float64).reshape(len(self.labels), len(self.templates), -1)
        return zero_shot.class_vectors(grouped).astype(np.float32)


def read_labelling(labels: Path | None, templates: Path | None) -> Labelling | None:
    """Read labels and templates from two text files, one per line; None without labels.

    Raises: SaccadeError if a file cannot be read or its content is unusable.
    """
    if labels is None:
        if templates is not None:
            raise SaccadeError("Found --templates without --labels. Pass both or neither.")
        return None
    return Labelling(
        read_lines(labels, "label"), read_lines(templates, "template") if templates else ()
    )


def class_vectors(folder: ArtefactFolder, labelling: Labelling) -> dict[str, np.ndarray]:
    """Return one vector per label for each variant, computed with its text component.

    Raises: SaccadeError if the model has no text component.
    """
    vectors = {}
    for variant in folder.variants:
        if not {"image", "text"} <= set(variant.components):
            raise SaccadeError(
                f"--labels: {variant.name} has no text component, so labels cannot be turned into "
                "vectors. Drop the option."
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
    """Return the probability of each label for each image.

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
