# SPDX-License-Identifier: Apache-2.0
"""Texts for a model: their token ids, and labels, whose prompts become class vectors."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, require
from saccade.core.files import read_lines
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.models.sparo import zero_shot
from saccade.models.sparo.zero_shot import default_templates, prompts

LOGGER = logging.getLogger("saccade.texts")


def text_tokens(
    texts: Sequence[str], metadata: Mapping[str, Any], *, truncate: bool = False
) -> np.ndarray:
    """Return the token ids of each text for the text component; log how many texts were cut.

    Shapes: -> [n context_length] int64.
    Raises: SaccadeError if the model takes no text, or if one of the texts is too long and
        `truncate` is false.
    """
    from saccade.models.sparo.text_tokens import encode_texts

    check_texts(texts)
    if "context_length" not in metadata:
        raise SaccadeError(
            "This model takes no text: it has no text component. Choose another model."
        )
    rows = encode_texts(metadata, texts, truncate=truncate)
    full = [text for text, row in zip(texts, rows, strict=True) if truncate and row[-1]]
    _say_cut(
        sum(_is_too_long(text, metadata) for text in full), len(texts), metadata["context_length"]
    )
    return rows


def _say_cut(cut: int, texts: int, length: int) -> None:
    if cut:
        LOGGER.warning("%d of %d texts were cut to %d tokens, as requested.", cut, texts, length)


def _is_too_long(text: str, metadata: Mapping[str, Any]) -> bool:
    from saccade.models.sparo.text_tokens import encode_texts

    try:
        encode_texts(metadata, [text])
    except SaccadeError:
        return True
    return False


def question_tokens(
    questions: Sequence[str], metadata: Mapping[str, Any], *, truncate: bool = False
) -> np.ndarray:
    """Return the token ids of each question; log how many questions were cut.

    Shapes: -> [n question_length] int64.
    Raises: SaccadeError if a question is too long and `truncate` is false, or if the model has no
        vocabulary.
    """
    from saccade.models.vqa.questions import question_tokens as tokens_of

    check_texts(questions)
    rows, cut = [], 0
    for question in questions:
        try:
            rows.append(tokens_of(metadata, question))
        except SaccadeError:
            if not truncate:
                raise
            rows.append(tokens_of(metadata, question, truncate=True))
            cut += 1
    _say_cut(cut, len(questions), metadata["question_length"])
    return np.stack(rows)


def check_words(questions: Sequence[str], metadata: Mapping[str, Any]) -> None:
    """Check that the model knows every word of the questions.

    Raises: SaccadeError that lists the unknown words.
    """
    for question in questions:
        if unknown := ", ".join(map(repr, unknown_words(question, metadata))):
            raise SaccadeError(
                f"question {question!r:.60}: the model does not know {unknown}. Use other words, "
                "or drop `strict` to have them treated as unknown words."
            )


def unknown_words(question: str, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of a question that the model does not know, each once."""
    from saccade.models.vqa.questions import unknown_words as words_of

    return words_of(metadata, question)


def check_texts(texts: Sequence[str]) -> None:
    """Check that `texts` is a list of non-empty strings.

    Raises: SaccadeError for a single string, an empty list, or an empty string.
    """
    if isinstance(texts, str):
        raise SaccadeError("Found a single text, expected a list of texts. Pass [text].")
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise SaccadeError(f"Found {list(texts)!r:.80}, expected one or more non-empty texts.")


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
