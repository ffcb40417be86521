# SPDX-License-Identifier: Apache-2.0
"""A sparse circuit: each module keeps its strongest links, and attention gathers those senders."""

import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.models.budget import Budget, ComputeBudget, fraction_budget

if TYPE_CHECKING:
    from torch import Tensor

UNIT = "links"
_LINKS = re.compile(r"k([0-9]{1,5})(b[0-9]{4})?")
# Numbers gathered at once in torch: a MiB in float32, which stays in the caches between two passes.
_AT_ONCE = 2**18


def links_budget(config: Any, text: str) -> ComputeBudget | None:
    """Return the budget k16, in which a module hears 16 senders, or None if it is another text.

    The modules to keep may follow, as in k16b0500. The share is that of the propagators'
    multiply-adds.

    Raises: SaccadeError if the NAC has no links to choose from, or not more than are asked for.
    """
    found = _LINKS.fullmatch(text.strip())
    if found is None:
        return None
    kept = fraction_budget(found[2], config.modules, "modules").kept if found[2] else config.modules
    links, total = int(found[1]), kept + config.read_in_modules
    senders = config.links or config.modules + config.read_in_modules
    check_links(config, links, kept, f"budget {text!r}")
    work = Fraction(kept, config.modules) * _work(config, links) / _work(config, senders)
    label = f"k{links}{found[2] or ''}"
    return ComputeBudget(label, Budget(float(work)), links, total, UNIT)


def check_links(config: Any, links: int, modules: int, what: str) -> None:
    """Check that modules can keep `links` links each, and lose some, if `modules` modules are left.

    Raises: SaccadeError naming `what`.
    """
    if reason := _linkless(config):
        raise SaccadeError(
            f"{what}: this NAC {reason}. Keep fewer modules instead: --budget 1,0.5,0.25."
        )
    total = min(modules + config.read_in_modules, config.links or math.inf)
    if not 1 <= links < total:
        fewer = f"Choose 1 to {total - 1}, as in --budget k{total - 1}; " if total > 1 else ""
        raise SaccadeError(
            f"{what}: keeps {links} links of a module, which has {total} with its own. "
            f"{fewer or 'Here, '}leave links out to keep all."
        )


def _linkless(config: Any) -> str:
    if config.conditional:
        return "makes a circuit for each sample, so no links can be chosen in advance"
    if config.connectivity == "dense":
        return "has no links that are stronger than others (connectivity 'dense')"
    return "" if config.propagator_layers else "has no propagators, so no links between modules"


def _work(config: Any, links: int) -> int:
    """Return a processor module's multiply-adds in a propagator."""
    width, layers = config.attention_width, 2 if config.ffn_gate == "none" else 3
    return 4 * config.dim * width + 2 * links * width + layers * config.dim * config.ffn_dim


def strongest(distance: "Tensor", links: int) -> "Tensor":
    """Return the senders of each module: itself and the nearest others, of equals the first.

    The link probability falls with the distance at every bandwidth, so these links are the
    strongest in every layer.

    Shapes: distance [u j] -> int64 [u links], each row in ascending order.
    """
    order = distance.clone().fill_diagonal_(-math.inf).argsort(dim=-1, stable=True)
    return order[:, :links].sort(-1).values


def without_other_links(distance: "Tensor", neighbors: "Tensor | None") -> "Tensor":
    """Return the distances, infinite except to neighbors: K = 0 for the others.

    Shapes: distance [u j], neighbors int64 [u links] (None: all) -> [u j].
    """
    if neighbors is None:
        return distance
    return distance.new_full(distance.shape, math.inf).scatter(
        1, neighbors, distance.gather(1, neighbors)
    )


def attention_over_links(
    q: "Tensor", k: "Tensor", v: "Tensor", bias: "Tensor", neighbors: "Tensor", *, heads: int
) -> "Tensor":
    """Return softmax(q k^T + bias) v over each module's own senders; q is already scaled.

    Cost and memory grow with the number of links, not with that of pairs.

    Shapes: q [b u d], k, v [b j d], bias [u links], neighbors int64 [u links] -> [b u d].
    """
    import torch

    q, k, v = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
    form = _as_products if torch.compiler.is_exporting() else _in_parts
    return form(q, k, v, bias, neighbors).flatten(2)


def _as_products(
    q: "Tensor", k: "Tensor", v: "Tensor", bias: "Tensor", neighbors: "Tensor"
) -> "Tensor":
    """Return what modules hear, by a gather and a batch of products, which runtimes do fast.

    Shapes: q [b u h e], k, v [b j h e] -> [b u h e].
    """
    k, v = (
        x.transpose(1, 2).index_select(2, neighbors.flatten()).unflatten(2, tuple(neighbors.shape))
        for x in (k, v)
    )
    scores = (k @ q.transpose(1, 2).unsqueeze(-1)).squeeze(-1) + bias
    return (scores.softmax(-1).unsqueeze(-2) @ v).squeeze(-2).transpose(1, 2)


def _in_parts(
    q: "Tensor", k: "Tensor", v: "Tensor", bias: "Tensor", neighbors: "Tensor"
) -> "Tensor":
    """Return the same without batches of small products, which torch does slowly on a CPU.

    Shapes: q [b u h e], k, v [b j h e] -> [b u h e].
    """
    import torch

    b, senders, heads, _ = k.shape
    links, scores = neighbors.shape[1], []
    rows = max(1, _AT_ONCE // (links * k[:, 0].numel()))
    for asked, heard in zip(q.split(rows, 1), neighbors.split(rows), strict=True):
        keys = k.index_select(1, heard.flatten()).unflatten(1, tuple(heard.shape))
        scores.append(keys.mul_(asked.unsqueeze(2)).sum(-1))
    weights = (
        (torch.cat(scores, 1) + bias.unsqueeze(-1)).softmax(2).transpose(2, 3)
    )  # [b u h links]
    head = torch.arange(heads, device=k.device).unsqueeze(-1)
    sample = torch.arange(b, device=k.device).view(-1, 1, 1, 1)
    place = (sample * senders + neighbors.unsqueeze(1)) * heads + head  # of each sender in all of v
    heard = torch.nn.functional.embedding_bag(
        place.reshape(-1, links),
        v.reshape(b * senders * heads, -1),
        mode="sum",
        per_sample_weights=weights.reshape(-1, links),
    )
    return heard.view(q.shape)
