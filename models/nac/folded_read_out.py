# SPDX-License-Identifier: Apache-2.0
"""The read-out with constant queries, and its last layer."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.nac.folded_layers import FoldedFC, FoldedFFN
from saccade.models.nac.read_in import values_by_head
from saccade.models.nac.read_out import ModulatedHead, ReadOut


class FoldedReadOut(nn.Module):
    """A read-out whose queries are constant: probes again, and values projected after pooling.

    Shapes: theta [b u d], bias [r u] or [b r u], code [b u c] (conditional only) -> [b d].
    """

    float32_products = True  # in a model of half precision
    probe: Tensor

    def __init__(
        self, source: ReadOut, initial: Tensor, read_out_code: Tensor, code: Tensor | None
    ) -> None:
        super().__init__()
        self.key = FoldedFC(source.key, code, bias=False)
        self.value = FoldedFC(source.value, code, bias=False)
        shift = source.value.linear.bias
        self.output = FoldedFC(source.output, read_out_code, shift=shift)
        self.norm_states, self.norm = source.norm_states, source.norm
        self.ffn, self.pool = FoldedFFN(source.ffn, read_out_code), source.pool
        self.heads = source.heads
        if source.residual:
            self.output.add_constant(initial)
        q = source.asked(initial, read_out_code).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        rows = q @ source.key.linear.weight.unflatten(0, (self.heads, -1)) / math.sqrt(q.shape[-1])
        self.register_buffer("probe", rows.flatten(0, 1))  # the first head's rows first

    def forward(self, theta: Tensor, bias: Tensor | None, code: Tensor | None = None) -> Tensor:
        x = self.norm_states(theta)
        scores = F.linear(self.key.scaled(x, code), self.probe).mT
        if bias is not None:
            scores = scores + (bias if self.heads == 1 else bias.repeat(*self.repeats(bias)))
        pooled = scores.softmax(-1) @ self.value.scaled(x, code)
        if self.heads == 1:
            y = self.output(pooled @ self.value.weight)
        else:
            y = self.output(values_by_head(pooled, self.value.weight.mT, None, self.heads))
        return self.pool(self.ffn(y, self.norm(y)))

    def repeats(self, bias: Tensor) -> tuple[int, ...]:
        """How often a bias is laid below itself: once for each head."""
        return (*(1 for _ in bias.shape[:-2]), self.heads, 1)


def folded_head(head: nn.Module, code: Tensor) -> nn.Linear:
    """A last layer whose input the code of the first read-out module scales, as a plain one.

    Shapes: code [r c].
    """
    if not isinstance(head, ModulatedHead):
        assert isinstance(head, nn.Linear)
        return head
    plain = torch.nn.utils.skip_init(nn.Linear, *head.linear.weight.shape[::-1])
    plain = plain.to(head.linear.weight)
    plain.weight.copy_(head.linear.weight * head.gain(code[0]))
    plain.bias.copy_(head.linear.bias)
    return plain
