# SPDX-License-Identifier: Apache-2.0
"""The read-in in the space of the tokens: no keys or values of every module and token."""

from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.nac.folded_layers import FoldedFC, FoldedFFN
from saccade.models.nac.layers import length_mask, masked_softmax
from saccade.models.nac.read_in import ReadIn, probe, values_by_head


class FoldedReadIn(nn.Module):
    """Attention with one probe a module in the space of the tokens; values projected after pooling.

    q . (W_k (m * x) + b_k) = (W_k^T q * m) . x + a constant, which the softmax over tokens drops;
    sum_j a_j (W_v (m * x_j) + b_v) = W_v (m * sum_j a_j x_j) + b_v, since the a_j sum to 1.

    Shapes: tokens [b n t], length [b], theta and code [b u ...] (conditional only) -> [b u d].
    """

    probe: Tensor

    def __init__(self, source: ReadIn, theta: Tensor | None, code: Tensor | None) -> None:
        super().__init__()
        self.heads = source.heads
        self.value = FoldedFC(source.value, code, bias=False)
        self.output = FoldedFC(source.output, code, shift=source.value.linear.bias)
        self.norm, self.ffn = source.norm, FoldedFFN(source.ffn, code)
        self.residual = source.residual
        if theta is None or code is None:
            self.value, self.output = FoldedFC(source.value, None), FoldedFC(source.output, None)
            self.source_norm, self.source_query = source.norm_query, source.query
            self.source_key = source.key
        else:
            asked = source.asked(theta, code)
            self.register_buffer("probe", probe(asked, source.key, code, self.heads))
            if self.residual:
                self.output.add_constant(theta)

    def forward(
        self,
        tokens: Tensor,
        length: Tensor | None = None,
        theta: Tensor | None = None,
        code: Tensor | None = None,
    ) -> Tensor:
        return self.read(self.weights(tokens, length, theta, code), tokens, theta, code)

    def read(
        self,
        weights: Tensor,
        tokens: Tensor,
        theta: Tensor | None = None,
        code: Tensor | None = None,
    ) -> Tensor:
        """The states of modules that attend with these weights.

        Shapes: weights [b heads u n], tokens [b n t] -> [b u d].
        """
        y = self.pooled(weights, tokens, theta, code)
        return self.ffn(y, self.norm(y), code)

    def attend(
        self,
        tokens: Tensor,
        length: Tensor | None = None,
        theta: Tensor | None = None,
        code: Tensor | None = None,
    ) -> Tensor:
        """The attention without the ModFFN that follows.

        Shapes: as forward.
        """
        return self.pooled(self.weights(tokens, length, theta, code), tokens, theta, code)

    def weights(
        self,
        tokens: Tensor,
        length: Tensor | None = None,
        theta: Tensor | None = None,
        code: Tensor | None = None,
    ) -> Tensor:
        """How much of each token each module takes.

        Shapes: as forward -> [b heads u n], the first head's rows first.
        """
        if theta is None or code is None:
            scores = F.linear(tokens, self.probe).mT
        else:
            asked = self.source_query(self.source_norm(theta), code)
            scores = probe(asked, self.source_key, code, self.heads) @ tokens.mT
        return masked_softmax(scores, length_mask(length, tokens))

    def pooled(
        self,
        weights: Tensor,
        tokens: Tensor,
        theta: Tensor | None = None,
        code: Tensor | None = None,
    ) -> Tensor:
        """What the modules take with these weights, brought to their width.

        Shapes: weights [b heads u n], tokens [b n t] -> [b u d].
        """
        value, taken = self.value, weights @ tokens
        if self.heads == 1:
            y = value(taken, code, fresh=True)
        else:
            y = values_by_head(taken, value.weight.mT, value.gain_of(code), self.heads)
            y = y if value.bias is None else y + value.bias
        y = self.output(y, code, fresh=True)
        return theta + y if self.residual and theta is not None else y
