# SPDX-License-Identifier: Apache-2.0
"""A SPARO model in evaluation with folded constants: the same codes, far fewer products."""

import math

import torch
from torch import Tensor, nn

from saccade.models.layers.pixels import check_image
from saccade.models.layers.trunk import fold_trunks
from saccade.models.sparo.components import TowerFunction
from saccade.models.sparo.model import Sparo
from saccade.models.sparo.pooling import AttentionPool, MapPool, SlotReadOut, attend
from saccade.models.sparo.towers import ImageTower, passed


class FoldedSlotReadOut(nn.Module):
    """A read-out that pools the tokens first and then projects the result.

    The query is constant, so a slot's logits are one product of the tokens with K'q / sqrt(D).
    The key's bias adds the same to all tokens and cancels. Each slot projects its pooled token by
    W K (or W V); its offset is W b + w, with the values' bias b and the projection's bias w.

    Shapes: as ReadOut.
    Source: equal to ReadOut up to rounding; Vani et al. 2024, eq. 1.
    """

    float32_products = True  # even in a half-precision model
    probe: Tensor
    project: Tensor
    offset: Tensor

    @torch.no_grad()
    def __init__(self, source: SlotReadOut, query: Tensor) -> None:
        super().__init__()
        shape = source.shape
        heads = torch.tensor(shape.head_of, device=query.device)
        value = source.key if source.value is None else source.value
        keys = source.key.weight.unflatten(0, (shape.heads, shape.attn_dim))[heads]
        values = value.weight.unflatten(0, (shape.heads, shape.value_dim))[heads]
        bias = value.bias.unflatten(0, (shape.heads, shape.value_dim))[heads]
        last = source.project
        self.register_buffer(
            "probe", (query.unsqueeze(1) @ keys).squeeze(1).T / math.sqrt(shape.attn_dim)
        )
        self.register_buffer("project", (last.weight @ values).mT.contiguous())
        self.register_buffer("offset", bias @ last.weight.T + last.bias)

    def forward(
        self, tokens: Tensor, end: Tensor | None = None, query: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        attention = attend((tokens @ self.probe).mT, end)
        pooled = attention @ tokens
        slots = (pooled.transpose(0, 1) @ self.project).transpose(0, 1)
        return slots + self.offset, attention


class FoldedImageTower(nn.Module):
    """An image tower that takes pixel values from 0 to 255.

    Mean, std and the patches' bias are folded into the patches' weights and the positions. The
    class token with its position, including the first norm, is one constant.

    Shapes: as ImageTower.
    """

    first: Tensor | None
    position: Tensor

    @torch.no_grad()
    def __init__(self, source: ImageTower) -> None:
        super().__init__()
        self.size = source.scale.size
        self.blocks, self.norm_input = source.blocks, source.norm_input
        patches = source.patches
        side = patches.kernel_size[0]
        self.patches = nn.Conv2d(patches.in_channels, patches.out_channels, side, side, bias=False)
        self.patches.to(patches.weight)
        mean, std = (
            moment[None, :, None, None] for moment in (source.scale.mean, source.scale.std)
        )
        self.patches.weight.copy_(patches.weight / (255 * std))
        constant = -(patches.weight * (mean / std)).sum((1, 2, 3))
        if patches.bias is not None:
            constant = constant + patches.bias
        first = source.first()
        count = 0 if first is None else len(first)
        self.register_buffer("position", source.position[count:] + constant)
        if first is not None:
            first = source.norm_input(first + source.position[:count])[None]
        self.register_buffer("first", first)

    def forward(self, image: Tensor) -> Tensor:
        return self.with_first(image)[0]

    def with_first(self, image: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Do the same as ImageTower.with_first."""
        check_image(image, self.size)
        pixels = image.to(self.position.dtype).permute(0, 3, 1, 2)
        x = self.norm_input(self.patches(pixels).flatten(2).mT + self.position)
        if self.first is not None:
            x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1)
        return passed(self.blocks, x)


class FoldedSparo(TowerFunction):
    """The result of `Sparo.fold`: `encode_image` and `encode_text`, for evaluation only."""

    def __init__(self, source: Sparo) -> None:
        super().__init__()
        config = self.config = source.config
        self.image = source.image
        if isinstance(source.image, ImageTower):
            self.image = FoldedImageTower(source.image)
        fold_trunks(self.image)
        self.image_pool = source.image_pool
        if config.text:
            self.text, self.text_pool = source.text, source.text_pool
        if config.pooling == "codebook":
            self.codebook = source.codebook
        if config.pooling == "sparo":
            self._fold_read_outs()
        for module in self.modules():
            if isinstance(module, AttentionPool | MapPool):
                module.constant = module.asked()
        if config.masked:
            self.register_buffer("slot_mask", source.slot_mask)

    def _fold_read_outs(self) -> None:
        pools = [self.image_pool, *([self.text_pool] if self.config.text else [])]
        sources = [pool.read_out for pool in pools if isinstance(pool.read_out, SlotReadOut)]
        shared = sources[0].query
        for pool, source in zip(pools, sources, strict=True):
            query = shared if source.query is None else source.query
            assert query is not None
            pool.read_out = FoldedSlotReadOut(source, query)
