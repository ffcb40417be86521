# SPDX-License-Identifier: Apache-2.0
"""Zero-shot classification: the class whose prompts have the code nearest to the image's."""

from collections.abc import Callable, Sequence

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError


def default_templates(tokenizer: str) -> tuple[str, ...]:
    """Return the default templates for labels, in words that the model knows."""
    return ("a {}",) if tokenizer == "words" else ("a photo of a {}.",)


def prompts(labels: Sequence[str], templates: Sequence[str]) -> list[list[str]]:
    """Return each label in each template, label by label.

    Raises: SaccadeError if there is no label or template, or a template has no place for a label.
    """
    if not labels or not templates:
        raise SaccadeError(
            f"zero-shot: found {len(labels)} labels and {len(templates)} templates, expected at "
            "least one of each. Pass --labels, and --templates such as 'a photo of a {}'."
        )
    if without := [template for template in templates if template.count("{}") != 1]:
        raise SaccadeError(
            f"template {without[0]!r} has {without[0].count('{}')} places for the label, "
            "expected one {}. Write it like 'a photo of a {}'."
        )
    return [[template.replace("{}", label) for template in templates] for label in labels]


def unit(codes: np.ndarray) -> np.ndarray:
    """Normalize each row to length 1; a row of zeros stays zero.

    Shapes: [... e] -> [... e].
    """
    length = np.linalg.norm(codes, axis=-1, keepdims=True)
    return codes / np.where(length > 0, length, 1)


def class_vectors(codes: np.ndarray) -> np.ndarray:
    """Return one vector per class: the mean of its prompts' unit codes, normalized to length 1.

    Shapes: codes [classes prompts e] -> [classes e].
    Source: Radford et al. 2021 (CLIP), section 3.1.4.
    """
    return unit(unit(codes).mean(axis=1))


def encode_classes(
    encode: Callable[[list[str]], np.ndarray],
    labels: Sequence[str],
    templates: Sequence[str],
) -> np.ndarray:
    """Return the class vectors of labels; `encode` returns the text code of each prompt.

    Shapes: encode: texts -> [texts e]; -> [classes e].
    Raises: SaccadeError as `prompts`.
    """
    texts = prompts(labels, templates)
    codes = np.asarray(encode([text for sentences in texts for text in sentences]))
    return class_vectors(codes.reshape(len(labels), len(templates), -1))


def zero_shot_logits(images: np.ndarray, classes: np.ndarray, logit_scale: float) -> np.ndarray:
    """Return the similarity of each image to each class.

    Shapes: images [b e], classes [c e] -> [b c].
    Raises: ShapeError if the widths differ because the codes come from different variants.
    """
    if images.shape[-1] != classes.shape[-1]:
        raise ShapeError(
            f"image codes have {images.shape[-1]} values, class vectors {classes.shape[-1]}, "
            "expected the same slots in both. Encode the texts with the variant of the images."
        )
    return logit_scale * images @ classes.T
