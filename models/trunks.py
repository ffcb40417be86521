# SPDX-License-Identifier: Apache-2.0
"""Image trunks that families share: their shape, and how a family takes one from a checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count, Natural, Positive
from saccade.models.config_values import ImageFields, shared_fields
from saccade.models.resnet_sizes import BLOCKS, STEM_PX, WIDTHS, ResNetSizes, sizes_of
from saccade.models.resolution import TokenGrid

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["vit", "swin", "swinv2", "resnet"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"]
TokenEmbedding = Literal["naive", "densenet", "resnet", "inception", "non-local"]
Position = Literal["sinusoid", "learned"]
# For messages that ask for another trunk.
KNOWN = "a ViT, DeiT, DINOv2, Swin, ResNet, CLIP or SigLIP"
_NAMES: Mapping[str, str] = {"swin": "Swin", "swinv2": "Swin V2", "resnet": "ResNet"}


@dataclass(frozen=True)
class TrunkFields(ImageFields):
    """The fields of a trunk that configurations have by these names.

    A ViT has one resolution; Swin and ResNet have stages, and no class token.
    """

    patch_px: Count  # side of the square that becomes one token; of a ResNet: before its stages
    trunk: Kind = "vit"
    remainder: bool = False  # of a ViT: pixels beyond the last whole patch are not read
    patches_only: bool = False  # of a ViT: no class token, as in SigLIP
    registers: Natural = 0  # tokens between class token and patches, which nothing reads
    pre_norm: bool = False  # of a ViT: CLIP normalizes the tokens before the first block
    activation: Activation = "gelu"  # of a ViT's blocks
    stage_layers: tuple[Count, ...] = ()  # of a Swin or ResNet; each stage halves the grid
    stage_heads: tuple[Count, ...] = ()  # of a Swin
    window: Count = 7  # of a Swin: tokens per side
    # of a Swin V2, per stage: windows before it was fine-tuned with larger ones; 0 or empty: as now
    trained_windows: tuple[Natural, ...] = ()
    bottleneck: bool = True  # of a ResNet: blocks of three convolutions instead of two


@dataclass(frozen=True, kw_only=True)
class TrunkShape(TrunkFields):
    """The sizes and options of a ViT (one resolution), or of a Swin or ResNet (stages).

    Each stage of a Swin or ResNet after the first halves the grid.

    Source: Dosovitskiy et al. 2020; Touvron et al. 2020; Darcet et al. 2023 (registers); Zhai et
            al. 2023 (SigLIP); Liu et al. 2021 and 2022 (Swin); He et al. 2016 (ResNet).
    """

    dim: Count  # width of a token; for a Swin in its first stage, for a ResNet of its stem
    # of a ViT: one linear layer per patch, or a stem and three blocks, which only SoT has
    token_embedding: TokenEmbedding = "naive"
    dense_norm: bool = False  # batch norms in dense blocks, as in later releases of timm
    position: Position = "learned"  # sinusoid: fixed, as in the authors' code
    distillation: bool = False  # a second class token and classifier; the two are averaged
    qkv_bias: bool = True
    layer_norm_epsilon: Positive = 1e-6
    layers: Natural = 0  # of a ViT
    heads: Count = 1
    mlp_dim: Count = 1

    @property
    def is_vit(self) -> bool:
        """True for one resolution, False for stages."""
        return self.trunk == "vit"

    @property
    def is_resnet(self) -> bool:
        """True for convolutions, False for attention."""
        return self.trunk == "resnet"

    @property
    def specials(self) -> int:
        """Class tokens."""
        if self.patches_only or not self.is_vit:
            return 0
        return 2 if self.distillation else 1

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the image's tokens at the start of the trunk."""
        return self.height_px // self.patch_px, self.width_px // self.patch_px

    @property
    def image_grid(self) -> TokenGrid:
        """The grid, the side of each stage's windows, and whether positions are filtered.

        As in transformers, positions are filtered in a ViT with registers, and in no other.
        """
        staged = () if self.is_resnet else self.stage_grids
        windows = tuple(min(rows, columns, self.window) for rows, columns in staged)
        return TokenGrid(*self.grid, windows, antialias=self.registers > 0)

    @property
    def stage_grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the tokens in each stage of a Swin."""
        rows, columns = self.grid
        return tuple((rows // 2**s, columns // 2**s) for s in range(len(self.stage_layers)))

    @property
    def resnet(self) -> ResNetSizes:
        """The sizes of a ResNet."""
        widths = tuple(self.dim * 2**stage for stage in range(len(self.stage_layers)))
        return ResNetSizes(self.stage_layers, widths, not self.bottleneck)

    @property
    def width(self) -> int:
        """Width of the tokens that the trunk returns."""
        if self.is_resnet:
            return self.resnet.features
        return self.dim if self.is_vit else self.dim * 2 ** (len(self.stage_layers) - 1)

    @property
    def last_heads(self) -> int:
        """Number of heads of the last block; of a ResNet, as many as give heads of about 64."""
        if self.is_vit:
            return self.heads
        most = max(1, self.width // 64)
        fitting = (heads for heads in range(most, 0, -1) if self.width % heads == 0)
        return next(fitting) if self.is_resnet else self.stage_heads[-1]

    @property
    def token_px(self) -> int:
        """Side in pixels of the square that a token at the trunk's end represents."""
        return self.patch_px if self.is_vit else self.patch_px * 2 ** (len(self.stage_layers) - 1)

    @property
    def whole_patches(self) -> bool:
        """True if patches fill the image, or a ViT leaves out what remains of it."""
        sides = (self.height_px, self.width_px)
        if self.is_vit and self.remainder:
            return min(sides) >= self.patch_px
        return all(side % self.patch_px == 0 for side in sides)

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

    def misfit(self) -> tuple[str, str] | None:
        """Return a field that does not fit a trunk with stages, and what is expected of it."""
        return next(self._resnet_misfits() if self.is_resnet else self._swin_misfits(), None)

    def _swin_misfits(self) -> Iterator[tuple[str, str]]:
        stages, trained = len(self.stage_layers), len(self.trained_windows)
        if not stages:
            yield "stage_layers", "1 or more each"
        if len(self.stage_heads) != stages:
            yield "stage_heads", f"{stages} values"
        if not self.heads_fit():
            yield "stage_heads", "divisors of the widths"
        if trained and (trained != stages or self.trunk != "swinv2"):
            yield "trained_windows", f"{stages} values for a Swin V2, else none"
        if untiled := self.tiled():
            yield "window", untiled

    def _resnet_misfits(self) -> Iterator[tuple[str, str]]:
        stages = len(WIDTHS)
        if len(self.stage_layers) != stages:
            yield "stage_layers", f"{stages} values for a ResNet"
        if self.stage_heads:
            yield "stage_heads", "none for a ResNet"
        if self.patch_px != STEM_PX:
            yield "patch_px", f"{STEM_PX} for a ResNet"
        for name in ("height_px", "width_px"):
            if getattr(self, name) % self.token_px:
                yield name, f"a multiple of {self.token_px}, the side of a ResNet's cells"

    def described(self) -> str:
        """Describe the trunk in a few words."""
        size = f"{self.height_px} x {self.width_px} px"
        if self.is_vit:
            return f"ViT of {self.layers} blocks, width {self.dim}, patches of {self.patch_px} px"
        blocks = "-".join(map(str, self.stage_layers))
        width = self.width if self.is_resnet else self.dim
        return f"{_NAMES[self.trunk]} of {blocks} blocks, width {width}, {size}"


@dataclass(frozen=True)
class PretrainedTrunk:
    """A trunk with its weights, by the names of the module that `layers.trunk.trunk_of` makes."""

    shape: TrunkShape
    weights: "Mapping[str, Tensor]"


class TrunkPort(ABC):
    """How a family takes the trunk of another model, and gives its own.

    All methods raise SaccadeError with the reason if the family cannot.
    """

    config_class: Any
    free: tuple[str, ...] = ()  # of the fields that a trunk decides, those that a user may change
    sizes_images = True  # False: the run chooses the size of its images, not the trunk
    inner = ""  # before all names in the module that `layers.trunk.trunk_of` makes

    @abstractmethod
    def shape(self, name: str, config: Any) -> TrunkShape:
        """Return the shape of the trunk in a model of this family; the name is for messages."""

    def place(self, config: Any) -> str:
        """Return the beginning of the names of the trunk's tensors in this family."""
        return ""

    @abstractmethod
    def fields(self, shape: TrunkShape) -> dict[str, Any]:
        """Return the fields of the configuration that the trunk decides."""

    def read(
        self, name: str, config: Mapping[str, Any], weights: "Mapping[str, Tensor]"
    ) -> PretrainedTrunk:
        """Return the trunk of a model of this family."""
        values = self.config_class.from_dict(dict(config))
        shape, place = self.shape(name, values), self.place(values)
        tensors = {
            self.inner + key.removeprefix(place): value
            for key, value in weights.items()
            if key.startswith(place)
        }
        return PretrainedTrunk(shape, tensors)

    def state(self, trunk: PretrainedTrunk, config: Any) -> "dict[str, Tensor]":
        """Return tensors by their names in this family, for a configuration with `fields`."""
        place = self.place(config)
        return {place + key.removeprefix(self.inner): value for key, value in trunk.weights.items()}


class ResNetPort(TrunkPort):
    """The port of a family whose field `encoder` may name a ResNet; `network` is its name."""

    sizes_images = False
    inner = "resnet."

    def __init__(self, config_class: Any, network: str, place: str) -> None:
        self.config_class, self.network, self._place = config_class, network, place

    def place(self, config: Any) -> str:
        """Return the beginning of the names of the ResNet's tensors."""
        return self._place

    def shape(self, name: str, config: Any) -> TrunkShape:
        """Return the shape of the ResNet that the configuration names."""
        if config.encoder not in BLOCKS:
            raise SaccadeError(
                f"--trunk {name}: this {self.network} has the encoder '{config.encoder}', not a "
                f"ResNet. Pass {KNOWN}."
            )
        sizes = sizes_of(config.encoder)
        return TrunkShape(
            **shared_fields(ImageFields, config),
            patch_px=STEM_PX,
            dim=sizes.widths[0],
            trunk="resnet",
            stage_layers=sizes.blocks,
            bottleneck=not sizes.basic,
        )

    def fields(self, shape: TrunkShape) -> dict[str, Any]:
        """Return the name of the ResNet, and how its images are scaled."""
        names = (name for name in BLOCKS if sizes_of(name) == shape.resnet)
        name = next(names, None) if shape.is_resnet and shape.channels == 3 else None
        if name is None:
            raise SaccadeError(
                f"--trunk: found a {shape.described()}, but a {self.network} takes a ResNet of "
                f"color images with the usual widths: {', '.join(BLOCKS)}. Pass the weights of one."
            )
        return {"encoder": name, "mean": shape.mean, "std": shape.std}


def check_patches(shape: TrunkShape) -> None:
    """Check that a trunk has one linear layer per patch, as most families need.

    Raises: SaccadeError if it has convolutions instead.
    """
    if shape.token_embedding != "naive":
        raise SaccadeError(
            f"--trunk: found a trunk with {shape.token_embedding} embedding, but "
            f"this family takes those with one linear layer per patch. Pass {KNOWN}."
        )
