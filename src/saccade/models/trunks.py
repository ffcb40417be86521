# SPDX-License-Identifier: Apache-2.0
"""Image trunks that families share: their shape, and how a family takes one from a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["vit", "swin", "swinv2"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]


@dataclass(frozen=True)
class TrunkShape:
    """The sizes and options of a ViT (one resolution) or a Swin (stages that halve the grid).

    Source: Dosovitskiy et al. 2020; Touvron et al. 2020; Darcet et al. 2023 (registers); Liu et
            al. 2021 and 2022 (Swin).
    """

    height_px: int
    width_px: int
    channels: int
    mean: tuple[float, ...]  # per channel, of pixels scaled to [0, 1]
    std: tuple[float, ...]
    patch_px: int
    dim: int  # width of a token; for a Swin, in its first stage
    trunk: Kind = "vit"
    token_embedding: str = "naive"  # one linear layer per patch; only SoT has others
    dense_norm: bool = False
    position: str = "learned"
    distillation: bool = False  # a second class token
    registers: int = 0  # further tokens between class token and patches
    pre_norm: bool = False  # CLIP normalizes the tokens before the first block
    activation: Activation = "gelu"
    qkv_bias: bool = True
    layer_norm_epsilon: float = 1e-6
    layers: int = 0  # of a ViT
    heads: int = 1
    mlp_dim: int = 1
    stage_layers: tuple[int, ...] = ()  # of a Swin
    stage_heads: tuple[int, ...] = ()
    window: int = 7  # tokens per side
    trained_windows: tuple[int, ...] = ()  # of a Swin V2, before it was fine-tuned with others

    @classmethod
    def of(cls, config: Any) -> "TrunkShape":
        """Return the shape that a configuration with fields of these names describes."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    @property
    def is_vit(self) -> bool:
        """True for one resolution with a class token, False for a Swin."""
        return self.trunk == "vit"

    @property
    def specials(self) -> int:
        """Class tokens."""
        return 2 if self.distillation else 1

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the image's tokens at the start of the trunk."""
        return self.height_px // self.patch_px, self.width_px // self.patch_px

    @property
    def stage_grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the tokens in each stage of a Swin."""
        rows, columns = self.grid
        return tuple((rows // 2**s, columns // 2**s) for s in range(len(self.stage_layers)))

    @property
    def width(self) -> int:
        """Width of the tokens that the trunk returns."""
        return self.dim if self.is_vit else self.dim * 2 ** (len(self.stage_layers) - 1)

    @property
    def token_px(self) -> int:
        """Side in pixels of the square that a token at the trunk's end represents."""
        return self.patch_px if self.is_vit else self.patch_px * 2 ** (len(self.stage_layers) - 1)

    def heads_fit(self) -> bool:
        """Return True if the heads divide the widths."""
        if self.is_vit:
            return self.dim % self.heads == 0
        widths = [self.dim * 2**stage for stage in range(len(self.stage_layers))]
        return all(w % heads == 0 for w, heads in zip(widths, self.stage_heads, strict=False))

    def tiled(self) -> str | None:
        """Return what is expected of a Swin's window if it does not tile every stage."""
        for stage, (rows, columns) in enumerate(self.stage_grids):
            side = min(rows, columns, self.window)
            if side < 1 or rows % side or columns % side:
                grid = f"{rows} x {columns} tokens"
                return f"a window that tiles stage {stage + 1}, whose grid is {grid}"
            if stage + 1 < len(self.stage_layers) and (rows % 2 or columns % 2):
                return f"a size that stage {stage + 1} can halve, whose grid is {rows} x {columns}"
        return None

    def described(self) -> str:
        """Describe the trunk in a few words."""
        size = f"{self.height_px} x {self.width_px} px"
        if self.is_vit:
            return f"ViT of {self.layers} blocks, width {self.dim}, patches of {self.patch_px} px"
        name = "Swin" if self.trunk == "swin" else "Swin V2"
        return f"{name} of {'-'.join(map(str, self.stage_layers))} blocks, width {self.dim}, {size}"


@dataclass(frozen=True)
class PretrainedTrunk:
    """A trunk with its weights, by the names of `layers.vit.ViT` or `layers.swin.Swin`."""

    shape: TrunkShape
    weights: "Mapping[str, Tensor]"


@dataclass(frozen=True)
class TrunkPort:
    """How a family takes the trunk of another model, and gives its own.

    All functions raise SaccadeError with the reason if the family cannot.
    """

    # From a configuration and the weights of this family; the name is for messages.
    read: "Callable[[str, Mapping[str, Any], Mapping[str, Tensor]], PretrainedTrunk]"
    fields: Callable[[TrunkShape], dict[str, Any]]  # of the configuration that the trunk decides
    # Tensors by their names in this family, for a configuration with those fields.
    state: "Callable[[PretrainedTrunk, Any], dict[str, Tensor]]"
    free: tuple[str, ...] = ()  # of these fields, those that a user may change nevertheless
