# SPDX-License-Identifier: Apache-2.0
"""Substitutes for the ops: for TVMax copt and every method of prox_tv, for svPN torch."""

import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

Peer = Callable[[np.ndarray], np.ndarray]

# Looser settings are faster and tighter ones more exact. Which one is the fastest that is exact
# enough depends on the grids, so all are tried. copt stops at a difference of `tol`; the first is
# the setting of the official TVMAX code.
COPT_TOLERANCES = (1e-2, 1e-4, 1e-6, 1e-8)
# prox_tv has no tolerance. It stops by its own rule or after this many rounds; 0 is its default.
PROX_TV_ROUNDS = {
    "dr": (0, 5, 10, 20),
    "pd": (0, 3, 5, 10, 20, 100),
    "yang": (0, 5, 20),
    "condat": (0,),
    "chambolle-pock": (0,),
    "kolmogorov": (0,),
}


# Of the peers that are exact enough, this many of the fastest are timed in full.
FASTEST_PEERS = 3


def tv_peers(lam: float) -> dict[str, Peer]:
    """Return every setting by name; a missing package is skipped and named on standard error.

    Shapes: each takes grids [n h w] float64 -> p [n h w].
    """
    peers: dict[str, Peer] = {}
    # Without numba, copt runs in plain Python, a hundred times slower, which is not a fair peer.
    copt = _package("copt.tv_prox", requires="numba")
    if copt is not None:
        for tolerance in COPT_TOLERANCES:
            peers[f"copt tol={tolerance:g}"] = partial(_copt, copt, lam, tolerance)
    prox_tv = _package("prox_tv")
    if prox_tv is not None:
        for method, choices in PROX_TV_ROUNDS.items():
            for rounds in choices:
                setting = f" max_iters={rounds}" if rounds else ""
                name = f"prox_tv {method}{setting}"
                peers[name] = partial(_prox_tv, prox_tv, lam, method, rounds)
    return peers


def tried_once(peers: dict[str, Peer], grids: np.ndarray) -> dict[str, Peer]:
    """Sort the peers from fastest to slowest by one call each, after a warm-up call."""
    times = {}
    for name, peer in peers.items():
        peer(grids[:1])  # the first call compiles copt
        start = time.perf_counter()
        peer(grids)
        times[name] = time.perf_counter() - start
    return {name: peers[name] for name in sorted(times, key=lambda name: times[name])}


def exact_enough(
    peers: dict[str, Peer], grids: list[np.ndarray], exact: list[np.ndarray], allowed: float
) -> dict[str, tuple[Peer, float]]:
    """Return the fastest few peers whose error is within `allowed` on all sets of grids, with it.

    On a single set, a loose setting may be right by chance.
    """
    best: dict[str, tuple[Peer, float]] = {}
    for name, peer in peers.items():
        error = 0.0
        for each, answer in zip(grids, exact, strict=True):
            error = max(error, largest(peer(each), answer))
            if error > allowed:
                break
        else:
            best[name] = (peer, error)
        if len(best) == FASTEST_PEERS:
            break
    return best


def largest(actual: np.ndarray, exact: np.ndarray) -> float:
    """Return the largest Euclidean distance of a grid's answer."""
    return float(np.sqrt(np.square(actual - exact).sum(axis=(-2, -1))).max())


def sparsemax(values: np.ndarray) -> np.ndarray:
    """Project each row onto the simplex.

    Shapes: values [n k] -> weights [n k].
    """
    ordered = np.sort(values, axis=-1)[:, ::-1]
    sums = np.cumsum(ordered, axis=-1) - 1
    inside = np.arange(1, values.shape[-1] + 1) * ordered > sums
    support = np.count_nonzero(inside, axis=-1)[:, None]
    return np.maximum(values - np.take_along_axis(sums, support - 1, -1) / support, 0)


def _package(name: str, requires: str = "numpy") -> ModuleType | None:
    try:
        import_module(requires)
        return import_module(name)
    except (ImportError, OSError) as error:
        print(f"ops_peers: skipped {name.split('.')[0]}: {error}", file=sys.stderr)
        return None


def _copt(copt: ModuleType, lam: float, tolerance: float, grids: np.ndarray) -> np.ndarray:
    n, h, w = grids.shape
    flat = grids.reshape(n, h * w)
    # Many more rounds than needed, so that the tolerance decides.
    solved = [
        copt.prox_tv2d(question, lam, h, w, max_iter=2000, tol=tolerance) for question in flat
    ]
    return sparsemax(np.stack(solved)).reshape(grids.shape)


def _prox_tv(
    prox_tv: ModuleType, lam: float, method: str, rounds: int, grids: np.ndarray
) -> np.ndarray:
    solved = [
        prox_tv.tv1_2d(grid, lam, n_threads=1, max_iters=rounds, method=method) for grid in grids
    ]
    return sparsemax(np.stack(solved).reshape(len(grids), -1)).reshape(grids.shape)


def svd_power(q: Any) -> Any:
    """SvPN with alpha 0.5 by an SVD in torch."""
    u, s, vt = import_module("torch").linalg.svd(q, full_matrices=False)
    return (u * s.sqrt().unsqueeze(-2)) @ vt


def svpn_iterated(q: Any, start: Any) -> Any:
    """Equations 6 to 8 in torch, with one singular value, one iteration and alpha 0.5."""
    unit = import_module("torch").nn.functional.normalize
    u = unit(q @ start, dim=-1)
    v = unit((u.unsqueeze(-2) @ q).squeeze(-2), dim=-1)
    s = ((u.unsqueeze(-2) @ q).squeeze(-2) * v).sum(-1)[..., None, None]
    outer = u.unsqueeze(-1) * v.unsqueeze(-2)
    return s.sqrt() * outer + (q - s * outer) / (s.sqrt() + 1e-5)
