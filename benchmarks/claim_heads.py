# SPDX-License-Identifier: Apache-2.0
"""Read-outs between SPARO's and the attentional pooler's, as in its table 6, for the recipes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from saccade.models.sparo.config import SparoConfig
from saccade.models.sparo.fold import FoldedSparo
from saccade.models.sparo.pooling import POOLS, SlotPool


class Ablated(nn.Module):
    """SPARO's read-out, followed by a mixture of its heads, a LayerNorm and a projection.

    With multi-head attention, a linear layer mixes the answers of all heads. The norm and the
    projection act on each slot with the same parameters, or on the whole code.

    Shapes: as `SlotReadOut`.
    Source: Vani et al. 2024, section 5.3.
    """

    def __init__(
        self, read_out: nn.Module, config: SparoConfig, heads: str, norm: str, projection: str
    ) -> None:
        super().__init__()
        self.read_out, self.slots = read_out, config.slots
        width = {"slot": config.slot_dim, "whole": config.slots * config.slot_dim}
        self.mix = nn.Linear(width["whole"], width["whole"]) if heads == "multi" else nn.Identity()
        self.norm = nn.LayerNorm(width[norm])
        self.project = nn.Linear(width[projection], width[projection])

    def forward(
        self, tokens: Tensor, end: Tensor | None = None, query: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        slots, attention = self.read_out(tokens, end, query)
        code = self.mix(slots.flatten(1))
        for layer, width in (
            (self.norm, self.norm.normalized_shape[0]),
            (self.project, self.project.in_features),
        ):
            code = layer(code.unflatten(1, (-1, width))).flatten(1)
        return code.unflatten(1, (self.slots, -1)), attention


def _pool(arm: Mapping[str, str], config: SparoConfig, tower: str) -> nn.Module:
    pool = SlotPool(config, tower)
    pool.read_out = Ablated(pool.read_out, config, **arm)
    return pool


@contextmanager
def read_out(arm: Mapping[str, str] | None) -> Iterator[None]:
    """Let models with slots be made with the read-out of an arm inside the block; None: as usual.

    An arm has `heads` (separate or multi), and `norm` and `projection` (slot or whole).
    """
    usual, fold = POOLS["sparo"], FoldedSparo._fold_read_outs
    if arm is not None:
        POOLS["sparo"] = partial(_pool, arm)  # type: ignore[assignment]
        FoldedSparo._fold_read_outs = lambda self: None  # they are not SPARO's own
    try:
        yield
    finally:
        POOLS["sparo"], FoldedSparo._fold_read_outs = usual, fold
