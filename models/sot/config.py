# SPDX-License-Identifier: Apache-2.0
"""The configuration of a second-order transformer, and its named sizes."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count, Natural, Positive, Probability, Range
from saccade.models.budget import Budget, ComputeBudget
from saccade.models.config_values import ConfigValues, shared_fields
from saccade.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from saccade.models.resnet_sizes import BLOCKS, STEM_PX, WIDTHS
from saccade.models.resolution import TokenGrid, or_smaller, resolution_budget
from saccade.models.trunks import TrunkPort, TrunkShape

SOURCE = "Xie et al. 2021, SoT: Delving Deeper into Classification Head for Transformer"
Input = Literal["image", "tokens"]
ClassToken = Literal["first", "last"]
Pooling = Literal["mgcrp", "gap", "gcp"]
Fusion = Literal["sum", "concat", "aggr-all", "late", "visual", "class"]
ClassActivation = Literal["none", "tanh"]
MeanRemoval = Literal["none", "scalar", "channel"]
GcpDivisor = Literal["tokens", "channels"]
Normalization = Literal["svpn", "svpn-fast", "scale", "scale-learned", "epn", "layer-norm", "none"]
EpnAxis = Literal["matrix", "rows"]
# Side of a token in pixels; the stem and the blocks halve the image that often.
CONVOLUTION_PX = {
    "densenet": (8, 16),
    "resnet": (8, 16),
    "inception": (8, 16),
    "non-local": (8,),
}


@dataclass(frozen=True)
class SoTConfig(TrunkShape, ConfigValues):
    """Configuration of a SoT, and of ViT, DeiT, Swin and ResNet with or without its head.

    The defaults are a small model of 8x8 images with the paper's formulas. Comments mention what
    the paper leaves open and what the authors' code does instead.

    Raises: SaccadeError naming the first field that is out of range.
    Source: Xie et al. 2021, section 3 and supplement A; the authors' code where a comment mentions
            "the authors".
    """

    called = "SoT"
    layer_counts = ("layers", "stage_layers")
    round_counts = ("mpn_steps", "singular_values", "iterations")

    height_px: Count = 8
    width_px: Count = 8
    channels: Count = 1
    mean: tuple[float, ...] = (0.5,)  # per channel, of pixels scaled to [0, 1]
    std: tuple[float, ...] = (0.5,)
    input: Input = "image"  # image: uint8 [b h w c]; tokens: states [b n d] of BERT or GPT
    max_tokens: Count = 128  # per text
    class_token: ClassToken = "first"  # in a text: BERT's is first, GPT's last
    patch_px: Count = 2
    dim: Count = 48
    layers: Count = 3
    heads: Count = 4
    mlp_dim: Count = 96
    qkv_bias: bool = False
    layer_norm_epsilon: Positive = 1e-5
    # The head.
    fusion: Fusion = "sum"  # of class token and word tokens
    # width that the class token is projected to first (1,280 in table 3)
    class_projection: Natural = 0
    class_activation: ClassActivation = "none"  # after that projection
    pooling: Pooling = "mgcrp"
    pool_heads: Count = 6
    m: Count = 14
    n: Count = 14
    pool_bias: bool = False  # of the projections W and R
    # on the pooled vector; the authors: 0.5 in Small, 0.7 in Base
    pool_dropout: Annotated[float, Range(0, 1, below=True)] = 0.0
    gcp_dim: Count = 48  # width that GCP reduces tokens to; 48 gives 1,176 numbers
    # Numerics of the pooling: the paper's by default, the authors' in converted checkpoints.
    # scalar: one number per sample and head, on each side (the authors)
    mean_removal: MeanRemoval = "none"
    gcp_divisor: GcpDivisor = "tokens"  # channels: as in the authors' code
    mpn_steps: Count = 5  # Newton-Schulz steps in iSQRT; the authors: 3
    normalization: Normalization = "svpn"
    alpha: Annotated[float, Range(0, 1, above=True)] = 0.5
    singular_values: Natural = 1  # found by svpn-fast; 0: all, without a remainder
    iterations: Count = 1
    # of exact svPN: share of a matrix's Frobenius norm that bounds its slope, see `ExactSvPN`
    svpn_ridge: Annotated[float, Range(0, 1, below=True)] = 0.0
    # in the last division of svpn-fast; the authors: 1e-5
    svpn_epsilon: Annotated[float, Range(0, 1, below=True)] = 0.0
    learned_start: bool = False  # of svpn-fast; False: ones
    epn_axis: EpnAxis = "matrix"  # axis of the L2 norm; rows: the authors', columns of length 1
    epn_epsilon: Probability = 1e-8  # under the root, whose slope is unbounded at 0
    classes: Count = 10
    seed: Natural = 0  # of the initial weights

    def __post_init__(self) -> None:
        self._check_types()
        if self.input == "image":
            self._check_image()
        self._check_trunk()
        self._check_head()

    @property
    def own_head(self) -> str:
        """The budget that the model was trained at."""
        return "fast" if self.second_order and self.normalization == "svpn-fast" else "exact"

    def budgets(self) -> tuple[ComputeBudget, ...]:
        """Return the head as trained, the fast one for exact svPN, and the class token alone.

        The class token needs its own classifier. A model that was trained with the fast svPN has
        that as its budget 1.
        """
        budgets = [ComputeBudget(self.own_head, Budget(1), 3, 3, "head")]
        if self.second_order and self.normalization == "svpn":
            budgets.append(ComputeBudget("fast", Budget("2/3"), 2, 3, "head"))
        if self.fusion in ("sum", "late"):
            budgets.append(ComputeBudget("class", Budget("1/3"), 1, 3, "head"))
        return tuple(budgets)

    def budget(self, text: str) -> ComputeBudget:
        """Return the budget `exact`, `fast` or `class`, if this model has it.

        A model of fast svPN also has `exact` on request. It is a different function from the
        trained one, not a larger budget.
        Raises: SaccadeError listing the budgets of the model.
        """
        if found := resolution_budget(self, text):
            return found
        known = {budget.label: budget for budget in self.budgets()}
        if self.own_head == "fast":
            known["exact"] = ComputeBudget("exact", Budget(1), 3, 3, "head")
        if text not in known:
            heads = " (the head with exact or fast svPN, or the class token alone)"
            what = heads if len(known) > 1 else ""
            raise SaccadeError(
                f"budget {text!r}: this model has {', '.join(known)}{what}. Choose from these, "
                f"such as --budget {','.join(known)}{or_smaller(self)}."
            )
        return known[text]

    def _check_image(self) -> None:
        fits = self.shape.whole_patches
        size = f"a divisor of height_px ({self.height_px}) and width_px ({self.width_px})"
        self._expect("patch_px", fits, size)
        self._check_pixels()
        sides = CONVOLUTION_PX.get(self.token_embedding)
        if self.trunk == "vit" and sides is not None:
            expected = f"{' or '.join(map(str, sides))} for the {self.token_embedding} embedding"
            self._expect("patch_px", self.patch_px in sides, expected)

    def _check_trunk(self) -> None:
        if self.input == "tokens" or self.trunk == "vit":
            self._expect("heads", self.dim % self.heads == 0, f"a divisor of dim ({self.dim})")
            return
        if misfit := self.shape.misfit():
            self._expect(misfit[0], False, misfit[1])

    def _check_head(self) -> None:
        wordy = self.fusion in ("visual", "aggr-all")
        if self.input == "image" and not self.shape.specials:
            expected = "visual: this trunk has no class token"
            self._expect("fusion", self.fusion == "visual", expected)
        self._expect(
            "patches_only",
            not self.patches_only or (self.input == "image" and self.trunk == "vit"),
            "false unless the trunk is a ViT",
        )
        self._expect(
            "distillation",
            not self.distillation or (self.input == "image" and self.shape.specials == 2),
            "false unless the trunk is a ViT with a class token",
        )
        self._expect(
            "class_projection",
            self.class_projection == 0 or (not wordy and self.fusion != "concat"),
            "0 unless the class token has its own classifier",
        )
        exact = self.second_order and self.normalization == "svpn"
        self._expect("svpn_ridge", not self.svpn_ridge or exact, "0 unless the head has exact svPN")
        most = min(self.m, self.n)
        fits = not self.second_order or self.singular_values <= most
        self._expect("singular_values", fits, f"at most {most}, the smaller of m and n")

    @property
    def shape(self) -> TrunkShape:
        """The sizes of the trunk of images."""
        return TrunkShape(**shared_fields(TrunkShape, self))

    @property
    def token_grid(self) -> TokenGrid | None:
        """The tokens of an image; None for a text."""
        return self.image_grid if self.input == "image" else None

    @property
    def width(self) -> int:
        """Width of the tokens that the head receives."""
        return self.shape.width if self.input == "image" else self.dim

    @property
    def second_order(self) -> bool:
        """True if the head pools cross-covariances."""
        return self.pooling == "mgcrp" and self.fusion != "class"


# The authors' choices that differ from the paper's formulas; see `SoTConfig`.
AUTHORS: dict[str, Any] = {
    "normalization": "svpn-fast",
    "mean_removal": "scalar",
    "gcp_divisor": "channels",
    "mpn_steps": 3,
    "svpn_epsilon": 1e-5,
    "learned_start": True,
    "epn_axis": "rows",
}
_IMAGENET: dict[str, Any] = {
    "height_px": 224,
    "width_px": 224,
    "channels": 3,
    "classes": 1000,
    "mean": IMAGENET_MEAN,
    "std": IMAGENET_STD,
    "patch_px": 16,
}


def official_sot(**values: Any) -> SoTConfig:
    """Return a SoT with the numerics that the authors' models were trained with."""
    fixed: dict[str, Any] = {"token_embedding": "densenet", "pool_heads": 6, "position": "sinusoid"}
    return SoTConfig(**_IMAGENET | AUTHORS | fixed | values)


def vit(dim: int, layers: int, *, patch_px: int = 16, **values: Any) -> SoTConfig:
    """Return a ViT that classifies the class token only; heads have width 64."""
    fixed: dict[str, Any] = {
        "dim": dim,
        "layers": layers,
        "heads": max(1, dim // 64),
        "mlp_dim": 4 * dim,
        "patch_px": patch_px,
        "qkv_bias": True,
        "position": "learned",
        "fusion": "class",
        "layer_norm_epsilon": 1e-6,
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
    }
    return SoTConfig(**_IMAGENET | fixed | values)


def deit(dim: int, layers: int, **values: Any) -> SoTConfig:
    """Return a ViT with the preprocessing of DeiT."""
    return vit(dim, layers, **{"mean": IMAGENET_MEAN, "std": IMAGENET_STD} | values)


def swin(
    dim: int, stage_layers: tuple[int, ...], stage_heads: tuple[int, ...], **values: Any
) -> SoTConfig:
    """Return a Swin transformer that classifies the mean of its tokens."""
    fixed: dict[str, Any] = {
        "trunk": "swin",
        "dim": dim,
        "stage_layers": stage_layers,
        "patch_px": 4,
        "stage_heads": stage_heads,
        "qkv_bias": True,
        "pooling": "gap",
        "fusion": "visual",
    }
    return SoTConfig(**_IMAGENET | fixed | values)


def resnet(stage_layers: tuple[int, ...], **values: Any) -> SoTConfig:
    """Return a ResNet of bottlenecks that classifies the mean of its cells."""
    fixed: dict[str, Any] = {
        "trunk": "resnet",
        "dim": WIDTHS[0],
        "stage_layers": stage_layers,
        "patch_px": STEM_PX,
        "pooling": "gap",
        "fusion": "visual",
    }
    return SoTConfig(**_IMAGENET | fixed | values)


def _paper(dim: int, heads: int, layers: int, mlp_dim: int, m: int, **values: Any) -> SoTConfig:
    sizes = {"dim": dim, "heads": heads, "layers": layers, "mlp_dim": mlp_dim, "m": m, "n": m}
    return official_sot(**sizes | values)


# Sizes for this package's own data sets.
SMALL: dict[str, Any] = {
    "dim": 64,
    "layers": 4,
    "heads": 4,
    "mlp_dim": 160,
    "pool_heads": 6,
    "m": 8,
    "n": 8,
}
PRESETS: dict[str, SoTConfig] = {
    "sot-tiny": _paper(240, 4, 12, 600, 14),
    "sot-small": _paper(384, 6, 14, 1344, 24, pool_dropout=0.5),
    "sot-base": _paper(528, 8, 24, 1584, 38, pool_dropout=0.7),
    "vit-s16": vit(384, 12),
    "vit-b16": vit(768, 12),
    "vit-b32": vit(768, 12, patch_px=32),
    "deit-tiny": deit(192, 12),
    "deit-small": deit(384, 12),
    "deit-base": deit(768, 12),
    "deit-tiny-distilled": deit(192, 12, distillation=True),
    "deit-tiny-sot": deit(192, 12, fusion="sum"),
    "swin-tiny": swin(96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "swin-tiny-sot": swin(96, (2, 2, 6, 2), (3, 6, 12, 24), pooling="mgcrp", m=24, n=24),
    "resnet-50": resnet(BLOCKS["resnet50"]),
    "resnet-50-sot": resnet(BLOCKS["resnet50"], pooling="mgcrp", m=24, n=24),
    "sot-shapes": SoTConfig(
        **SMALL | {"height_px": 48, "width_px": 48, "channels": 3, "patch_px": 6, "classes": 16},
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    ),
    "sot-digits": SoTConfig(**SMALL),
    "sot-digits-tiny": SoTConfig(dim=16, heads=2, layers=1, mlp_dim=24, pool_heads=2, m=4, n=4),
}


class SoTTrunk(TrunkPort):
    """The trunk of a SoT, ViT, DeiT, Swin or ResNet, given to other models and taken from them."""

    config_class = SoTConfig
    free = ("fusion",)

    def shape(self, name: str, config: SoTConfig) -> TrunkShape:
        """Return the shape of the trunk of images."""
        if config.input != "image":
            raise SaccadeError(
                f"--trunk {name}: takes the states of a text, expected a model of images. "
                "Pass another."
            )
        return config.shape

    def place(self, config: SoTConfig) -> str:
        """Return the beginning of the names of the trunk's tensors."""
        return "trunk."

    def fields(self, shape: TrunkShape) -> dict[str, Any]:
        """Return all fields of the trunk; those of a ViT's blocks only for a ViT."""
        fields = asdict(shape)
        if not shape.is_vit:
            fields = {name: value for name, value in fields.items() if name not in _OF_VIT}
        # Without a class token, the other fusions have nothing to read.
        return fields if shape.specials else fields | {"fusion": "visual"}


_OF_VIT = ("layers", "heads", "mlp_dim")  # a trunk with stages has them by stage
TRUNK = SoTTrunk()
