# SPDX-License-Identifier: Apache-2.0
"""The kernel of a NAC's links, and the attention that it modulates (SKMDPA)."""

import math
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.nac.config import NACConfig

_Function = TypeVar("_Function", bound=Callable[..., Any])
CUT = -87.0  # e^-87 vanishes next to 1 in every type, and float16 can represent -87


def in_float32(function: _Function) -> _Function:
    """Wrap the function to run without autocast, with half-precision arguments widened to float32.

    It is for values that bfloat16's eight bits cannot represent: 1 - cosine of two close
    signatures, a softmax, a loss. On a CPU, autocast leaves softmax and losses in bfloat16. Outside
    of autocast the function is called directly, so that traced models do not change.
    """

    @wraps(function)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        values = (*arguments, *keywords.values())
        kind = next(
            (argument.device.type for argument in values if isinstance(argument, Tensor)), "cpu"
        )
        # A device such as meta, where parameters are only counted, does not support autocast.
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return function(*arguments, **keywords)
        with torch.autocast(kind, enabled=False):
            return function(*map(_wide, arguments), **{k: _wide(v) for k, v in keywords.items()})

    return wrapped  # type: ignore[return-value]


def _wide(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


@in_float32
def signature_distance(queries: Tensor, keys: Tensor) -> Tensor:
    """Return 1 - cosine similarity of every pair of signatures.

    Shapes: queries [... i s], keys [... j s] -> [... i j], from 0 (same direction) to 2.
    Source: section 2, below eq. 3.
    """
    return 1 - F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).mT


def evaluation_bias(distance: Tensor, epsilon: float | Tensor, truncate: float = 0.0) -> Tensor:
    """Return log K-hat for K = P, up to a term that is constant along j and cancels in the softmax.

    With `truncate` above 0, links of a larger distance are cut: `CUT` is added to the value; the
    gradient is that of the distance. The authors use -inf, which gives NaN for a receiver without
    any link; here such a receiver attends to all.

    Shapes: distance [... i j], epsilon a number or [... 1 1] -> same.
    Source: eq. 2 (its exponential) and 3; the denominator delta + sum_j K_ij does not depend on j.
            The cut is from the authors' code.
    """
    log_p = -distance / epsilon
    return log_p + CUT * (distance > truncate).to(log_p.dtype) if truncate else log_p


def sampled_bias(
    log_p: Tensor,
    *,
    tau: float,
    p_min: float,
    p_max: float,
    clamp_sample: bool = False,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """log K of a binary Concrete sample K ~ Concrete(P, tau), drawn from torch's global generator.

    `clamp_sample` bounds the uniform draw like P, and K by the smallest normal number and p_max.

    Shapes: log_p [i j] or [b i j] -> `shape`, by default the same; log_p broadcasts to it.
    Source: eq. 2; Maddison et al. 2016. In logarithms, so that K near 0 keeps its gradient.
    """
    log_p = log_p.clamp(math.log(p_min), math.log(p_max))
    logit = log_p - torch.log(-torch.expm1(log_p))
    shape = shape or tuple(log_p.shape)
    uniform = torch.rand(shape, dtype=log_p.dtype, device=log_p.device)
    tiny = torch.finfo(log_p.dtype).tiny
    uniform = uniform.clamp(p_min, p_max) if clamp_sample else uniform.clamp_min(tiny)
    noise = torch.log(uniform) - torch.log1p(-uniform)
    log_k = F.logsigmoid((logit + noise) / tau)
    return log_k.clamp(math.log(tiny), math.log(p_max)) if clamp_sample else log_k


def skmdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, heads: int = 1) -> Tensor:
    """Return softmax_j(q_i . k_j / sqrt(d) + bias_ij) v_j, in `heads` slices of the channels.

    Shapes: q [b i d], k and v [b j d], bias [i j] or [b i j] (None: dense attention) -> [b i d].
    Source: eq. 3.
    """
    b, i, d = q.shape
    q, k, v = (x.unflatten(-1, (heads, d // heads)).transpose(1, 2) for x in (q, k, v))
    scores = (q / math.sqrt(d // heads)) @ k.mT
    if bias is not None:
        scores = scores + (bias if bias.dim() == 2 else bias.unsqueeze(1))
    return (in_float32(torch.softmax)(scores, -1) @ v).transpose(1, 2).reshape(b, i, d)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, heads: int) -> Tensor:
    """Return softmax(q k^T + bias) v per slice of the channels; q is already scaled.

    Shapes: q [b u d], k, v [b j d], bias [u j] or [b u j] -> [b u d].
    """
    b, u, d = q.shape
    q, k, v = (x.view(b, -1, heads, d // heads) for x in (q, k, v))
    if bias is not None and bias.dim() == 3:
        bias = bias.unsqueeze(1)
    q, v = q.transpose(1, 2), v.transpose(1, 2)
    if torch.compiler.is_exporting():
        # The exporter would write the fused operator as about twenty nodes of shape arithmetic.
        scores = q @ k.permute(0, 2, 3, 1)
        scores = scores if bias is None else scores + bias
        heard = scores.softmax(-1) @ v
    else:
        # With a mask of 2 or 4 axes this is the tiled kernel, which never stores the scores.
        k = k.transpose(1, 2)
        heard = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
    return heard.transpose(1, 2).reshape(b, u, d)


LEAST = 0.01  # smallest effective value of a learned bandwidth: the kernel is undefined at 0


class Kernel(nn.Module):
    """log K per layer from distances of signatures; its parameters are learned bandwidths.

    Source: eq. 2 and 3.
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.config = config
        self.learned = config.epsilon_learned and config.connectivity != "dense"
        if self.learned:
            layers = config.propagator_layers + 1
            self.bandwidth = nn.Parameter(torch.full((layers,), config.epsilon))

    def epsilons(self) -> list[float | Tensor]:
        """Return the propagators' distinct bandwidths; the read-out's if there is no propagator."""
        if not self.learned:
            return [self.config.epsilon]
        return [self._epsilon(layer) for layer in range(len(self.bandwidth) - 1)] or [
            self._epsilon(-1)
        ]

    def layers(self, distance: Tensor | None, batch: int) -> Iterator[Tensor | None]:
        """Yield the bias of each propagator; in training each has a separate draw.

        Shapes: distance [i j] or [b i j] -> same, or [b i j] for a draw per sample.
        """
        fixed = None if self.training else self.constant(distance)
        for layer in range(self.config.propagator_layers):
            if fixed is None and distance is not None:
                yield self._drawn(distance, self._epsilon(layer), batch, self.config.truncate)
            else:
                yield self.of_layer(fixed, layer)

    def read_out(self, distance: Tensor | None, batch: int) -> Tensor | None:
        """Return the bias of the read-out.

        Shapes: as `layers`.
        """
        if distance is None:
            return None
        config = self.config
        truncate = config.truncate if config.truncate_read_out else 0.0
        if self.training:
            return self._drawn(distance, self._epsilon(-1), batch, truncate)
        return evaluation_bias(distance, self._epsilon(-1), truncate)

    def constant(self, distance: Tensor | None) -> Tensor | None:
        """Return the biases of all propagators in evaluation, for `of_layer`.

        Shapes: distance [... i j] -> same, or [... l i j] if epsilon is learned.
        """
        if distance is None:
            return None
        if not self.learned:
            return evaluation_bias(distance, self.config.epsilon, self.config.truncate)
        epsilon = torch.stack([torch.as_tensor(epsilon) for epsilon in self.epsilons()])
        epsilon = epsilon.reshape(-1, 1, 1)
        return evaluation_bias(distance.unsqueeze(-3), epsilon, self.config.truncate)

    def of_layer(self, biases: Tensor | None, layer: int) -> Tensor | None:
        """Return one propagator's bias from the result of `constant`."""
        return biases.select(-3, layer) if self.learned and biases is not None else biases

    def links(self, biases: Tensor) -> Tensor:
        """Return the link probabilities, averaged over the propagators.

        Shapes: the result of `constant` -> [... i j].
        """
        return biases.exp().mean(-3) if self.learned else biases.exp()

    def _epsilon(self, layer: int) -> float | Tensor:
        return self.bandwidth[layer].clamp_min(LEAST) if self.learned else self.config.epsilon

    def _drawn(
        self, distance: Tensor, epsilon: float | Tensor, batch: int, truncate: float
    ) -> Tensor:
        config = self.config
        log_p = evaluation_bias(distance, epsilon, truncate)
        if config.kernel_draw == "none":
            return log_p
        shape = tuple(distance.shape)
        if config.kernel_draw == "sample" and distance.dim() == 2:
            shape = (batch, *shape)
        p_min, p_max, clamped = config.p_min, config.p_max, config.kernel_clamp == "dtype"
        if clamped:
            p_min = torch.finfo(distance.dtype).eps
            p_max = 1 - p_min
        limits = {"tau": config.tau, "p_min": p_min, "p_max": p_max}
        return sampled_bias(log_p, shape=shape, clamp_sample=clamped, **limits)
