# SPDX-License-Identifier: Apache-2.0
"""Linear maps from the embeddings of one variant into the space of another."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from saccade.core.schema import NonNegative, Share

# What the router runs, so that both compute the same figures.
ROUTER: Any = import_module("saccade.model_repository.router.spaces")
_RIDGES = (1e-5, 1e-3, 1e-1)  # times the mean variance
_RANKS = (2, 4)  # what the width is divided by
_HELD_OUT = 0.25  # of the samples choose the kind
_BLOCK = 1024  # queries that are compared with a part of the index at once
_TIE = 1e-6  # between cosines, whose last digits depend on the batch


@dataclass(frozen=True)
class NeighborRecall:
    """How often vectors find the neighbors that the samples' own vectors find.

    Units:  recall and recall_10 are the shares of samples whose own nearest neighbor is the nearest
            found, or among 10; `loss` is by how much less similar, as a cosine, the nearest is.
    """

    recall: Share
    recall_10: Share
    loss: NonNegative

    @classmethod
    def of(cls, found: np.ndarray, own: np.ndarray, index: np.ndarray) -> "NeighborRecall":
        """Search an index with vectors, and with those of the same samples in its own space.

        Shapes: found [n e], own [n e], index [m e], all of length 1.
        """
        rows = np.arange(len(own))
        theirs, wanted = found @ index.T, own @ index.T
        lost = wanted.max(1) - wanted[rows, theirs.argmax(1)]
        before = (theirs > theirs[rows, wanted.argmax(1)][:, None]).sum(1)
        right = lost <= _TIE
        figures = right.mean(), (right | (before < 10)).mean(), lost.mean()
        return cls(*(round(float(figure), 6) for figure in figures))


@dataclass(frozen=True)
class SpaceMap:
    """A map between the spaces of two variants, and what it reaches on held-out samples.

    `without` is the same without a map, None if the widths differ.
    """

    source: str
    target: str
    kind: str
    reached: NeighborRecall
    without: NeighborRecall | None
    used: bool  # False: it finds too few neighbors

    @property
    def name(self) -> str:
        """Name of the map's array."""
        return str(ROUTER.map_name(self.source, self.target))


def best_map(
    pair: tuple[str, str], source: np.ndarray, target: np.ndarray, min_recall: float
) -> tuple[SpaceMap, np.ndarray]:
    """Return the map that finds the most neighbors, with its array as the router reads it.

    `pair` are the names of the variants. The last samples, which are in random order, choose the
    kind of the map; then all samples fit it.

    Shapes: source [n d], target [n e], embeddings of the same samples -> array [d+2 e].
    """
    x, y = ROUTER.unit(source), ROUTER.unit(target)
    fit = len(x) - round(_HELD_OUT * len(x))
    reached = {
        kind: NeighborRecall.of(ROUTER.mapped(x[fit:], _stored(matrix, 1.0)), y[fit:], y[:fit])
        for kind, matrix in _candidates(x[:fit], y[:fit])
    }
    kind = max(reached, key=lambda one: (reached[one].recall, reached[one].recall_10))
    found = SpaceMap(
        *pair, kind, reached[kind], reached.get(_NONE), reached[kind].recall >= min_recall
    )
    length = float(np.linalg.norm(target, axis=1).mean())
    return found, _stored(dict(_candidates(x, y))[kind], length)


_NONE = "none"


def _candidates(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield maps by name, the simplest first, with what they add as the last row.

    Shapes: x [n d], y [n e] -> [d+1 e].
    Source: Schoenemann 1966 (orthogonal Procrustes); Izenman 1975 (reduced-rank regression).
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    mean_x, mean_y = x.mean(0), y.mean(0)
    centered, wanted = x - mean_x, y - mean_y

    def with_offset(linear: np.ndarray) -> np.ndarray:
        return np.vstack([linear, mean_y - mean_x @ linear])

    (d, e), covariance, both = (x.shape[1], y.shape[1]), centered.T @ centered, centered.T @ wanted
    if d == e:
        yield _NONE, np.vstack([np.eye(d), np.zeros(d)])
    left, sizes, right = np.linalg.svd(both, full_matrices=False)
    yield "orthogonal", with_offset(left @ right * (sizes.sum() / max(np.trace(covariance), 1e-12)))
    ridges = {
        share: np.linalg.solve(
            covariance + (share * np.trace(covariance) / d + 1e-9) * np.eye(d), both
        )
        for share in _RIDGES
    }
    for share, linear in ridges.items():
        yield f"ridge {share:g}", with_offset(linear)
    linear = ridges[_RIDGES[1]]
    _, axes = np.linalg.eigh(linear.T @ covariance @ linear)
    for rank in sorted({min(d, e) // part for part in _RANKS} - {0}):
        kept = axes[:, -rank:]
        yield f"rank {rank}", with_offset(linear @ kept @ kept.T)


def _stored(matrix: np.ndarray, length: float) -> np.ndarray:
    return np.vstack([matrix, np.full(matrix.shape[1], length)]).astype(np.float32)


def nearest(
    queries: np.ndarray, full: int, index: Iterable[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the place of each query's nearest neighbor, and the losses against the full model's.

    A neighbor that is as similar as the full model's own is the same: an index may have copies.

    Shapes: queries [v n e], of length 1; `full` is the place of the full model's; the index comes
        in parts [m e] of length 1 -> int32 [v n], and cosines [v n].
    """
    v, n, e = queries.shape
    flat = queries.reshape(v * n, e)
    best, place, own = np.full(v * n, -np.inf, np.float32), np.zeros(v * n, np.int32), 0
    vectors = np.zeros((v * n, e), np.float32)
    for part in index:
        for start in range(0, v * n, _BLOCK):
            cosines = flat[start : start + _BLOCK] @ part.T
            at, largest = cosines.argmax(1), cosines.max(1)
            better = np.flatnonzero(largest > best[start : start + _BLOCK])
            rows = start + better
            best[rows], place[rows] = largest[better], own + at[better]
            vectors[rows] = part[at[better]]
        own += len(part)
    place, vectors = place.reshape(v, n), vectors.reshape(v, n, e)
    reached = (queries[full] * vectors).sum(-1)
    lost = reached[full] - reached
    return np.where(lost <= _TIE, place[full], place), lost
