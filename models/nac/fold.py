# SPDX-License-Identifier: Apache-2.0
"""A NAC in evaluation with folded constants: the same function, far fewer products.

A tensor is only overwritten if it was created in the same function. In-place operations matter:
passes over memory cost as much as the products between them.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.layers.pixels import check_image
from saccade.models.layers.trunk import fold_trunks
from saccade.models.nac.components import NACFunction
from saccade.models.nac.generator import (
    Circuit,
    CircuitInputs,
    check_condition,
    generate,
    link_distances,
)
from saccade.models.nac.kernel import fused_attention
from saccade.models.nac.layers import (
    ModulatedHead,
    Propagator,
    ReadIn,
    ReadOut,
    length_mask,
    masked_softmax,
    mean_of_heads,
    probe,
    values_by_head,
)
from saccade.models.nac.links import attention_over_links
from saccade.models.nac.model import NAC, heard_codes, reading_codes
from saccade.models.nac.modulation import ModFC, ModFFN, activate
from saccade.models.nac.tokenizers import (
    PairTokenizer,
    PatchTokenizer,
    SymbolTokenizer,
    TokenProjection,
    patches,
    sinusoids,
)


class FoldedFC(nn.Module):
    """A ModFC whose gain is one constant per module, or is computed from the code passed in.

    `shift` is a constant before the gain: W ((x + shift) * gain) + b. If `bias` is false, b is
    left out, because it cancels.

    Shapes: x [b u inputs], code [b u c] (conditional only) -> [b u outputs].
    """

    gain: Tensor | None
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        source: ModFC,
        code: Tensor | None,
        *,
        shift: Tensor | None = None,
        bias: bool = True,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        modulated = source.modulation
        self.source = source if modulated and code is None else None
        gain = source.gain(code) if modulated and code is not None else None
        self.register_buffer("gain", gain)
        self.register_buffer("weight", (scale * source.linear.weight.mT).contiguous())
        constant = scale * source.linear.bias if bias else None
        if shift is not None and constant is not None:
            constant = constant + (shift if gain is None else shift * gain) @ self.weight
        self.register_buffer("bias", constant)

    def scaled(self, x: Tensor, code: Tensor | None = None, *, fresh: bool = False) -> Tensor:
        """Return x * gain, computed in place if x is fresh.

        Shapes: x [b u inputs] -> same.
        """
        gain = self.gain_of(code)
        if gain is None:
            return x
        return x.mul_(gain) if fresh else x * gain

    def gain_of(self, code: Tensor | None = None) -> Tensor | None:
        """Return the factor of a module's input; None without modulation.

        Shapes: code [b u c] (conditional only) -> [u inputs] or [b u inputs].
        """
        return self.gain if self.source is None or code is None else self.source.gain(code)

    def add_constant(self, value: Tensor) -> None:
        """Add a constant per module to the output.

        Shapes: value [u outputs].
        """
        self.bias = value if self.bias is None else value + self.bias

    def forward(self, x: Tensor, code: Tensor | None = None, *, fresh: bool = False) -> Tensor:
        bias, weight = self.bias, self.weight  # each attribute of a module costs a microsecond
        rows = self.scaled(x, code, fresh=fresh).flatten(0, 1)
        if bias is not None and bias.dim() == 1:
            return torch.addmm(bias, rows, weight).view(*x.shape[:2], -1)
        y = (rows @ weight).view(*x.shape[:2], -1)
        return y if bias is None else y.add_(bias)

    def add_to(self, residual: Tensor, x: Tensor, code: Tensor | None = None) -> Tensor:
        """Return residual + forward(x), computed in residual; x is overwritten too.

        Shapes: residual [b u outputs], x [b u inputs] -> [b u outputs].
        """
        bias = self.bias
        rows = self.scaled(x, code, fresh=True).flatten(0, 1)
        if bias is not None:
            residual.add_(bias)
        residual.view(-1, residual.shape[-1]).addmm_(rows, self.weight)
        return residual


class FoldedFFN(nn.Module):
    """A ModFFN of two folded layers, added to its residual; overwrites the residual and x.

    Shapes: residual and x [b u d] -> same.
    """

    def __init__(self, source: ModFFN, code: Tensor | None) -> None:
        super().__init__()
        self.activation = source.activation
        self.widen, self.narrow = FoldedFC(source.widen, code), FoldedFC(source.narrow, code)

    def forward(self, residual: Tensor, x: Tensor, code: Tensor | None = None) -> Tensor:
        hidden = activate(self.widen(x, code, fresh=x is not residual), self.activation)
        return self.narrow.add_to(residual, hidden, code)


class FoldedPropagator(nn.Module):
    """A propagator with constant gains, fused attention and the biases that do not cancel.

    A key's bias adds the same to all scores of a query; a value's bias is added to the result.

    Shapes: theta [b u d], overwritten, bias [u j] or [b u j], code [b u c] (conditional only),
            senders [b j d] if modules attend to others besides each other, neighbors int64
            [u links] of a sparse circuit, whose bias is [u links] -> [b u d].
    """

    joint_gain: Tensor | None
    joint_weight: Tensor

    def __init__(
        self, source: nn.Module, code: Tensor | None, sender_code: Tensor | None = None
    ) -> None:
        super().__init__()
        assert isinstance(source, Propagator)
        sender_code = code if sender_code is None else sender_code
        self.heads = source.heads
        scale = math.sqrt(source.heads / source.query.linear.out_features)
        self.norm_attention, self.norm_ffn = source.norm_attention, source.norm_ffn
        self.norm_senders = source.norm_senders
        self.query = FoldedFC(source.query, code, scale=scale)
        self.key = FoldedFC(source.key, sender_code, bias=False)
        constant = code is not None
        self.value = FoldedFC(source.value, sender_code, bias=not constant)
        shift = source.value.linear.bias if constant else None
        self.output = FoldedFC(source.output, code, shift=shift)
        self.ffn = FoldedFFN(source.ffn, code)
        layers = (self.query, self.key, self.value)
        alone = sender_code is code and source.norm_senders is None
        joint = alone and constant and source.query.modulation
        layer_gains = [layer.gain for layer in layers if layer.gain is not None]
        gains = torch.stack(layer_gains)[:, None] if joint else None
        weights = torch.stack([layer.weight for layer in layers]) if joint else None
        self.register_buffer("joint_gain", gains, persistent=False)
        self.register_buffer("joint_weight", weights, persistent=False)

    def forward(
        self,
        theta: Tensor,
        bias: Tensor | None,
        code: Tensor | None = None,
        senders: Tensor | None = None,
        neighbors: Tensor | None = None,
    ) -> Tensor:
        x = self.norm_attention(theta)
        if senders is None and self.norm_senders is None:
            q, k, v = self._project(x, code)
        else:
            norm = self.norm_senders or self.norm_attention
            heard = norm(theta if senders is None else senders)
            q, k, v = self.query(x, code), self.key(heard, code), self.value(heard, code)
        if neighbors is None or bias is None:
            heard = fused_attention(q, k, v, bias, heads=self.heads)
        else:
            heard = attention_over_links(q, k, v, bias, neighbors, heads=self.heads)
        theta = self.output.add_to(theta, heard, code)
        return self.ffn(theta, self.norm_ffn(theta), code)

    def _project(self, x: Tensor, code: Tensor | None) -> tuple[Tensor, ...]:
        # One product of three is 1/8 faster in torch at 32 modules. ONNX Runtime takes twice as
        # long for it, because it packs constant matrices in advance, but not batches of them.
        gain, query_bias = self.joint_gain, self.query.bias
        if gain is None or query_bias is None or torch.compiler.is_exporting():
            return tuple(layer(x, code) for layer in (self.query, self.key, self.value))
        b, u, d = x.shape
        y = torch.bmm((x * gain).view(3, b * u, d), self.joint_weight)
        y[0].add_(query_bias)
        return y.view(3, b, u, -1).unbind(0)


class FoldedReadIn(nn.Module):
    """Attention with one probe per module in token space; values are projected after pooling.

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
            query = source.asked(theta, code)
            self.register_buffer("probe", probe(query, source.key, code, self.heads))
            if self.residual:
                self.output.add_constant(theta)

    def weights(
        self,
        tokens: Tensor,
        length: Tensor | None = None,
        theta: Tensor | None = None,
        code: Tensor | None = None,
    ) -> Tensor:
        """Return the weight of each token for each module.

        Shapes: as forward -> [b heads u n], the first head's rows first.
        """
        if theta is None or code is None:
            scores = F.linear(tokens, self.probe).mT
        else:
            query = self.source_query(self.source_norm(theta), code)
            scores = probe(query, self.source_key, code, self.heads) @ tokens.mT
        return masked_softmax(scores, length_mask(length, tokens))

    def read(
        self,
        weights: Tensor,
        tokens: Tensor,
        theta: Tensor | None = None,
        code: Tensor | None = None,
    ) -> Tensor:
        """Return the states of modules that attend with these weights.

        Shapes: weights [b heads u n], tokens [b n t] -> [b u d].
        """
        value, attended = self.value, weights @ tokens
        if self.heads == 1:
            y = value(attended, code, fresh=True)
        else:
            y = values_by_head(attended, value.weight.mT, value.gain_of(code), self.heads)
            y = y if value.bias is None else y + value.bias
        y = self.output(y, code, fresh=True)
        y = theta + y if self.residual and theta is not None else y
        return self.ffn(y, self.norm(y), code)


class FoldedReadOut(nn.Module):
    """A read-out with constant queries: also probes, and values projected after pooling.

    Shapes: theta [b u d], bias [r u] or [b r u], code [b u c] (conditional only) -> [b d].
    """

    float32_products = True  # even in a half-precision model
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
        """Return the repeats of a bias per axis: one copy per head."""
        return (*(1 for _ in bias.shape[:-2]), self.heads, 1)


def folded_head(head: nn.Module, code: Tensor) -> nn.Linear:
    """Turn a last layer modulated by the first read-out module's code into a plain one.

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


class FoldedPatches(nn.Module):
    """A patch tokenizer with the pixel scale in its weights and all biases in the positions.

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
        self.register_buffer("weight", (weight / 255).mT.contiguous())
        self.register_buffer("position", source.position + source.project.bias - weight @ mean)

    def forward(self, image: Tensor, length: Tensor | None = None) -> Tensor:
        check_image(image, self.size)
        pixels = patches(image.to(self.weight.dtype), self.patch_px)
        return self.norm((pixels @ self.weight).add_(self.position))


def fold_tokenizer(source: nn.Module) -> nn.Module:
    """Fold the tokenizer's pixel scale if that is exact, its trunk, and its fixed positions.

    A convolution pads with zeros after scaling, so its scale stays.
    """
    if isinstance(source, PairTokenizer):
        source.each = fold_tokenizer(source.each)
        return source
    if isinstance(source, TokenProjection | SymbolTokenizer):
        config = source.config
        if source.position is None and config.positions == "sinusoidal" and config.max_tokens:
            fixed = sinusoids(config.max_tokens, config.tokens_width).to(source.norm.weight)
            source.position = nn.Parameter(fixed)
    fold_trunks(source)
    return FoldedPatches(source) if isinstance(source, PatchTokenizer) else source


class FoldedNAC(NACFunction):
    """The result of `NAC.fold`: `forward` and `details` of a NAC, for evaluation only.

    Codes, signatures and initial states are constants. So every modulation is one vector per
    module, the attention bias is one matrix, and the read-in's query becomes a probe in the space
    of the tokens. In a conditional NAC they depend on the sample and are computed from its
    circuit; the order of multiplications is the same.

    Source: equal to the unfolded model up to rounding; Weiss et al. 2022, eq. 1 to 5.
    """

    link_bias: Tensor | None
    links: Tensor | None
    neighbors: Tensor | None
    read_out_bias: Tensor | None
    read_out_signatures: Tensor | None
    start: Tensor | None

    def __init__(self, source: NAC) -> None:
        super().__init__()
        self.config = source.config
        self.kernel = source.kernel
        self.register_buffer("neighbors", source.neighbors)
        circuit: Circuit | None = None
        if self.config.conditional:
            self.generator, self.initial_state = source.generator, source.initial_state
            self.register_buffer("read_out_signatures", source.read_out_signatures)
            self.register_buffer("links", None)
        else:
            circuit = source.generator()
            between, to_read_out = link_distances(
                circuit, source.read_out_signatures, source.neighbors
            )
            link_bias = self.kernel.constant(between)
            links = None if link_bias is None else self.kernel.links(link_bias)
            self.register_buffer("links", links)
            if link_bias is not None and source.neighbors is not None:
                kept = source.neighbors.expand(*link_bias.shape[:-1], -1)
                link_bias = link_bias.gather(-1, kept)
            self.register_buffer("link_bias", link_bias)
            self.register_buffer("read_out_bias", self.kernel.read_out(to_read_out, 1))
        self.tokenizer = fold_tokenizer(source.tokenizer)
        self._fold_layers(source, circuit)
        self.head_norm = source.head_norm
        self.head = folded_head(source.head, source.read_out_codes)

    def _fold_layers(self, source: NAC, circuit: Circuit | None) -> None:
        reading = code = heard = theta = start = None
        self.beside = source.config.read_in_modules > 0
        if circuit is not None:
            code, reading = circuit.codes, reading_codes(circuit)
            theta, heard = source.initial_state(reading), heard_codes(circuit, self.beside)
            start = source.initial_state(code) if self.beside else None
        self.register_buffer("start", start)
        self.read_in = FoldedReadIn(source.read_in, theta, reading)
        self.propagators = nn.ModuleList(
            FoldedPropagator(propagator, code, heard if self.beside else None)
            for propagator in source.propagators
        )
        initial = source.initial_state(source.read_out_codes)
        self.read_out = FoldedReadOut(source.read_out, initial, source.read_out_codes, heard)

    def forward(
        self,
        x: Tensor,
        length: Tensor | None = None,
        condition: Tensor | None = None,
        condition_length: Tensor | None = None,
    ) -> Tensor:
        """Return the logits.

        Shapes: -> [b classes].
        """
        return self.logits(self.run(self.inputs(x, length, condition, condition_length))[0])

    def links_of(self, biases: Tensor) -> Tensor:
        """Return the link probabilities: a constant, unless the circuit depends on the sample."""
        return super().links_of(biases) if self.links is None else self.links

    def run(self, inputs: CircuitInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the state before the head, the read-in's weights, the logarithms of the links."""
        tokens, length, condition, _ = inputs
        theta: Tensor | None = None
        code: Tensor | None = None
        if self.config.conditional:
            circuit = generate(self.generator, self.config, inputs)
            between, to_read_out = link_distances(circuit, self.read_out_signatures)
            link_bias = self.kernel.constant(between)
            read_out_bias = self.kernel.read_out(to_read_out, tokens.shape[0])
            theta, code = self.initial_state(circuit.codes), circuit.codes
        else:
            check_condition(self.config, condition)
            link_bias, read_out_bias = self.link_bias, self.read_out_bias
        weights = self.read_in.weights(tokens, length, theta, code)
        read = state = self.read_in.read(weights, tokens, theta, code)
        if self.start is not None:
            state = self.start.expand(tokens.shape[0], -1, -1).clone()
        for layer, propagator in enumerate(self.propagators):
            bias = self.kernel.of_layer(link_bias, layer)
            senders = torch.cat((state, read), 1) if self.beside else None
            state = propagator(state, bias, code, senders, self.neighbors)
        state = torch.cat((state, read), 1) if self.beside else state
        attention = mean_of_heads(weights, self.config.read_heads)
        return self.read_out(state, read_out_bias, code), attention, link_bias

    def logits(self, state: Tensor) -> Tensor:
        """Return the head's logits of a state."""
        return self.head(self.head_norm(state))
