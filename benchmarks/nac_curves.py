# SPDX-License-Identifier: Apache-2.0
"""Measure the links of a trained circuit, and its scores with fewer and fewer modules."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.models.data.datasets import Dataset
from saccade.models.nac.model import NAC
from saccade.models.nac.skmdpa import evaluation_bias, signature_distance
from saccade.models.scores.intervals import paired_bootstrap

RANDOM_ORDERS = 2
_ROWS = 2_048  # modules in a batch
ORDERS = ("degree", "random", "reversed")


@torch.no_grad()
def links_of(model: NAC) -> dict[str, Any]:
    """Measure the learned links of an unconditional circuit, by its weights and not its prior.

    Units: degrees are sums of link probabilities to the other modules; shares are of all pairs.
    """
    others = model.config.modules - 1
    signatures = model.generator().signatures
    if signatures is None:
        return {"mean_degree": float(others), "share_of_links": 1.0, "likely_links": 1.0}
    distance = signature_distance(signatures.double(), signatures.double())
    links = evaluation_bias(distance, model.config.epsilon).exp().fill_diagonal_(0)
    degree = links.sum(1)
    pairs = len(degree) * others
    return {
        "mean_degree": float(degree.mean()),
        "least_degree": float(degree.min()),
        "most_degree": float(degree.max()),
        "share_of_links": float(degree.mean()) / others,
        "likely_links": int((links > 0.5).sum()) / pairs,
        "prior_degree": model.config.graph_degree,
    }


def orders_of(model: NAC) -> dict[str, list[Tensor]]:
    """Return orders in which modules are kept: best connected first, random, worst first."""
    degree = model.rank_modules().clone()
    rng = np.random.default_rng(0)
    modules = model.config.modules
    drawn = [torch.from_numpy(rng.permutation(modules)) for _ in range(RANDOM_ORDERS)]
    return {"degree": [degree], "random": drawn, "reversed": [degree.flip(0)]}


def right_by_kept(model: NAC, order: Tensor, test: Dataset, kept: Sequence[int]) -> dict[int, Any]:
    """Return right or wrong for each sample, by the number of modules kept.

    Shapes: order int64 [u] -> bool [n] each.
    """
    labels = torch.from_numpy(test.labels)
    tokens = _tokens(model, test)
    before = model.module_order.clone()
    model.module_order.copy_(order)
    right = {}
    for each in kept:
        small = model.prune(each / model.config.modules).eval()
        small.tokenizer = _AsIs()
        folded = small.fold()
        with torch.inference_mode():
            # Small enough for attention maps to fit the CPU's caches: twice as fast at 256 modules.
            parts = tokens.split(max(8, _ROWS // each))
            answers = torch.cat([folded(part).argmax(1) for part in parts])
        right[each] = (answers == labels).numpy()
    model.module_order.copy_(before)
    return right


class _AsIs(nn.Module):
    """Replaces a tokenizer by its precomputed tokens."""

    def forward(self, x: Tensor, length: Tensor | None = None) -> Tensor:
        return x


@torch.inference_mode()
def _tokens(model: NAC, test: Dataset) -> Tensor:
    model.eval()
    images = torch.from_numpy(test.images)
    return torch.cat([model.tokenizer(part) for part in images.split(100)])


def curves_of(
    model: NAC, test: Dataset, *, grid: Sequence[int], controls: Sequence[int]
) -> dict[str, Any]:
    """Score by order and by modules kept, with the paired interval to all modules by degree.

    `grid` are the numbers of modules for the order by degree, `controls` for the other orders.
    """
    modules = model.config.modules
    curves: dict[str, Any] = {}
    full: np.ndarray | None = None
    for name, orders in orders_of(model).items():
        kept = grid if name == "degree" else controls
        runs = [right_by_kept(model, order, test, kept) for order in orders]
        curves[name] = {
            str(each): statistics.fmean(float(run[each].mean()) for run in runs) for each in kept
        }
        if name == "degree":
            full = runs[0][modules]
            curves["minus_full_interval"] = {
                str(each): list(paired_bootstrap(runs[0][each], full, samples=2_000))
                for each in kept
            }
    return curves


def dropped(curve: dict[str, float], modules: int, points: float) -> float:
    """Return the largest share of modules up to which dropping loses at most `points`."""
    share, full = 0.0, curve[str(modules)]
    for kept in sorted(map(int, curve), reverse=True):
        if curve[str(kept)] < full - points / 100:
            break
        share = 1 - kept / modules
    return share
