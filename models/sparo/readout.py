# SPDX-License-Identifier: Apache-2.0
"""Slots that attend to the tokens with constant queries, and the code that they form."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.sparo.config import ReadOutShape


class SlotReadOut(nn.Module):
    """Single-head attention per slot; all slots share the last projection of the values.

    Shapes: tokens [b n dim], end [b] int64 (the last valid position), query [k attn_dim] instead
            of its own -> slots [b k slot_dim (+ 1 if gated, the gate first)],
            attention [b k n].
    Source: Vani et al. 2024, eq. 1 and appendix A.
    """

    def __init__(self, shape: ReadOutShape, *, own_query: bool = True) -> None:
        super().__init__()
        self.shape = shape
        slots = len(shape.head_of)
        self.query = nn.Parameter(torch.randn(slots, shape.attn_dim)) if own_query else None
        self.key = _projection(shape.dim, shape.heads * shape.attn_dim)
        self.value: nn.Linear | None = None
        if not shape.share_kv:
            self.value = _projection(shape.dim, shape.heads * shape.value_dim)
        self.project = nn.Linear(shape.value_dim, shape.slot_dim + int(shape.gated))
        nn.init.zeros_(self.project.bias)

    def forward(
        self, tokens: Tensor, end: Tensor | None = None, query: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        query = self.query if query is None else query
        assert query is not None
        keys = self._of_slots(self.key(tokens), self.shape.attn_dim)
        logits = keys @ (query / math.sqrt(self.shape.attn_dim)).unsqueeze(-1)
        attention = attend(logits.squeeze(-1), end)
        values = keys
        if self.value is not None:
            values = self._of_slots(self.value(tokens), self.shape.value_dim)
        pooled = (attention.unsqueeze(-2) @ values).squeeze(-2)
        return self.project(pooled), attention

    def _of_slots(self, x: Tensor, width: int) -> Tensor:
        """Shapes: x [b n (heads width)] -> [b k n width]."""
        shape = self.shape
        of_heads = x.unflatten(-1, (shape.heads, width)).transpose(1, 2)
        if shape.head_of == tuple(range(shape.heads)):
            return of_heads
        return of_heads[:, torch.tensor(shape.head_of, device=x.device)]


def _projection(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def attend(logits: Tensor, end: Tensor | None) -> Tensor:
    """Return the softmax over the tokens, without those after `end`.

    Shapes: logits [b k n], end [b] -> [b k n].
    """
    if end is not None:
        padding = torch.arange(logits.shape[-1], device=logits.device) > end[:, None, None]
        logits = logits.masked_fill(padding, -torch.inf)
    return logits.softmax(-1)


def unit_code(raw: Tensor, kind: str) -> Tensor:
    """Weight slots so that their concatenation has length 1.

    `kind` is "representation:weight". Representations: cont, the slot's direction; sqrtsem, the
    root of a softmax over its channels; sem, that softmax normalized to length 1. Weights: const,
    equal; norm, the slot's share of the whole norm; sqrtsoftmax and softmax, from a gate.

    Shapes: raw [b k v], or [b k 1+v] with the gate first -> [b k v].
    Source: Vani et al. 2024, section 3.3 (cont:const is eq. 2); the others as in the authors' code.
    """
    representation, _, weight = kind.partition(":")
    if weight == "norm":
        return _weighed_by_norm(raw, representation)
    gates, slots = (raw[..., :1], raw[..., 1:]) if weight != "const" else (None, raw)
    if representation == "cont":
        directions = F.normalize(slots, dim=-1)
    else:
        shares = slots.softmax(-1)
        directions = shares.sqrt() if representation == "sqrtsem" else F.normalize(shares, dim=-1)
    if gates is None:
        return directions / math.sqrt(raw.shape[-2])
    chosen = gates.softmax(-2)
    weights = chosen.sqrt() if weight == "sqrtsoftmax" else F.normalize(chosen, dim=-2)
    return directions * weights


def _weighed_by_norm(raw: Tensor, representation: str) -> Tensor:
    flat = raw.flatten(-2)
    if representation == "sqrtsem":
        # sqrt(exp(x) / sum exp(x)) over all channels equals slot norm times direction.
        return flat.softmax(-1).sqrt().unflatten(-1, raw.shape[-2:])
    return F.normalize(flat, dim=-1).unflatten(-1, raw.shape[-2:])


def selected(
    state: dict[str, Tensor], before: ReadOutShape, chosen: list[int]
) -> dict[str, Tensor]:
    """Return the weights of a read-out with only these slots: their queries and used heads.

    Shapes: state is a ReadOut's state_dict; chosen are positions in `before.head_of`, ascending.
    """
    heads = torch.tensor(sorted({before.head_of[slot] for slot in chosen}))
    kept = dict(state)
    if "query" in state:
        kept["query"] = state["query"][torch.tensor(chosen)]
    for name, width in (("key", before.attn_dim), ("value", before.value_dim)):
        for key in (f"{name}.weight", f"{name}.bias"):
            if key in state:
                split = state[key].unflatten(0, (before.heads, width))
                kept[key] = split[heads.to(split.device)].flatten(0, 1)
    return kept
