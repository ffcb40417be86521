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
_BLOCK = 1024  # queries that are compared with a part of the index in one product
_TIE = 1e-6  # between cosines, whose last digits depend on the batch
_DIGITS = 6


@dataclass(frozen=True)
class SpaceMap:
    """A map between the spaces of two variants, and what it reaches on held-out samples.

    Units:  recall and recall_10 are the shares of samples whose nearest neighbor in the target's
            own space is the nearest after mapping, or among 10; `loss` is by how much less similar,
            as a cosine, the nearest one after mapping is.
    """

    source: str
    target: str
    kind: str
    recall: Share
    recall_10: Share
    loss: NonNegative
    used: bool  # False: it finds too few neighbors

    @property
    def name(self) -> str:
        """Name of the map's array."""
        return str(ROUTER.map_name(self.source, self.target))

    def __str__(self) -> str:
        refused = "" if self.used else ", refused"
        return (
            f"{self.source} in the space of {self.target}: recall@1 {100 * self.recall:.1f} %, "
            f"recall@10 {100 * self.recall_10:.1f} %, loss {self.loss:.4f} ({self.kind}{refused})"
        )


def neighbor_recall(
    found: np.ndarray, own: np.ndarray, index: np.ndarray
) -> tuple[float, float, float]:
    """Return `recall`, `recall_10` and `loss` of vectors that search an index.

    `own` are the vectors of the same samples in the index's own space.
    Shapes: found [n e], own [n e], index [m e], all of length 1.
    """
    rows = np.arange(len(own))
    theirs, wanted = found @ index.T, own @ index.T
    lost = wanted.max(1) - wanted[rows, theirs.argmax(1)]
    before = (theirs > theirs[rows, wanted.argmax(1)][:, None]).sum(1)
    right = lost <= _TIE
    first, among, loss = right.mean(), (right | (before < 10)).mean(), lost.mean()
    return round(float(first), _DIGITS), round(float(among), _DIGITS), round(float(loss), _DIGITS)


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
        kind: neighbor_recall(ROUTER.mapped(x[fit:], _stored(matrix, 1.0)), y[fit:], y[:fit])
        for kind, matrix in _candidates(x[:fit], y[:fit])
    }
    kind = max(reached, key=lambda one: reached[one][:2])
    made = SpaceMap(*pair, kind, *reached[kind], used=reached[kind][0] >= min_recall)
    length = float(np.linalg.norm(target, axis=1).mean())
    return made, _stored(dict(_candidates(x, y))[kind], length)


def _candidates(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield maps by name, the simplest first, with what they add as the last row.

    Shapes: x [n d], y [n e] -> [d+1 e].
    Source: Schoenemann 1966 (orthogonal Procrustes); Izenman 1975 (reduced-rank regression).
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    (mean_x, mean_y), (d, e) = (x.mean(0), y.mean(0)), (x.shape[1], y.shape[1])
    covariance, both = (x - mean_x).T @ (x - mean_x), (x - mean_x).T @ (y - mean_y)
    total = np.trace(covariance) + 1e-12
    left, sizes, right = np.linalg.svd(both, full_matrices=False)
    found = {"orthogonal": left @ right * (sizes.sum() / total)}
    for ridge in _RIDGES:
        penalty = ridge * total / d * np.eye(d)
        found[f"ridge {ridge:g}"] = linear = np.linalg.solve(covariance + penalty, both)
        if ridge == _RIDGES[1]:
            _, axes = np.linalg.eigh(linear.T @ covariance @ linear)
            for rank in {max(1, min(d, e) // part) for part in _RANKS}:
                kept = axes[:, -rank:]
                found[f"rank {rank}"] = linear @ kept @ kept.T
    if d == e:
        yield "none", np.vstack([np.eye(d), np.zeros(d)])
    for kind, linear in found.items():
        yield kind, np.vstack([linear, mean_y - mean_x @ linear])


def _stored(matrix: np.ndarray, length: float) -> np.ndarray:
    return np.vstack([matrix, np.full(matrix.shape[1], length)]).astype(np.float32)


def nearest(
    queries: np.ndarray, full: int, index: Iterable[np.ndarray], most: int, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the place of each query's nearest neighbor, vectors drawn from the index, its size.

    A neighbor that is as similar as the full model's own is the same: an index may have copies.

    Shapes: queries [v n e] of length 1, the full model's at `full`; the index comes in parts [m e]
        of length 1 -> int32 [v n], and at most `most` vectors [most e].
    """
    v, n, e = queries.shape
    flat, rng, size = queries.reshape(v * n, e), np.random.default_rng(seed), 0
    best, place = np.full(v * n, -np.inf, np.float32), np.zeros(v * n, np.int32)
    vectors, drawn, keys = np.zeros_like(flat), np.empty((0, e), np.float32), np.empty(0)
    for part in index:
        for start in range(0, v * n, _BLOCK):
            cosines = flat[start : start + _BLOCK] @ part.T
            at, largest = cosines.argmax(1), cosines.max(1)
            better = np.flatnonzero(largest > best[start : start + _BLOCK])
            rows = start + better
            best[rows], place[rows] = largest[better], size + at[better]
            vectors[rows] = part[at[better]]
        keys = np.concatenate([keys, rng.random(len(part))])
        kept = np.argsort(keys)[:most]
        drawn, keys, size = np.concatenate([drawn, part])[kept], keys[kept], size + len(part)
    place = place.reshape(v, n)
    reached = (queries[full] * vectors.reshape(v, n, e)).sum(-1)
    same = reached[full] - reached <= _TIE
    return np.where(same, place[full], place), drawn, size
