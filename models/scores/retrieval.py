# SPDX-License-Identifier: Apache-2.0
"""Retrieval recall: the right text among the first for an image, and vice versa."""

from collections.abc import Collection, Sequence

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError

_BLOCK_VALUES = 2**22  # similarities at a time: 32 MiB, and a few arrays of this size beside them


def cosines(rows: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the cosine of every pair of codes.

    Shapes: one [n d], other [m d] -> [n m] float64.
    Raises: ShapeError if the codes have different widths.
    """
    if rows.ndim != 2 or other.ndim != 2 or rows.shape[1] != other.shape[1]:
        raise ShapeError(
            f"codes: found shapes {rows.shape} and {other.shape}, expected two matrices of equal "
            "width. Take both from the same variant."
        )
    return _unit(rows) @ _unit(other).T


def ranks(similarity: np.ndarray, truth: np.ndarray | Sequence[Collection[int]]) -> np.ndarray:
    """Return the rank (from 1) of each row's best right column; wrong columns win ties.

    Shapes: similarity [n m], truth [n] the right column or n sets of right columns -> [n] int64,
            m + 1 if a row has no right column.
    Raises: ShapeError if there is not one truth per row, SaccadeError for a column that does not
        exist.
    """
    if similarity.ndim != 2 or len(truth) != len(similarity) or not similarity.size:
        raise ShapeError(
            f"retrieval: found similarities {similarity.shape} and {len(truth)} right answers, "
            "expected a matrix and one answer, or set of answers, for each of its rows."
        )
    right = np.zeros(similarity.shape, dtype=bool)
    for row, columns in enumerate(truth):
        flat = np.atleast_1d(np.array(_listed(columns), dtype=np.int64))
        if len(flat) and not 0 <= flat.min() <= flat.max() < similarity.shape[1]:
            raise SaccadeError(
                f"retrieval: row {row} has the right answers {flat.tolist()}, expected columns "
                f"from 0 to {similarity.shape[1] - 1}."
            )
        right[row, flat] = True
    best = np.where(right, similarity, -np.inf).max(1)
    # Written so that NaN never counts as found.
    before = (~right & ~(similarity < best[:, None])).sum(1)
    lost = ~right.any(1) | np.isnan(best)
    return np.where(lost, similarity.shape[1] + 1, 1 + before).astype(np.int64)


def nearest_ranks(
    queries: np.ndarray, other: np.ndarray, truth: np.ndarray | Sequence[Collection[int]]
) -> np.ndarray:
    """Return the rank of each code's best right code among the others, by cosine, as `ranks`.

    Similarities are computed for a block of rows at a time, so memory does not grow with n.

    Shapes: one [n d], other [m d], truth as in `ranks` -> [n] int64.
    Raises: as `cosines` and `ranks`.
    """
    rows = max(1, _BLOCK_VALUES // max(1, len(other)))
    other = _unit(other) if other.ndim == 2 else other  # not once per block
    starts = range(0, max(1, len(queries)), rows)
    blocks = [(queries[start : start + rows], truth[start : start + rows]) for start in starts]
    return np.concatenate([ranks(cosines(part, other), right) for part, right in blocks])


def ranks_of_pairs(
    images: np.ndarray, texts: np.ndarray, sentences: Sequence[str], image_of: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank of each image's best sentence, and of each sentence's best image.

    A sentence that several images have is right for each of them.

    Shapes: images [n d], texts [m d], sentences m, image_of [m] -> [n], [m] int64.
    Raises: as `nearest_ranks`.
    """
    images_of: dict[str, set[int]] = {}
    for text, image in zip(sentences, image_of.tolist(), strict=True):
        images_of.setdefault(text, set()).add(image)
    texts_of: list[list[int]] = [[] for _ in range(len(images))]
    for place, text in enumerate(sentences):
        for image in images_of[text]:
            texts_of[image].append(place)
    truth = [images_of[text] for text in sentences]
    return nearest_ranks(images, texts, texts_of), nearest_ranks(texts, images, truth)


def recalls(
    images: np.ndarray, texts: np.ndarray, image_of: np.ndarray | None = None
) -> dict[str, float]:
    """Return R@1 and R@5: `text_*` for the texts of an image, `image_*` for the image of a text.

    Shapes: images [n d], texts [m d], image_of [m], the image of each text; None: text i belongs to
            image i.
    Raises: as `cosines` and `ranks`.
    """
    image_of = np.arange(len(texts)) if image_of is None else np.asarray(image_of)
    texts_of = [np.flatnonzero(image_of == image) for image in range(len(images))]
    both = {
        "text": nearest_ranks(images, texts, texts_of),
        "image": nearest_ranks(texts, images, image_of),
    }
    return {
        f"{name}_r{top}": float(np.mean(ranks <= top))
        for name, ranks in both.items()
        for top in (1, 5)
    }


def _listed(columns: object) -> object:
    return sorted(columns) if isinstance(columns, set | frozenset) else columns


def _unit(codes: np.ndarray) -> np.ndarray:
    codes = np.asarray(codes, dtype=np.float64)
    return codes / np.linalg.norm(codes, axis=1, keepdims=True).clip(1e-30)
