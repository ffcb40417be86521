# SPDX-License-Identifier: Apache-2.0
"""The executor's layers with the codes' part computed beforehand, and fewer products."""

import math
from copy import deepcopy

import torch
from saccade.models.modulation import ModFC, ModFFN, activate
from saccade.models.nac_layers import Propagator, ReadIn, ReadOut, length_mask, masked_softmax
from saccade.models.tokenizers import PatchTokenizer, check_image, patches
from torch import Tensor, nn
from torch.nn import functional as F


class FoldedFC(nn.Module):
    """A ModFC whose gain is a constant a module, or one computed from the code where that varies.

    Shapes: x [... u inputs], code [b u c] (conditional only) -> [... u outputs].
    """

    gain: Tensor

    def __init__(self, source: ModFC, code: Tensor | None) -> None:
        super().__init__()
        self.linear = source.linear
        self.modulation = source.modulation
        if code is None:
            self.source = source
        elif source.modulation:
            self.register_buffer("gain", source.gain(code).contiguous())

    def scaled(self, x: Tensor, code: Tensor | None = None) -> Tensor:
        """x * gain.

        Shapes: x [... u inputs] -> same.
        """
        if not self.modulation:
            return x
        return x * (self.gain if code is None else self.source.gain(code))

    def forward(self, x: Tensor, code: Tensor | None = None) -> Tensor:
        return self.linear(self.scaled(x, code))


class FoldedFFN(nn.Module):
    """A ModFFN of two folded layers.

    Shapes: x [... u d] -> same.
    """

    def __init__(self, source: ModFFN, code: Tensor | None) -> None:
        super().__init__()
        self.activation = source.activation
        self.widen, self.narrow = FoldedFC(source.widen, code), FoldedFC(source.narrow, code)

    def forward(self, x: Tensor, code: Tensor | None = None) -> Tensor:
        return self.narrow(activate(self.widen(x, code), self.activation), code)


class FoldedReadIn(nn.Module):
    """Attention with one probe a module in the space of the tokens; values projected after pooling.

    q . (W_k (m * x) + b_k) = (W_k^T q * m) . x + a constant, which the softmax over tokens drops;
    sum_j a_j (W_v (m * x_j) + b_v) = W_v (m * sum_j a_j x_j) + b_v, since the a_j sum to 1.

    Shapes: tokens [b n d], length [b], theta and code [b u ...] (conditional only) -> [b u d].
    """

    probe: Tensor

    def __init__(self, source: ReadIn, theta: Tensor | None, code: Tensor | None) -> None:
        super().__init__()
        self.value, self.output = FoldedFC(source.value, code), FoldedFC(source.output, code)
        self.norm, self.ffn = source.norm, FoldedFFN(source.ffn, code)
        if theta is None or code is None:
            self.source_query, self.source_key = source.query, source.key
        else:
            self.register_buffer("probe", probe(source.query, source.key, theta, code))

    def forward(
        self,
        tokens: Tensor,
        length: Tensor | None = None,
        theta: Tensor | None = None,
        code: Tensor | None = None,
    ) -> Tensor:
        y = self.attend(tokens, length, theta, code)
        return y + self.ffn(self.norm(y), code)

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
        if theta is None or code is None:
            queries = self.probe
        else:
            queries = probe(self.source_query, self.source_key, theta, code)
        weights = masked_softmax(queries @ tokens.mT, length_mask(length, tokens))
        return self.output(self.value(weights @ tokens, code), code)


def probe(query: ModFC, key: ModFC, theta: Tensor, code: Tensor) -> Tensor:
    """What the scores of all tokens are the products with: W_k^T q * gain / sqrt(d).

    Shapes: theta [... u d], code [... u c] -> [... u d].
    """
    q = query(theta, code)
    return (q @ key.linear.weight) * key.gain(code) / math.sqrt(q.shape[-1])


class FoldedPropagator(nn.Module):
    """A propagator with constant gains and fused attention.

    Shapes: theta [b u d], bias [u u] or [b u u], code [b u c] (conditional only) -> [b u d].
    """

    def __init__(self, source: Propagator, code: Tensor | None) -> None:
        super().__init__()
        self.heads = source.heads
        self.norm_attention, self.norm_ffn = source.norm_attention, source.norm_ffn
        scale = math.sqrt(source.heads / source.query.linear.out_features)
        self.query = FoldedFC(scaled_fc(source.query, scale), code)
        self.key = FoldedFC(source.key, code)
        self.value, self.output = FoldedFC(source.value, code), FoldedFC(source.output, code)
        self.ffn = FoldedFFN(source.ffn, code)

    def forward(self, theta: Tensor, bias: Tensor | None, code: Tensor | None = None) -> Tensor:
        x = self.norm_attention(theta)
        heard = fused_attention(
            self.query(x, code), self.key(x, code), self.value(x, code), bias, heads=self.heads
        )
        theta = theta + self.output(heard, code)
        return theta + self.ffn(self.norm_ffn(theta), code)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, heads: int) -> Tensor:
    """softmax(q k^T + bias) v in slices of the channels; q carries the scale already.

    Shapes: q, k, v [b u d], bias [u u] or [b u u] -> [b u d].
    """
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
    if bias is not None and bias.dim() == 3:
        bias = bias.unsqueeze(1)
    q, v = q.transpose(1, 2), v.transpose(1, 2)
    if torch.compiler.is_exporting():
        # The exporter writes the fused operator as some twenty nodes of shape arithmetic.
        scores = q @ k.permute(0, 2, 3, 1)
        scores = scores if bias is None else scores + bias
        heard = scores.softmax(-1) @ v
    else:
        k = k.transpose(1, 2)
        heard = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
    return heard.transpose(1, 2).flatten(2)


def scaled_fc(source: ModFC, scale: float) -> ModFC:
    """The same layer with its output multiplied by `scale`."""
    layer = deepcopy(source)
    layer.linear.weight.mul_(scale)
    layer.linear.bias.mul_(scale)
    return layer


class FoldedReadOut(nn.Module):
    """A read-out whose queries are constant: probes again, and values projected after pooling.

    Shapes: theta [b u d], bias [r u] or [b r u], code [b u c] (conditional only) -> [b d].
    """

    probe: Tensor

    def __init__(
        self, source: ReadOut, initial: Tensor, read_out_code: Tensor, code: Tensor | None
    ) -> None:
        super().__init__()
        self.key, self.value = FoldedFC(source.key, code), FoldedFC(source.value, code)
        self.output, self.ffn = (
            FoldedFC(source.output, read_out_code),
            FoldedFFN(source.ffn, read_out_code),
        )
        self.norm_states, self.norm = source.norm_states, source.norm
        self.pool = source.pool
        q = source.query(initial, read_out_code)
        self.register_buffer("probe", q @ source.key.linear.weight / math.sqrt(q.shape[-1]))

    def forward(self, theta: Tensor, bias: Tensor | None, code: Tensor | None = None) -> Tensor:
        x = self.norm_states(theta)
        scores = self.probe @ self.key.scaled(x, code).mT
        if bias is not None:
            scores = scores + bias
        pooled = scores.softmax(-1) @ self.value.scaled(x, code)
        y = self.output(self.value.linear(pooled))
        return self.pool(y + self.ffn(self.norm(y)))


class FoldedPatches(nn.Module):
    """A patch tokenizer with the pixel scale in its weights and all biases in the position.

    Shapes: image [b h w c] -> [b n d].
    """

    weight: Tensor
    position: Tensor

    def __init__(self, source: PatchTokenizer) -> None:
        super().__init__()
        self.patch_px, self.norm, self.size = source.config.patch_px, source.norm, source.scale.size
        repeat = source.config.patch_px**2
        std, mean = source.scale.std.repeat(repeat), source.scale.mean.repeat(repeat)
        weight = source.project.weight / std
        self.register_buffer("weight", weight / 255)
        self.register_buffer("position", source.position + source.project.bias - weight @ mean)

    def forward(self, image: Tensor) -> Tensor:
        check_image(image, self.size)
        pixels = patches(image.to(self.weight.dtype), self.patch_px)
        return self.norm(F.linear(pixels, self.weight) + self.position)


def fold_tokenizer(source: nn.Module) -> nn.Module:
    """The tokenizer with its pixel scale folded where that is exact.

    A convolution pads with zeros after scaling, so its scale stays.
    """
    return FoldedPatches(source) if isinstance(source, PatchTokenizer) else source
