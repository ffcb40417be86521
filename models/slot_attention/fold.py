# SPDX-License-Identifier: Apache-2.0
"""Slot attention in evaluation with folded constants: the same function, fewer products."""

from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from saccade.models.slot_attention.components import SlotFunction
from saccade.models.slot_attention.decoder import Decoder, Painting
from saccade.models.slot_attention.encoders import Encoder, GridEmbedding
from saccade.models.slot_attention.initial import Rule
from saccade.models.slot_attention.rounds import GridReader, PlainReader, SlotAttention, SlotState

Seen = tuple[Tensor, Tensor]


class FoldedPlainReader(nn.Module):
    """The baseline's reader: queries are mapped to the tokens, values made from pooled tokens.

    Two products of tokens with d x d weights become products of slots with these weights.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, source: PlainReader) -> None:
        super().__init__()
        self.heads, self.merge = source.heads, source.merge
        self.register_buffer("keys", source.keys.weight.unflatten(0, (source.heads, -1)))
        self.register_buffer("values", source.values.weight.unflatten(0, (source.heads, -1)))

    def prepare(self, tokens: Tensor) -> Seen:
        return tokens[:, None], tokens[:, None]

    def see(self, prepared: Seen, relative: Tensor | None, *, values: bool) -> Seen:
        return prepared

    def logits(self, tokens: Tensor, queries: Tensor) -> Tensor:
        return queries.unflatten(-1, (self.heads, -1)).transpose(1, 2) @ self.keys @ tokens.mT

    def update(self, tokens: Tensor, weights: Tensor) -> Tensor:
        pooled = (weights @ tokens @ self.values.mT).transpose(1, 2).flatten(-2)
        return pooled if self.merge is None else self.merge(pooled)


class Projection(nn.Module):
    """f up to its ReLU, as a function of token and relative position, mostly computed per token.

    f's first layer sees u = token W' + b_g + G r. With C = I - 11'/D, which removes the mean,
    W1 diag(gamma) C u is A + B r, and the variance is the quadratic a + b r + r'M r. The hidden
    units relu((A + B r) / sigma + c) are relu(A + B r + sigma c) / sigma. The division is left
    for later, when each token has become one number per slot.

    Shapes: tokens [b n c] -> A [b n h], and in one tensor a, b [b n 3].
    """

    weight: Tensor
    bias: Tensor
    widen: Tensor
    grid: Tensor
    turn: Tensor
    moments: Tensor

    def __init__(self, layer: nn.Linear, source: GridReader, *, live: bool = False) -> None:
        super().__init__()
        # Constants are computed in float64; in training they stay in the type of the weights.
        exact = layer.weight.dtype if live else torch.float64
        weight = layer.weight.to(exact)
        grid, bias = source.grid.weight.to(exact), source.grid.bias.to(exact)
        widen, offset = source.widen.weight.to(exact), source.widen.bias.to(exact)
        self.eps: float | None = None
        if isinstance(source.norm, nn.LayerNorm):
            self.eps = source.norm.eps
            weight, grid, bias = weight - weight.mean(0), grid - grid.mean(0), bias - bias.mean()
            offset = offset + widen @ source.norm.bias.to(exact)
            widen = widen * source.norm.weight.to(exact)
        constants = {
            "weight": weight,
            "bias": bias,
            "widen": widen,
            "grid": grid,
            "turn": torch.cat([(widen @ grid).mT, offset[None]]),
            "moments": grid.mT @ grid / len(grid),
        }
        for name, value in constants.items():
            if live:
                setattr(self, name, value)
            else:
                self.register_buffer(name, value.to(layer.weight.dtype).contiguous())

    def prepare(self, tokens: Tensor) -> Seen:
        """Return the products of a token that are the same for every slot and round."""
        centred = tokens @ self.weight.mT + self.bias
        size = centred.square().mean(-1, keepdim=True)
        slope = centred @ self.grid * (2 / centred.shape[-1])
        return centred @ self.widen.mT, torch.cat([size, slope], -1)

    def forward(self, prepared: Seen, relative: Tensor) -> Seen:
        """Return the hidden units times sigma, and 1 / sigma.

        Shapes: relative [b k n 2] -> [b k n h], [b k n].
        """
        hidden, moments = (array[:, None] for array in prepared)
        sigma = torch.ones_like(relative[..., :1])
        if self.eps is not None:
            bent = (relative @ self.moments + moments[..., 1:]) * relative
            variance = moments[..., :1] + bent.sum(-1, keepdim=True)
            sigma = (variance.clamp(min=0) + self.eps).sqrt()
        # In place: these are the only tensors of slots x tokens x width, and they take the time.
        units = (torch.cat([relative, sigma], -1) @ self.turn).add_(hidden).relu_()
        return units, 1 / sigma.squeeze(-1)


class FoldedGridReader(nn.Module):
    """A reader whose second layer of f runs once per query and per update, never per token.

    Shapes: as GridReader, but keys and values are hidden units [b k n h] with their scale.
    Source: equal to the unfolded reader up to rounding; Biza et al. 2022, Algorithm 1.
    """

    def __init__(self, source: GridReader, *, live: bool = False) -> None:
        super().__init__()
        self.keys = Projection(source.keys, source, live=live)
        self.values: Projection | None = None
        if source.values_see_grid:
            self.values = Projection(source.values, source, live=live)
        self.plain_values = source.values
        self.narrow = source.narrow

    def prepare(self, tokens: Tensor) -> Any:
        values = tokens[:, None] if self.values is None else self.values.prepare(tokens)
        return self.keys.prepare(tokens), values

    def see(self, prepared: Any, relative: Tensor, *, values: bool) -> Any:
        of_keys, of_values = prepared
        if values and self.values is not None:
            of_values = self.values(of_values, relative)
        return self.keys(of_keys, relative), of_values

    def logits(self, keys: Seen, queries: Tensor) -> Tensor:
        units, scale = keys
        turned = queries @ self.narrow.weight
        bias = queries @ self.narrow.bias[:, None]
        return (scale * (units @ turned[..., None]).squeeze(-1) + bias)[:, None]

    def update(self, values: Any, weights: Tensor) -> Tensor:
        if self.values is None:
            return self.plain_values((weights @ values).squeeze(1))
        units, scale = values
        weights = weights.squeeze(1)
        pooled = ((weights * scale)[:, :, None] @ units).squeeze(2)
        # The weights sum to S / (S + epsilon), not to 1, which scales the bias too.
        return pooled @ self.narrow.weight.mT + self.narrow.bias * weights.sum(-1, keepdim=True)


class FoldedDecoder(Decoder):
    """A decoder whose first layer runs once per slot and once per grid, not once per cell.

    This is possible for an MLP after the broadcast; a CNN keeps its layers. What the grid adds
    equally for every slot is one constant.
    """

    first_grid: Tensor
    first_bias: Tensor
    places: Tensor | None
    readout_weight: Tensor
    readout_bias: Tensor

    def __init__(self, source: Decoder) -> None:
        super().__init__(source.config)
        self.to(source.alpha.weight.dtype).load_state_dict(source.state_dict())
        first: Any = self.backbone.layers[0]
        constants = {
            "readout_weight": torch.cat([self.alpha.weight, self.colour.weight]),
            "readout_bias": torch.cat([self.alpha.bias, self.colour.bias]),
        }
        if self.config.decoder == "mlp":
            constants["first_grid"] = first.weight @ self.project.weight
            constants["first_bias"] = first.bias + first.weight @ self.project.bias
        self.register_buffer("places", None)
        if not self.config.equivariant:
            grid, mlp = self.grid[:, None], self.config.decoder == "mlp"
            constants["places"] = grid @ constants["first_grid"].mT if mlp else self.project(grid)
        for name, value in constants.items():
            self.register_buffer(name, value.detach())

    def forward(self, state: SlotState) -> Painting:
        if self.config.decoder != "mlp":
            return super().forward(state)
        layers: list[Any] = list(self.backbone.layers)
        first, *others = layers
        slots = state.slots @ first.weight.mT + self.first_bias
        places = self.places
        if places is None:
            places = self.relative(state) @ self.first_grid.mT
        x = (slots[:, :, None, None] + places).relu()
        for layer in others:
            x = layer(x).relu()
        return self.paint(x)

    def broadcast(self, state: SlotState) -> Tensor:
        """Do the same as `Decoder.broadcast`."""
        if self.places is None:
            return super().broadcast(state)
        return state.slots[:, :, None, None] + self.places

    def paint(self, features: Tensor) -> Painting:
        both = features @ self.readout_weight.mT + self.readout_bias
        alphas, layers = both[..., 0], both[..., 1:]
        masks = alphas.softmax(1)
        return Painting((masks[..., None] * layers).sum(1), masks, alphas, layers)


class FoldedGridEmbedding(nn.Module):
    """The embedding that the linear layer adds to each position's token, computed once.

    Shapes: as GridEmbedding.
    """

    added: Tensor

    def __init__(self, source: GridEmbedding, project: nn.Module) -> None:
        super().__init__()
        self.register_buffer("added", project(source.grid))
        self.mlp = source.mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.added
        return (x if self.mlp is None else self.mlp(x)).flatten(1, 2)


class FoldedSlotModel(SlotFunction):
    """The result of `SlotModel.fold`: its forward and components, for evaluation only."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.config = source.config
        self._rule = source.rule()
        self.scale = source.scale
        self.encoder: Encoder = source.encoder
        embedding: Any = self.encoder.embedding
        if embedding.project is not None:
            self.encoder.embedding = FoldedGridEmbedding(embedding, embedding.project)
        self.attention = fold_attention(source.attention)
        self.decoder = FoldedDecoder(source.decoder)

    def rule(self) -> Rule:
        """Return the rule of the unfolded model."""
        return self._rule


@torch.no_grad()
def fold_attention(source: SlotAttention) -> SlotAttention:
    """Return the rounds with a folded reader.

    Shapes: as SlotAttention.
    """
    folded = deepcopy(source)
    plain = isinstance(source.reader, PlainReader)
    folded.reader = (FoldedPlainReader if plain else FoldedGridReader)(folded.reader)
    return folded.requires_grad_(False)


def reordered_attention(source: SlotAttention) -> SlotAttention:
    """Return the rounds in the folded order of products, differentiable in the source's weights.

    Use it for a single training step: it shares the current weights. The baseline is returned
    unchanged, because its keys and values are cheap.

    Shapes: as SlotAttention.
    """
    if isinstance(source.reader, PlainReader):
        return source
    same = copy(source)
    same._modules = dict(source._modules)
    same.reader = FoldedGridReader(source.reader, live=True)
    return same
