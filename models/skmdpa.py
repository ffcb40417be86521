# SPDX-License-Identifier: Apache-2.0
"""Stochastic kernel modulated dot-product attention: who may listen to whom, and the attention."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.models.autocast import in_float32


@in_float32
def signature_distance(queries: Tensor, keys: Tensor) -> Tensor:
    """1 - cosine similarity of every pair of signatures.

    Shapes: queries [... i s], keys [... j s] -> [... i j], from 0 (same direction) to 2.
    Source: section 2, below eq. 3.
    """
    return 1 - F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).mT


def link_probability(distance: Tensor, epsilon: float) -> Tensor:
    """P = exp(-d / epsilon).

    Shapes: distance [... i j] -> same.
    Source: eq. 2.
    """
    return torch.exp(-distance / epsilon)


def evaluation_bias(distance: Tensor, epsilon: float) -> Tensor:
    """log K-hat for K = P, up to a term that is constant along j and cancels in the softmax.

    Shapes: distance [... i j] -> same.
    Source: eq. 3; the denominator delta + sum_j K_ij does not depend on j.
    """
    return -distance / epsilon


def sampled_bias(
    distance: Tensor,
    epsilon: float,
    *,
    tau: float,
    p_min: float,
    p_max: float,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """log K of a binary Concrete sample K ~ Concrete(P, tau), drawn from torch's global generator.

    Shapes: distance [... i j] -> `shape`, by default the same; distance broadcasts to it.
    Source: eq. 2; Maddison et al. 2016. Stays in logarithms, so that K near 0 keeps its gradient.
    """
    log_p = (-distance / epsilon).clamp(math.log(p_min), math.log(p_max))
    logit = log_p - torch.log(-torch.expm1(log_p))
    uniform = torch.rand(shape or distance.shape, dtype=distance.dtype, device=distance.device)
    tiny = torch.finfo(distance.dtype).tiny
    noise = torch.log(uniform.clamp_min(tiny)) - torch.log1p(-uniform)
    return F.logsigmoid((logit + noise) / tau)


def skmdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, heads: int = 1) -> Tensor:
    """softmax_j(q_i . k_j / sqrt(d) + bias_ij) v_j, in `heads` slices of the channels.

    Shapes: q [b i d], k and v [b j d], bias [i j] or [b i j] (None: dense attention) -> [b i d].
    Source: eq. 3.
    """
    b, i, d = q.shape
    q, k, v = (x.unflatten(-1, (heads, d // heads)).transpose(1, 2) for x in (q, k, v))
    scores = (q / math.sqrt(d // heads)) @ k.mT
    if bias is not None:
        scores = scores + (bias if bias.dim() == 2 else bias.unsqueeze(1))
    return (in_float32(torch.softmax)(scores, -1) @ v).transpose(1, 2).reshape(b, i, d)
