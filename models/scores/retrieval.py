# SPDX-License-Identifier: Apache-2.0
"""How often the right text is among the first for an image, and the other way round."""

import numpy as np

from saccade.plugins.errors import ShapeError

_CHUNK = 1024


def retrieval_ranks(
    images: np.ndarray, texts: np.ndarray, image_of: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The rank of the best right answer by cosine, 1 for the first; equal ones come before it.

    Shapes: images [n d], texts [m d], image_of [m] (which image a text belongs to; none: text i
            to image i) -> ranks of texts [n] (int64; a large number where an image has no text),
            ranks of images [m].
    Raises: ShapeError if the shapes do not fit.
    """
    image_of = np.arange(len(texts)) if image_of is None else np.asarray(image_of)
    _check(images, texts, image_of)
    images, texts = _unit(images), _unit(texts)
    text_ranks = np.full(len(images), np.iinfo(np.int64).max)
    for start in range(0, len(images), _CHUNK):
        cosine = images[start : start + _CHUNK] @ texts.T
        right = image_of == np.arange(start, start + len(cosine))[:, None]
        best = np.where(right, cosine, -np.inf).max(1)
        before = (~right & (cosine >= best[:, None])).sum(1)
        text_ranks[start : start + _CHUNK] = np.where(right.any(1), 1 + before, np.iinfo(int).max)
    image_ranks = np.empty(len(texts), np.int64)
    for start in range(0, len(texts), _CHUNK):
        cosine = texts[start : start + _CHUNK] @ images.T
        owner = image_of[start : start + _CHUNK, None]
        own = np.take_along_axis(cosine, owner, axis=1)
        # The text's own image is among those that are not below it: it is the 1 of its rank.
        image_ranks[start : start + _CHUNK] = (cosine >= own).sum(1)
    return text_ranks, image_ranks


def recall(ranks: np.ndarray, k: int) -> float:
    """The share with a right answer among the first k.

    Shapes: ranks [n].
    """
    return float(np.mean(np.asarray(ranks) <= k))


def retrieval_scores(
    images: np.ndarray, texts: np.ndarray, image_of: np.ndarray | None = None
) -> dict[str, float]:
    """R@1 and R@5: `text_*` for the texts of an image, `image_*` for the image of a text.

    Shapes: as `retrieval_ranks`.
    Raises: ShapeError if the shapes do not fit.
    """
    of_texts, of_images = retrieval_ranks(images, texts, image_of)
    return {
        "text_r1": recall(of_texts, 1),
        "text_r5": recall(of_texts, 5),
        "image_r1": recall(of_images, 1),
        "image_r5": recall(of_images, 5),
    }


def _unit(codes: np.ndarray) -> np.ndarray:
    codes = np.asarray(codes, dtype=np.float64)
    return codes / np.linalg.norm(codes, axis=1, keepdims=True).clip(1e-30)


def _check(images: np.ndarray, texts: np.ndarray, image_of: np.ndarray) -> None:
    fits = images.ndim == texts.ndim == 2 and images.shape[1] == texts.shape[1]
    owned = image_of.shape == texts.shape[:1] and len(texts) and len(images)
    if not (fits and owned and 0 <= image_of.min() <= image_of.max() < len(images)):
        raise ShapeError(
            f"retrieval: found images {list(images.shape)}, texts {list(texts.shape)} and "
            f"image_of {list(image_of.shape)}, expected codes of one width, at least one of each, "
            "and for each text the place of its image."
        )
