# SPDX-License-Identifier: Apache-2.0
"""A NAC in evaluation with folded constants: the same function, far fewer products."""

import torch
from torch import Tensor, nn

from saccade.models.interface import Component
from saccade.models.layers.pixels import check_image
from saccade.models.layers.trunk import fold_trunks
from saccade.models.nac.components import nac_component
from saccade.models.nac.folded_layers import (
    FoldedPropagator,
    FoldedReadIn,
    FoldedReadOut,
    folded_head,
)
from saccade.models.nac.generator import (
    Circuit,
    CircuitInputs,
    check_condition,
    generate,
    link_distances,
)
from saccade.models.nac.layers import without_padding
from saccade.models.nac.model import NAC, heard_codes, reading_codes
from saccade.models.nac.read_in import mean_of_heads
from saccade.models.nac.read_out import head_outputs
from saccade.models.nac.sequence_tokenizers import SymbolTokenizer, TokenProjection, sinusoids
from saccade.models.nac.tokenizers import PairTokenizer, PatchTokenizer, patches


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


class FoldedNAC(nn.Module):
    """The result of `NAC.fold`: `forward` and `details` of a NAC, for evaluation only.

    Codes, signatures and initial states are constants. So every modulation is one vector per
    module, the attention bias is one matrix, and the read-in's query becomes a probe in the space
    of the tokens. In a conditional NAC they depend on the sample and are computed from its
    circuit; the order of multiplications is the same.

    Source: equal to the unfolded model up to rounding; Weiss et al. 2022, eq. 1 to 5.
    """

    link_bias: Tensor | None
    links: Tensor | None
    read_out_bias: Tensor | None
    read_out_signatures: Tensor | None
    start: Tensor | None

    @torch.no_grad()
    def __init__(self, source: NAC) -> None:
        super().__init__()
        self.config = source.config
        self.kernel = source.kernel
        circuit: Circuit | None = None
        if self.config.conditional:
            self.generator, self.initial_state = source.generator, source.initial_state
            self.register_buffer("read_out_signatures", source.read_out_signatures)
        else:
            circuit = source.generator()
            between, to_read_out = link_distances(circuit, source.read_out_signatures)
            link_bias = self.kernel.constant(between)
            self.register_buffer("link_bias", link_bias)
            links = None if link_bias is None else self.kernel.links(link_bias)
            self.register_buffer("links", links)
            self.register_buffer("read_out_bias", self.kernel.read_out(to_read_out, 1))
        self.tokenizer = fold_tokenizer(source.tokenizer)
        self._fold_layers(source, circuit)
        self.head_norm = source.head_norm
        self.head = folded_head(source.head, source.read_out_codes)
        self.requires_grad_(False)
        self.eval()

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
        return self._logits(self._run(x, length, condition, condition_length)[0])

    def details(
        self,
        x: Tensor,
        length: Tensor | None = None,
        condition: Tensor | None = None,
        condition_length: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return all exported outputs of one pass.

        Shapes: -> logits and probabilities [b classes], embedding [b dim] of length 1, attention
                [b u n] of the read-in, and link [b u u], the probabilities of links (absent if
                links are dense).
        """
        state, attention, bias = self._run(x, length, condition, condition_length)
        answer = head_outputs(self._logits, state) | {"attention": attention}
        if bias is not None:
            links = self.kernel.links(bias) if self.config.conditional else self.links
            assert links is not None
            answer["link"] = links[..., : self.config.modules].expand(attention.shape[0], -1, -1)
        return answer

    def components(self) -> tuple[Component, ...]:
        """Return the unfolded model's component, computed by this one."""
        return (nac_component(self),)

    def _run(
        self,
        x: Tensor,
        length: Tensor | None,
        condition: Tensor | None,
        condition_length: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the state before the head, the read-in's weights, the logarithms of the links."""
        tokens = without_padding(self.tokenizer(x, length), length)
        theta: Tensor | None = None
        code: Tensor | None = None
        if self.config.conditional:
            inputs = CircuitInputs(tokens, length, condition, condition_length)
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
            if self.beside:
                state = propagator(state, bias, code, torch.cat((state, read), 1))
            else:
                state = propagator(state, bias, code)
        state = torch.cat((state, read), 1) if self.beside else state
        attention = mean_of_heads(weights, self.config.read_heads)
        return self.read_out(state, read_out_bias, code), attention, link_bias

    def _logits(self, state: Tensor) -> Tensor:
        return self.head(self.head_norm(state))
