# SPDX-License-Identifier: Apache-2.0
"""ViT, DeiT and DINOv2 with the names of transformers, as classifiers or as embeddings.

Source: modeling_vit.py, modeling_deit.py, modeling_dinov2.py and modeling_dinov2_with_registers.py
        of transformers 4.57 and 5.23.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count
from saccade.models.official.conversion import Conversion, Original, Reading
from saccade.models.official.json_files import declared, refused
from saccade.models.official.sources.hugging_face import (
    LAYERS,
    QKV,
    Epsilon,
    TransformerJson,
    architecture_of,
    images_of,
    labels_of,
)
from saccade.models.official.sources.timm import embedding
from saccade.models.official.sources.vit import mean_bias, mean_weight
from saccade.models.official.tables import Row, Rows, joined, rows_of, scaled, stacked_rows
from saccade.models.resolution import TokenGrid, resampled
from saccade.models.sot.config import SoTConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TransformersViT(TransformerJson):
    """The configuration of a ViT or DeiT."""

    hidden_act: Literal["gelu"] = "gelu"
    layer_norm_eps: Epsilon = 1e-12
    qkv_bias: bool = True
    registers = 0
    use_swiglu_ffn = False


@dataclass(frozen=True)
class DINOv2Json(TransformersViT):
    """The configuration of a DINOv2."""

    layer_norm_eps: Epsilon = 1e-6
    patch_size: tuple[Count, Count] = (14, 14)
    mlp_ratio: Epsilon = 4.0
    use_swiglu_ffn: bool = False

    @property
    def hidden(self) -> int:
        """Hidden width of the MLPs; with a gate, two thirds, rounded up to a multiple of eight."""
        hidden = int(self.hidden_size * self.mlp_ratio)
        return (hidden * 2 // 3 + 7) // 8 * 8 if self.use_swiglu_ffn else hidden


@dataclass(frozen=True)
class RegistersJson(DINOv2Json):
    """The configuration of a DINOv2 with registers."""

    patch_size: tuple[Count, Count] = (16, 16)
    num_register_tokens: Count = 4

    @property
    def registers(self) -> int:  # type: ignore[override]
        """Tokens without positions, between the class token and the patches."""
        return self.num_register_tokens


_KINDS: dict[str, type[TransformersViT]] = {
    "vit": TransformersViT,
    "deit": TransformersViT,
    "dinov2": DINOv2Json,
    "dinov2_with_registers": RegistersJson,
}
_CLASSIFIERS = (
    "ViTForImageClassification",
    "DeiTForImageClassification",
    "DeiTForImageClassificationWithTeacher",
    "Dinov2ForImageClassification",
    "Dinov2WithRegistersForImageClassification",
)
_EMBEDDINGS = ("ViTModel", "Dinov2Model", "Dinov2WithRegistersModel")
_DINO_LAYERS = {
    "norm_attention.*": "norm1.*",
    "norm_mlp.*": "norm2.*",
    "widen.*": "mlp.fc1.*",
    "narrow.*": "mlp.fc2.*",
    "attention.out.*": "attention.output.dense.*",
}
_GATED_LAYERS = {"widen.*": "mlp.weights_in.*", "narrow.*": "mlp.weights_out.*"}
_DINO_SCALES = {"attention.out.*": "layer_scale1.lambda1", "narrow.*": "layer_scale2.lambda1"}
_UNUSED = {
    r"(.*\.)?embeddings\.mask_token": "the token of masked patches, used in pretraining only",
    r"(.*\.)?pooler\.dense\.(weight|bias)": "the pooler; the embedding is the state before it",
}


def convert(official: Original) -> Conversion:
    """Read a classifier as family 'sot', a model without classifier as images only of 'sparo'.

    Raises: SaccadeError if an option of its configuration is not supported.
    """
    name = architecture_of(official, (*_CLASSIFIERS, *_EMBEDDINGS))
    where = f"{official.path}: config.json"
    json = declared(_KINDS[(official.config or {})["model_type"]], official.config, where)
    dino, distilled = isinstance(json, DINOv2Json), json.model_type == "deit"
    images, fields = images_of(official, json, resampled=dino)
    fields |= json.sizes | {
        "distillation": distilled,
        "registers": json.registers,
        "activation": "swiglu" if json.use_swiglu_ffn else "gelu",
        "qkv_bias": json.qkv_bias,
        **({"fusion": "concat", "pooling": "gap"} if dino else {"fusion": "class"}),
    }
    reading = Reading(official.path, official.tensors)
    for pattern, reason in _UNUSED.items():
        reading.ignore(pattern, reason)
    positions = _Positions(official.path, json, fields, 2 if distilled else 1)
    if name not in _CLASSIFIERS:
        if not json.qkv_bias:
            raise refused(f"{where}: qkv_bias", False, "true for a model without classifier")
        shape = SoTConfig(**fields).shape
        rows = _trunk("", json, positions)
        return embedding(official, reading, shape, rows, images, "cls", positions.notes)
    both = name.endswith("WithTeacher")
    key = "cls_classifier.weight" if both else "classifier.weight"
    config = SoTConfig(**fields, classes=reading.shape(key)[0])
    notes = _take_head(reading, json, both)
    reading.take(_trunk(f"{json.model_type}.", json, positions))
    official = replace(official, labels=labels_of(official, config.classes))
    return reading.converted(official, "sot", config, images, (*notes, *positions.notes))


def _trunk(prefix: str, json: TransformersViT, positions: "_Positions") -> Rows:
    """Return the rows of everything before the classifier."""
    theirs, block = f"{prefix}embeddings.", f"{prefix}encoder.layer.#."
    tokens = [f"{theirs}cls_token"]
    tokens += [f"{theirs}distillation_token"] if json.model_type == "deit" else []
    tokens += [f"{theirs}register_tokens"] if json.registers else []
    layers, scales = LAYERS, {}
    if isinstance(json, DINOv2Json):
        layers = _DINO_LAYERS | (_GATED_LAYERS if json.use_swiglu_ffn else {})
        scales = {ours: (block + layers[ours], block + x) for ours, x in _DINO_SCALES.items()}
    queries = tuple(f"{block}attention.attention.{name}.*" for name in QKV)
    return (
        Row("trunk.class_tokens", tuple(tokens), stacked_rows),
        Row("trunk.position", f"{theirs}position_embeddings", positions),
        Row("trunk.embed.project.*", f"{theirs}patch_embeddings.projection.*"),
        Row("trunk.blocks.#.attention.qkv.*", queries, joined),
        *(Row(f"trunk.blocks.#.{ours}", keys, _scaled) for ours, keys in scales.items()),
        *rows_of("trunk.blocks.#.", block, {k: v for k, v in layers.items() if k not in scales}),
        Row("trunk.norm.*", f"{prefix}layernorm.*"),
    )


def _scaled(x: "Tensor", factors: "Tensor") -> "Tensor":
    """Multiply the outputs of a layer; of a file in half precision, they are not rounded again."""
    return scaled(x.double(), factors)


class _Positions:
    """Makes one position per token; the patches' grid is resampled as transformers does."""

    def __init__(
        self, path: str, json: TransformersViT, fields: dict[str, Any], specials: int
    ) -> None:
        self.path, self.json, self.specials = path, json, specials
        side = json.patch_size[0]
        self.grid = fields["height_px"] // side, fields["width_px"] // side
        self.own = json.image_size[0] // side, json.image_size[1] // side
        self.resampled = isinstance(json, DINOv2Json) and self.grid != self.own
        own, wanted = (f"{rows} x {columns}" for rows, columns in (self.own, self.grid))
        note = f"positions of {own} patches interpolated to {wanted}"
        self.notes = (note,) if self.resampled else ()

    def __call__(self, table: "Tensor") -> "Tensor":
        import torch

        table, registers = table.flatten(0, -2).float(), self.json.registers
        first, patches = table[: self.specials], table[self.specials :]
        first = torch.cat((first, first.new_zeros(registers, first.shape[1])))
        if not self.resampled:
            return torch.cat((first, patches))
        rows, columns = self.own
        if len(patches) != rows * columns or rows != columns:
            raise SaccadeError(
                f"{self.path}: position_embeddings are for {len(patches)} patches, expected "
                f"{rows} x {columns} of a square image_size. Save the model again."
            )
        grids = TokenGrid(rows, columns), TokenGrid(*self.grid, antialias=bool(registers))
        return resampled(torch.cat((first, patches)), *grids)


def _take_head(reading: Reading, json: TransformersViT, both: bool) -> tuple[str, ...]:
    """Take the classifier, and return notes on it; `both`: it is the mean of two."""
    if both:
        keys = {n: tuple(f"{c}_classifier.{n}" for c in ("cls", "distillation")) for n in _LEAVES}
        reading.take((Row("head.class_fc.weight", keys["weight"], mean_weight),))
        reading.take((Row("head.class_fc.bias", keys["bias"], mean_bias),))
    elif json.model_type == "deit":
        reading.take((Row("head.class_fc.weight", "classifier.weight", _beside_zeros),))
        reading.take((Row("head.class_fc.bias", "classifier.bias"),))
        return ("the classifier reads the class token, not the distillation token",)
    else:
        ours = "head.word_fc.*" if isinstance(json, DINOv2Json) else "head.class_fc.*"
        reading.take((Row(ours, "classifier.*"),))
    return ()


_LEAVES = ("weight", "bias")


def _beside_zeros(weight: "Tensor") -> "Tensor":
    import torch

    return torch.cat((weight, torch.zeros_like(weight)), 1)
