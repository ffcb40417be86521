# SPDX-License-Identifier: Apache-2.0
"""The classification head of SoT: class token and pooled word tokens, fused in six ways."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.sot.config import SoTConfig
from saccade.plugins.ops import svpn, svpn_fast


class ExactSvPN(nn.Module):
    """Exact svPN: singular values s to the power alpha.

    The slope of s^alpha is unbounded at 0: where a covariance has nearly lost a rank, it turns a
    rounding into a visible change. With a ridge r, a share of the matrix's Frobenius norm, s
    becomes s (s^2 + r^2)^((alpha - 1)/2), whose slope is at most r^(alpha - 1). Values far above r
    change little.

    Shapes: q [... m n] -> the same.
    Source: Xie et al. 2021, eq. 5; the ridge is ours.
    """

    def __init__(self, alpha: float, ridge: float = 0.0) -> None:
        super().__init__()
        self.alpha, self.ridge = alpha, ridge

    def forward(self, q: Tensor) -> Tensor:
        if not self.ridge:
            return svpn(q, alpha=self.alpha)
        # Q above r I has the right singular vectors of Q, and the singular values
        # sqrt(s^2 + r^2). The first rows of its svPN are the formula above.
        m, n = q.shape[-2:]
        length = torch.linalg.vector_norm(q, dim=(-2, -1), keepdim=True)
        below = self.ridge * length * torch.eye(n, dtype=q.dtype, device=q.device)
        return svpn(torch.cat((q, below), -2), alpha=self.alpha)[..., :m, :]


class FastSvPN(nn.Module):
    """Fast svPN: power iteration for the largest singular values; the last one scales the rest.

    Shapes: q [... m n] -> the same.
    Source: Xie et al. 2021, eq. 6 to 8.
    """

    start: Tensor

    def __init__(self, config: SoTConfig) -> None:
        super().__init__()
        self.config = config
        if config.learned_start:
            self.start = nn.Parameter(torch.randn(config.n))
        else:
            self.register_buffer("start", torch.ones(config.n), persistent=False)

    def forward(self, q: Tensor) -> Tensor:
        config = self.config
        return svpn_fast(
            q,
            self.start,
            alpha=config.alpha,
            singular_values=config.singular_values,
            iterations=config.iterations,
            epsilon=config.svpn_epsilon,
        )


class Scale(nn.Module):
    """One factor 1/tau for all matrices, initially m^(-1/2).

    Shapes: q [... m n] -> the same.
    Source: Xie et al. 2021, section 4.2.2 (1/tau).
    """

    factor: Tensor

    def __init__(self, m: int, *, learned: bool) -> None:
        super().__init__()
        factor = torch.tensor(1 / math.sqrt(m))
        if learned:
            self.factor = nn.Parameter(factor)
        else:
            self.register_buffer("factor", factor, persistent=False)

    def forward(self, q: Tensor) -> Tensor:
        return q * self.factor


class ElementPower(nn.Module):
    """Signed square root of each entry, then normalization to length 1.

    Shapes: q [... m n] -> the same; over both axes of a matrix, or over its rows' axis.
    Source: EPN in Xie et al. 2021, table 4(d).
    """

    def __init__(self, axis: str, epsilon: float) -> None:
        super().__init__()
        self.axes = (-2,) if axis == "rows" else (-2, -1)
        self.epsilon = epsilon

    def forward(self, q: Tensor) -> Tensor:
        root = q.sign() * (q.abs() + self.epsilon).sqrt()
        length = root.square().sum(self.axes, keepdim=True).sqrt()
        return root / length.clamp(min=1e-12)


def normalization(config: SoTConfig) -> nn.Module:
    """Create the normalization that the configuration names."""
    name = config.normalization
    if name == "svpn":
        return ExactSvPN(config.alpha, config.svpn_ridge)
    if name == "svpn-fast":
        return FastSvPN(config)
    if name in ("scale", "scale-learned"):
        return Scale(config.m, learned=name == "scale-learned")
    if name == "epn":
        return ElementPower(config.epn_axis, config.epn_epsilon)
    if name == "layer-norm":
        return nn.LayerNorm(config.n, eps=1e-5)
    return nn.Identity()


def square_root(covariance: Tensor, steps: int) -> Tensor:
    """Return the square root of positive semidefinite matrices by Newton-Schulz steps (iSQRT).

    Shapes: covariance [... d d] -> the same; a zero matrix gives zeros.
    Source: Li et al. 2018, iterative matrix square root normalization, as MPN in SoT.
    """
    size = covariance.shape[-1]
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    tiny = torch.finfo(covariance.dtype).tiny
    y = covariance / trace.clamp(min=tiny)
    unit = torch.eye(size, dtype=covariance.dtype, device=covariance.device)
    # The first step starts with the unit matrix as inverse root.
    z = (3 * unit - y) / 2
    y = y @ z
    for step in range(1, steps):
        correction = (3 * unit - z @ y) / 2
        y = y @ correction
        if step < steps - 1:
            z = correction @ z
    return y * trace.clamp(min=0).sqrt()


class PooledHead(NamedTuple):
    """The output of a pooling; only cross-covariances have the matrices.

    Shapes: vector [b r], covariance and normalized [b heads m n].
    """

    vector: Tensor
    covariance: Tensor | None = None
    normalized: Tensor | None = None


def cross_covariance(
    x: Tensor,
    y: Tensor,
    count: Tensor | int,
    mask: Tensor | None = None,
    mean_removal: str = "none",
) -> Tensor:
    """Return the sum over tokens of x_i y_i', divided by their count.

    `mean_removal` is subtracted from x and y before: nothing, one scalar (the mean over tokens and
    channels, the authors' choice for tokens), or the mean of each channel.
    Shapes: x [... n p], y [... n q], mask [... n 1] (1 where a token counts) -> [... p q].
    """
    if mean_removal != "none":
        x, y = (matrix - _mean(matrix, count, mask, mean_removal) for matrix in (x, y))
    if mask is not None:
        x = x * mask
    return x.mT @ y / count


def _mean(x: Tensor, count: Tensor | int, mask: Tensor | None, kind: str) -> Tensor:
    mean = (x if mask is None else x * mask).sum(-2, keepdim=True) / count
    return mean.mean(-1, keepdim=True) if kind == "scalar" else mean


def token_mask(tokens: Tensor, kept: Tensor | None) -> tuple[Tensor | None, Tensor | int]:
    """Return the weights of the tokens and the number of valid ones, at least 1.

    Shapes: tokens [b n d], kept [b n] bool -> mask [b n 1] or None, count [b 1 1] or a number.
    """
    if kept is None:
        return None, tokens.shape[1]
    mask = kept[..., None].to(tokens.dtype)
    return mask, mask.sum(1, keepdim=True).clamp(min=1)


class MultiHeadCrossCovariance(nn.Module):
    """MGCrP: a normalized cross-covariance of two projections of the tokens per head.

    Shapes: tokens [b n d], kept [b n] bool (None: all) -> vector [b (heads m n)], heads in order,
            each matrix row by row; rows belong to W.
    Source: Xie et al. 2021, eq. 2 and 3.
    """

    def __init__(self, config: SoTConfig) -> None:
        super().__init__()
        self.heads, self.m, self.n = config.pool_heads, config.m, config.n
        self.mean_removal = config.mean_removal
        rows = self.heads * (self.m + self.n)
        # W of all heads, then R of all heads.
        self.project = nn.Linear(config.width, rows, bias=config.pool_bias)
        self.norm = normalization(config)
        self.dropout = nn.Dropout(config.pool_dropout)
        self.width = self.heads * self.m * self.n

    def forward(self, tokens: Tensor, kept: Tensor | None = None) -> PooledHead:
        b, n, _ = tokens.shape
        split = [self.heads * self.m, self.heads * self.n]
        x, y = self.project(tokens).split(split, -1)
        x = x.reshape(b, n, self.heads, self.m).transpose(1, 2)
        y = y.reshape(b, n, self.heads, self.n).transpose(1, 2)
        mask, count = token_mask(tokens, kept)
        if isinstance(count, Tensor):
            mask, count = mask[:, None] if mask is not None else None, count[:, None]
        covariance = cross_covariance(x, y, count, mask, self.mean_removal)
        normalized = self.norm(covariance)
        return PooledHead(self.dropout(normalized.flatten(1)), covariance, normalized)


class Average(nn.Module):
    """GAP: the mean of the tokens.

    Shapes: tokens [b n d], kept [b n] bool (None: all) -> vector [b d].
    """

    def __init__(self, config: SoTConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.pool_dropout)
        self.width = config.width

    def forward(self, tokens: Tensor, kept: Tensor | None = None) -> PooledHead:
        mask, count = token_mask(tokens, kept)
        total = tokens.sum(1) if mask is None else (tokens * mask).sum(1)
        return PooledHead(self.dropout(total / (count if isinstance(count, int) else count[:, 0])))


class Covariance(nn.Module):
    """GCP: the upper triangle of the square root of the covariance of reduced tokens.

    Shapes: tokens [b n d], kept [b n] bool (None: all) -> vector [b r(r + 1)/2], row by row.
    Source: Xie et al. 2021, table 2 (GCP with MPN).
    """

    places: Tensor

    def __init__(self, config: SoTConfig) -> None:
        super().__init__()
        self.by_channels = config.gcp_divisor == "channels"
        self.mean_removal = config.mean_removal
        self.steps = config.mpn_steps
        self.reduce = nn.Linear(config.width, config.gcp_dim)
        self.dropout = nn.Dropout(config.pool_dropout)
        rows, columns = torch.triu_indices(config.gcp_dim, config.gcp_dim)
        self.register_buffer("places", rows * config.gcp_dim + columns, persistent=False)
        self.width = config.gcp_dim * (config.gcp_dim + 1) // 2

    def forward(self, tokens: Tensor, kept: Tensor | None = None) -> PooledHead:
        x = self.reduce(tokens)
        mask, count = token_mask(tokens, kept)
        covariance = cross_covariance(x, x, count, mask, self.mean_removal)
        if self.by_channels:
            covariance = covariance * (count / x.shape[-1])
        root = square_root(covariance, self.steps)
        return PooledHead(self.dropout(root.flatten(1).index_select(1, self.places)))


def pooling(config: SoTConfig) -> MultiHeadCrossCovariance | Average | Covariance:
    """Create the pooling that the configuration names."""
    if config.pooling == "mgcrp":
        return MultiHeadCrossCovariance(config)
    return Average(config) if config.pooling == "gap" else Covariance(config)


def unit(x: Tensor) -> Tensor:
    """Normalize each row to length 1.

    Shapes: x [b d] -> the same.
    """
    return F.normalize(x, dim=-1)


class HeadOutput(NamedTuple):
    """The output of the head.

    Shapes: logits of the class token and of the word tokens [b classes], if the fusion has them;
            state [b s] before the last linear layers; pooled as `PooledHead`.
    """

    class_logits: Tensor | None
    word_logits: Tensor | None
    state: Tensor
    pooled: PooledHead | None


class Head(nn.Module):
    """Sum, concat, aggr-all and late fusion, or only one of the two kinds of tokens.

    Two class tokens (DeiT's second is the distillation token) enter one linear layer side by side:
    the mean of two classifiers is one classifier.
    Shapes: class tokens [b k d] (None if the trunk has no such token), words [b n d], kept
            [b n] bool marks the valid words.
    Source: Xie et al. 2021, eq. 1, and table 3 for the projected class token.
    """

    def __init__(self, config: SoTConfig) -> None:
        super().__init__()
        self.config = config
        fusion, width = config.fusion, config.width * (2 if config.distillation else 1)
        self.pool = None if fusion == "class" else pooling(config)
        self.class_projection = None
        if config.class_projection:
            self.class_projection = nn.Linear(width, config.class_projection)
            width = config.class_projection
        separate = fusion in ("sum", "late", "class")
        self.class_fc = nn.Linear(width, config.classes) if separate else None
        self.word_fc = None
        if self.pool is not None:
            beside = width if fusion == "concat" else 0
            self.word_fc = nn.Linear(beside + self.pool.width, config.classes)

    def forward(
        self, class_tokens: Tensor | None, words: Tensor, kept: Tensor | None = None
    ) -> HeadOutput:
        fusion = self.config.fusion
        if fusion == "aggr-all" and class_tokens is not None:
            words = torch.cat((class_tokens, words), 1)
            if kept is not None:
                kept = torch.cat((kept.new_ones(kept.shape[0], class_tokens.shape[1]), kept), 1)
        pooled = None if self.pool is None else self.pool(words, kept)
        states = []
        if class_tokens is not None and fusion not in ("visual", "aggr-all"):
            states.append(self._class_state(class_tokens))
        if pooled is not None:
            states.append(pooled.vector)
        state = torch.cat(states, -1)
        if fusion in ("sum", "late", "class"):
            assert self.class_fc is not None
            by_words = None if pooled is None else self._words(pooled.vector)
            return HeadOutput(self.class_fc(states[0]), by_words, state, pooled)
        return HeadOutput(None, self._words(state), state, pooled)

    def _words(self, vector: Tensor) -> Tensor:
        assert self.word_fc is not None
        return self.word_fc(vector)

    def _class_state(self, class_tokens: Tensor) -> Tensor:
        state = class_tokens.flatten(1)
        if self.class_projection is not None:
            state = self.class_projection(state)
            if self.config.class_activation == "tanh":
                state = state.tanh()
        return state


def head_outputs(answer: HeadOutput, fusion: str) -> dict[str, Tensor]:
    """Return the named outputs; with late fusion, logits are the log of the probabilities.

    Shapes: -> logits, probabilities [b classes], embedding [b s] of length 1; with
            cross-covariances also covariance and pooled [b heads m n].
    """
    parts = [logits for logits in (answer.class_logits, answer.word_logits) if logits is not None]
    if fusion == "late" and len(parts) == 2:
        probabilities = (parts[0].softmax(-1) + parts[1].softmax(-1)) / 2
        halves = torch.stack([logits.log_softmax(-1) for logits in parts])
        logits = halves.logsumexp(0) - math.log(2)
    else:
        logits = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        probabilities = logits.softmax(-1)
    outputs = {
        "logits": logits,
        "probabilities": probabilities,
        "embedding": unit(answer.state),
    }
    if answer.pooled is not None and answer.pooled.covariance is not None:
        assert answer.pooled.normalized is not None
        outputs |= {"covariance": answer.pooled.covariance, "pooled": answer.pooled.normalized}
    return outputs
