# SPDX-License-Identifier: Apache-2.0
"""Pooling of a tower's tokens into one code: slots, and the paper's baselines."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.layers.transformer import ACTIVATIONS, widened
from saccade.models.sparo.config import ReadOutShape, SparoConfig
from saccade.plugins.ops import sparsemax


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


class PoolingOutput(NamedTuple):
    """The output of a tower.

    Shapes: code [b e] of length 1; feature [b e] before normalization (slots have none); slots
            [b k v], whose concatenation is the code; raw, the slots before weighting; attention
            [b k n]; probe_features [b f], those of DINO's linear probe.
    """

    code: Tensor
    feature: Tensor | None = None
    probe_features: Tensor | None = None
    slots: Tensor | None = None
    raw: Tensor | None = None
    attention: Tensor | None = None


class SlotPool(nn.Module):
    """A LayerNorm of all tokens, followed by the read-out."""

    def __init__(self, config: SparoConfig, tower: str) -> None:
        super().__init__()
        shape = config.read_out(tower)
        own_query = tower == "image" or not config.share_queries
        self.norm = nn.LayerNorm(shape.dim, eps=config.eps)
        self.read_out: nn.Module = SlotReadOut(shape, own_query=own_query)
        self.kind = config.sparo_type

    def forward(
        self, tokens: Tensor, end: Tensor | None = None, query: Tensor | None = None
    ) -> PoolingOutput:
        raw, attention = self.read_out(self.norm(tokens), end, query)
        slots = unit_code(raw, self.kind)
        return PoolingOutput(slots.flatten(1), slots=slots, raw=raw, attention=attention)


class StatePool(nn.Module):
    """One state of the tokens (first token, end token or mean), normalized and projected."""

    def __init__(self, config: SparoConfig, tower: str) -> None:
        super().__init__()
        width = config.image_width if tower == "image" else config.text_width
        self.mean = tower == "image" and config.pooling == "gap"
        self.norm = nn.LayerNorm(width, eps=config.eps)
        self.project = nn.Linear(width, config.feature_dim, bias=False)
        nn.init.normal_(self.project.weight, std=width**-0.5)
        self.widen = bottleneck(config)

    def forward(
        self, tokens: Tensor, end: Tensor | None = None, query: Tensor | None = None
    ) -> PoolingOutput:
        if end is not None:
            state = tokens.gather(1, end[:, None, None].expand(-1, 1, tokens.shape[-1])).squeeze(1)
        else:
            state = tokens.mean(1) if self.mean else tokens[:, 0]
        feature = self.widen(self.project(self.norm(state)))
        return PoolingOutput(F.normalize(feature, dim=-1), feature)


class AttentionPool(nn.Module):
    """Multi-head attention of learned queries, whose answers are normalized; one is projected.

    The projected vector is the first query's answer, or the mean of all answers.

    Source: Yu et al. 2022 (CoCa) as in OpenCLIP v2.20. By its number of parameters, the
        AttPool of table 6 in Vani et al. 2024 does not project its queries.
    """

    constant: Tensor | None  # the precomputed queries, in the folded form

    def __init__(self, config: SparoConfig, tower: str) -> None:
        super().__init__()
        width = config.image_width if tower == "image" else config.text_width
        pooled, shape = config.feature_dim, config.pooler(tower)
        self.heads, self.mean = shape.heads, shape.mean
        self.query = nn.Parameter(torch.randn(shape.queries, pooled))
        self.norm_query = nn.LayerNorm(pooled, eps=config.eps)
        self.norm_tokens = nn.LayerNorm(width, eps=config.eps)
        self.q = nn.Linear(pooled, pooled)
        self.k = nn.Linear(width, pooled)
        self.v = nn.Linear(width, pooled)
        self.out = nn.Linear(pooled, pooled)
        self.norm = nn.LayerNorm(pooled, eps=config.eps)
        self.project = nn.Linear(pooled, pooled, bias=False)
        nn.init.normal_(self.project.weight, std=pooled**-0.5)
        self.widen = bottleneck(config)
        self.register_buffer("constant", None, persistent=False)

    def asked(self) -> Tensor:
        """Return the queries in use, by head.

        Shapes: -> [heads k w].
        """
        query = self.query if self.mean else self.query[:1]  # the other answers are not used
        return self.q(self.norm_query(query)).unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def forward(
        self, tokens: Tensor, end: Tensor | None = None, query: Tensor | None = None
    ) -> PoolingOutput:
        tokens = self.norm_tokens(tokens)
        q = self.asked() if self.constant is None else self.constant
        answers = self.norm(self.out(answers_of(q, self.k(tokens), self.v(tokens), end)))
        state = answers.mean(1) if self.mean else answers[:, 0]
        feature = self.widen(self.project(state))
        return PoolingOutput(F.normalize(feature, dim=-1), feature)


def answers_of(q: Tensor, k: Tensor, v: Tensor, end: Tensor | None) -> Tensor:
    """Return what queries read from the tokens, with all heads side by side.

    Shapes: q [heads k w], k and v [b n (heads w)], end [b] -> [b k (heads w)].
    """
    heads = q.shape[0]
    k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (k, v))
    logits = (k @ (q.mT / math.sqrt(k.shape[-1]))).mT
    weights = attend(logits.flatten(1, 2), end).unflatten(1, (heads, -1))
    return (weights @ v).transpose(1, 2).flatten(2)


class MapPool(nn.Module):
    """One learned query attends to the normalized tokens of an image; then an MLP, with a residual.

    Source: Zhai et al. 2022 (Scaling Vision Transformers), its attention pooling, as in SigLIP.
    """

    constant: Tensor | None  # the precomputed query, in the folded form

    def __init__(self, config: SparoConfig, tower: str) -> None:
        super().__init__()
        width = config.image_width
        self.heads, self.activation = config.image_heads, config.activation
        self.norm = nn.LayerNorm(width, eps=config.eps)
        self.query = nn.Parameter(torch.randn(1, width))
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width, eps=config.eps)
        self.widen = nn.Linear(width, widened(config.image_hidden, config.activation))
        self.narrow = nn.Linear(config.image_hidden, width)
        self.register_buffer("constant", None, persistent=False)

    def asked(self) -> Tensor:
        """Return the query by head.

        Shapes: -> [heads 1 w].
        """
        return self.q(self.query).unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def forward(
        self, tokens: Tensor, end: Tensor | None = None, query: Tensor | None = None
    ) -> PoolingOutput:
        tokens = self.norm(tokens)
        q = self.asked() if self.constant is None else self.constant
        x = self.out(answers_of(q, self.k(tokens), self.v(tokens), end))[:, 0]
        feature = x + self.narrow(ACTIVATIONS[self.activation](self.widen(self.norm_mlp(x))))
        return PoolingOutput(F.normalize(feature, dim=-1), feature)


class MeanPool(nn.Module):
    """The mean of an image's patches after the trunk's last norm; a ResNet has none."""

    def __init__(self, config: SparoConfig, tower: str) -> None:
        super().__init__()
        self.words_from = config.first_tokens
        bare = config.shape.is_resnet
        self.norm = nn.Identity() if bare else nn.LayerNorm(config.image_width, eps=config.eps)

    def forward(
        self, tokens: Tensor, end: Tensor | None = None, query: Tensor | None = None
    ) -> PoolingOutput:
        feature = self.norm(tokens)[:, self.words_from :].mean(1)
        return PoolingOutput(F.normalize(feature, dim=-1), feature)


class QueryMap(nn.Module):
    """A map of tokens into the space of the codebook.

    Shapes: tokens [b n width] -> [b n code].
    """

    def __init__(self, width: int, code: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.first = nn.Linear(width, code)
        self.norm_hidden = nn.LayerNorm(code, eps=eps)
        self.second = nn.Linear(code, code)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(self.norm_hidden(F.gelu(self.first(self.norm(tokens)))))


class CodebookPool(nn.Module):
    """Finite discrete tokens: a sparse mixture of the codes that are closest to some token.

    The towers share the codebook, which is passed as `query`. Positions after the end of a text
    match every code with 0, as in the authors' code.

    Source: Vani et al. 2024, appendix B.2 (FDT).
    """

    def __init__(self, config: SparoConfig, tower: str) -> None:
        super().__init__()
        width = config.image_width if tower == "image" else config.text_width
        self.words_from = config.first_tokens  # of an image
        self.map = QueryMap(width, config.feature_dim, config.eps)
        self.temperature = config.temperature
        self.widen = bottleneck(config)

    def forward(
        self, tokens: Tensor, end: Tensor | None = None, query: Tensor | None = None
    ) -> PoolingOutput:
        assert query is not None
        inner = self.map(tokens if end is not None else tokens[:, self.words_from :]) @ query.mT
        inner = inner / math.sqrt(query.shape[-1])
        if end is not None:
            padding = torch.arange(tokens.shape[1], device=tokens.device) > end[:, None]
            inner = inner.masked_fill(padding.unsqueeze(-1), 0.0)
        weights = sparsemax(inner.amax(1) / self.temperature)
        feature = self.widen(weights @ query)
        return PoolingOutput(F.normalize(feature, dim=-1), feature)


def bottleneck(config: SparoConfig) -> nn.Module:
    """Return the affine layer of a linear bottleneck, or the identity."""
    if not config.bottleneck_dim:
        return nn.Identity()
    return nn.Linear(config.bottleneck_dim, config.embed_dim)


POOLS: dict[str, type[nn.Module]] = {
    "sparo": SlotPool,
    "cls": StatePool,
    "gap": StatePool,
    "eos": StatePool,
    "attention": AttentionPool,
    "codebook": CodebookPool,
    "map": MapPool,
    "mean": MeanPool,
}
# With these, a text has the state of its end token.
_OF_IMAGES = ("cls", "gap", "map", "mean")


def pool(config: SparoConfig, tower: str) -> nn.Module:
    """Create the pooling of the tokens of `image` or `text`."""
    kind: str = config.pooling
    if tower == "text":
        kind = config.text_pooling
        if kind == "same":
            kind = "eos" if config.pooling in _OF_IMAGES else config.pooling
    return POOLS[kind](config, tower)
