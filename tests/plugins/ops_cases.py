# SPDX-License-Identifier: Apache-2.0
"""Inputs that every implementation of an op has to agree on, each with a name."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """Inputs of the node in float64 (integers as they are), and its attributes."""

    inputs: tuple[np.ndarray, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    # Half precision cannot hold the values of some cases.
    dtypes: tuple[str, ...] = ("float64", "float32", "float16")

    def arrays(self, dtype: str) -> tuple[np.ndarray, ...]:
        return tuple(
            value if value.dtype.kind == "i" else value.astype(dtype) for value in self.inputs
        )


_WIDE = ("float64", "float32")


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    # Whole sixteenths and the like survive half precision, so all types see the same numbers.
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return np.asarray(values, np.float16).astype(np.float64)


def row(*values: float) -> np.ndarray:
    return np.array([values], np.float64)


def smooth(h: int, w: int) -> np.ndarray:
    y, x = np.mgrid[:h, :w]
    grid = np.sin(y / 3.0) + np.cos(x / 2.0) + normal(h, w, seed=5, scale=0.05)
    return np.asarray(grid, np.float16).astype(np.float64)[None]


def spectrum(m: int, n: int, values: list[float], seed: int = 0) -> np.ndarray:
    """A matrix with the given singular values."""
    generator = np.random.default_rng(seed)
    u = np.linalg.qr(generator.standard_normal((m, m)))[0][:, : len(values)]
    v = np.linalg.qr(generator.standard_normal((n, n)))[0][:, : len(values)]
    return ((u * values) @ v.T)[None]


SPARSEMAX = {
    "random": Case((normal(8, 196),)),
    "wide": Case((normal(4, 65, seed=1, scale=4.0),)),
    "ties": Case((np.zeros((2, 4)),)),
    "ties at the top": Case((row(*[1.0] * 5, *[0.5] * 40),)),
    "one winner": Case((row(9, 0, -9),)),
    "boundary": Case((row(1, 0, 0, -1),)),
    "length 1": Case((normal(3, 1),)),
    "four axes": Case((normal(2, 1, 3, 17, seed=2),)),
    "vector": Case((normal(33, seed=3),)),
    "empty batch": Case((np.zeros((0, 5)),)),
    "empty rows": Case((np.zeros((3, 0)),)),
    "magnitudes of 1e4": Case((normal(3, 70, seed=4, scale=1e4),)),
    "1e30": Case((row(1e30, 0, -1e30, 1e30),), dtypes=_WIDE),
    "offset 1e4": Case((row(1e4, 1e4 - 0.5, 1e4 - 2, 0),), dtypes=_WIDE),
    "only -1e9": Case((np.full((2, 7), -1e9),), dtypes=_WIDE),
    "-inf": Case((row(-np.inf, 1, 0.5, -np.inf),)),
    "no finite entry, beside a row that has": Case(
        (np.array([[-np.inf] * 3, [1.0, 2.0, -np.inf]]),)
    ),
    "NaN stays in its row": Case((np.array([[0.0, np.nan, 1.0], [1.0, 2.0, 3.0]]),)),
    "+inf": Case((np.array([[0.0, np.inf, 1.0], [1.0, 2.0, 3.0]]),)),
    "denormals": Case((row(5e-8, 0, -5e-8),)),
}

GRIDS = {
    "random": Case((normal(4, 8, 8),)),
    "random, lam 0.1": Case((normal(3, 6, 9, seed=1),), {"lam": 0.1}),
    "lam 0": Case((normal(2, 5, 5, seed=2),), {"lam": 0.0}),
    "lam 0 and ties": Case((np.zeros((1, 3, 3)),), {"lam": 0.0}),
    "lam 5": Case((normal(2, 6, 6, seed=3),), {"lam": 5.0}),
    "smooth": Case((smooth(8, 8),), {"lam": 0.05}),
    "ties": Case((np.round(normal(2, 6, 6, seed=4)),), {"lam": 0.25}),
    "zeros": Case((np.zeros((2, 4, 4)),)),
    "one cell": Case((normal(3, 1, 1),)),
    "1 x n": Case((normal(2, 1, 9, seed=6),), {"lam": 0.1}),
    "n x 1": Case((normal(2, 9, 1, seed=7),), {"lam": 0.1}),
    "1 x 2": Case((np.array([[[0.3, 0.1]]]),), {"lam": 0.05}),
    "four axes": Case((normal(2, 2, 4, 5, seed=8),), {"lam": 0.05}),
    "no leading axis": Case((normal(5, 4, seed=9),), {"lam": 0.05}),
    "empty batch": Case((np.zeros((0, 3, 3)),)),
    "no cells": Case((np.zeros((2, 0, 3)),)),
    "magnitudes of 1e4": Case((normal(2, 5, 5, seed=10, scale=1e4),), {"lam": 0.5}),
    "masked cell": Case(
        (np.where(np.arange(12).reshape(1, 3, 4) == 5, -1e9, normal(1, 3, 4, seed=11)),),
        {"lam": 0.1},
        dtypes=_WIDE,
    ),
    "-inf cells": Case(
        (np.where(np.arange(12).reshape(1, 3, 4) % 5 == 0, -np.inf, normal(1, 3, 4, seed=12)),),
        {"lam": 0.1},
    ),
    "only masked cells, beside a grid that has others": Case(
        (np.stack([np.full((3, 3), -np.inf), normal(3, 3, seed=13)]),)
    ),
    "NaN stays in its grid": Case(
        (np.stack([normal(3, 3, seed=14), np.where(np.eye(3) == 1, np.nan, 0)]),)
    ),
    "+inf": Case((np.stack([normal(3, 3, seed=15), np.where(np.eye(3) == 1, np.inf, 0)]),)),
}

_PADDED = normal(5, 6, 7, seed=20)
_PADDED[1, 4:] = np.nan
_PADDED[2, :, 3:] = np.inf
_SIZES = np.array([[6, 7], [4, 7], [6, 3], [1, 1], [0, 5]])

MASKED_GRIDS = {
    "sizes": Case((_PADDED, _SIZES), {"lam": 0.05}),
    "lam 0": Case((_PADDED, _SIZES), {"lam": 0.0}),
    "lam 5": Case((_PADDED, _SIZES), {"lam": 5.0}),
    "two leading axes": Case(
        (normal(2, 2, 4, 4, seed=21), np.array([[[4, 4], [2, 3]], [[1, 4], [4, 1]]])), {"lam": 0.1}
    ),
    "no leading axis": Case((normal(4, 4, seed=22), np.array([3, 2]))),
    "empty batch": Case((np.zeros((0, 3, 3)), np.zeros((0, 2), np.int64))),
    "masked cell inside": Case(
        (np.where(np.arange(9).reshape(1, 3, 3) == 1, -np.inf, 0.0), np.array([[2, 3]])),
        {"lam": 0.1},
    ),
}

MATRICES = {
    "square": Case((normal(3, 14, 14),)),
    "odd": Case((normal(2, 9, 9, seed=1),)),
    "wide": Case((normal(2, 4, 11, seed=2),)),
    "tall": Case((normal(2, 11, 4, seed=3),)),
    "alpha 0.3": Case((normal(2, 8, 8, seed=4),), {"alpha": 0.3}),
    "alpha 1": Case((normal(2, 8, 8, seed=5),), {"alpha": 1.0}),
    "one by one": Case((np.array([[[4.0]], [[-9.0]], [[0.0]]]),)),
    "1 x n": Case((normal(2, 1, 6, seed=6),)),
    "n x 1": Case((normal(2, 6, 1, seed=7),)),
    "zero": Case((np.zeros((2, 5, 5)),)),
    "zero beside random": Case((np.stack([np.zeros((6, 6)), normal(6, 6, seed=8)]),)),
    "scaled identity": Case((4 * np.eye(6)[None],)),
    "rank one": Case((np.outer([1.0, 2, 0, -1], [0.5, 1, 2, 4])[None],)),
    "rank deficient": Case((np.kron(np.eye(2), np.ones((3, 3)))[None],)),
    "decay": Case((spectrum(8, 8, [1, 0.5, 0.1, 0.05, 0.01]),), dtypes=_WIDE),
    "magnitudes of 1e4": Case((normal(2, 7, 7, seed=9, scale=1e4),)),
    "1e-30": Case((normal(2, 7, 7, seed=10) * 1e-30,), dtypes=_WIDE),
    "1e30": Case((normal(2, 7, 7, seed=11) * 1e30,), dtypes=_WIDE),
    "four axes": Case((normal(2, 2, 5, 6, seed=12),)),
    "no leading axis": Case((normal(5, 6, seed=13),)),
    "empty batch": Case((np.zeros((0, 4, 4)),)),
    "NaN stays in its matrix": Case(
        (np.stack([normal(4, 4, seed=14), np.where(np.eye(4) == 1, np.nan, 1)]),)
    ),
    "inf": Case((np.stack([normal(4, 4, seed=15), np.where(np.eye(4) == 1, np.inf, 1)]),)),
}

FAST_MATRICES = {
    "square": Case((normal(3, 14, 14), normal(14, seed=30))),
    "wide": Case((normal(2, 4, 11, seed=2), normal(11, seed=31))),
    "tall": Case((normal(2, 11, 4, seed=3), normal(4, seed=32))),
    "alpha 0.3, five iterations": Case(
        (normal(2, 8, 8, seed=4), normal(8, seed=33)), {"alpha": 0.3, "iterations": 5}
    ),
    "three values": Case(
        (normal(2, 8, 8, seed=5), normal(8, seed=34)), {"singular_values": 3, "iterations": 3}
    ),
    "all values": Case(
        (normal(2, 4, 5, seed=6), normal(5, seed=35)),
        {"singular_values": 0, "iterations": 8},
        dtypes=_WIDE,
    ),
    "equation 8": Case((normal(2, 6, 6, seed=7), normal(6, seed=36)), {"epsilon": 0.0}),
    "alpha 1": Case((normal(2, 6, 6, seed=8), normal(6, seed=37)), {"alpha": 1.0}),
    "zero, epsilon 0": Case((np.zeros((2, 5, 5)), normal(5, seed=38)), {"epsilon": 0.0}),
    "zero": Case((np.zeros((2, 5, 5)), normal(5, seed=38))),
    "one by one": Case((np.array([[[4.0]], [[-9.0]]]), np.array([1.0]))),
    "magnitudes of 1e4": Case((normal(2, 7, 7, seed=9, scale=1e4), normal(7, seed=39)), {}, _WIDE),
    "four axes": Case((normal(2, 2, 5, 6, seed=12), normal(6, seed=40))),
    "no leading axis": Case((normal(5, 6, seed=13), normal(6, seed=41))),
    "empty batch": Case((np.zeros((0, 4, 4)), normal(4, seed=42))),
    "NaN stays in its matrix": Case(
        (np.stack([normal(4, 4, seed=14), np.where(np.eye(4) == 1, np.nan, 1)]), normal(4, seed=43))
    ),
}

CASES: dict[str, dict[str, Case]] = {
    "Sparsemax": SPARSEMAX,
    "TVMax": GRIDS,
    "MaskedTVMax": MASKED_GRIDS,
    "SvPN": MATRICES,
    "SvPNFast": FAST_MATRICES,
}
