# SPDX-License-Identifier: Apache-2.0
"""Pooling of a tower's tokens into one code: slots, and the paper's baselines."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.sparo.config import SparoConfig
from saccade.models.sparo.readout import ReadOut, attend, unit_code
from saccade.plugins.ops import sparsemax


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
        self.read_out: nn.Module = ReadOut(shape, own_query=own_query)
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
        k, v = (
            layer(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.k, self.v)
        )
        logits = (k @ (q.mT / math.sqrt(k.shape[-1]))).mT
        weights = attend(logits.flatten(1, 2), end).unflatten(1, (self.heads, -1))
        answers = self.norm(self.out((weights @ v).transpose(1, 2).flatten(2)))
        state = answers.mean(1) if self.mean else answers[:, 0]
        feature = self.widen(self.project(state))
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
        self.words_from = 1 + config.registers  # of an image
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
            behind = torch.arange(tokens.shape[1], device=tokens.device) > end[:, None]
            inner = inner.masked_fill(behind.unsqueeze(-1), 0.0)
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
}


def pool(config: SparoConfig, tower: str) -> nn.Module:
    """Create the pooling of the tokens of `image` or `text`."""
    kind: str = config.pooling
    if tower == "text":
        kind = config.text_pooling
        if kind == "same":
            kind = "eos" if config.pooling in ("cls", "gap") else config.pooling
    return POOLS[kind](config, tower)
