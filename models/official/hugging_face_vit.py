# SPDX-License-Identifier: Apache-2.0
"""ViT, DeiT and DINOv2 with the names of transformers, as classifiers or as embeddings.

Source: modeling_vit.py, modeling_deit.py, modeling_dinov2.py and modeling_dinov2_with_registers.py
        of transformers 4.57 and 5.23.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from saccade.core.errors import SaccadeError
from saccade.models.official.authors_images import AuthorsImages
from saccade.models.official.clip import layer
from saccade.models.official.conversion import Converted, Official, Reading, Row
from saccade.models.official.hugging_face import (
    LAYERS,
    Values,
    architecture_of,
    check_task,
    joined,
    labels_of,
    scaled,
)
from saccade.models.official.hugging_face_images import processor_images
from saccade.models.sot.config import SoTConfig
from saccade.models.sparo.config import SparoConfig

if TYPE_CHECKING:
    from torch import Tensor


class _ModelType(NamedTuple):
    """What distinguishes one model type."""

    usual: dict[str, Any]  # the defaults of its configuration that are read here
    layers: dict[str, str]  # of a block: our name, its name
    scales: dict[str, str]  # layers whose outputs are scaled: our name, name of the factors
    specials: tuple[str, ...]  # tokens before those of the patches
    resampled: bool  # whether positions are interpolated to the size of the images
    registers: str = ""  # tokens without positions, between the special ones and the patches


_USUAL: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
}
_DINO_LAYERS = {
    "norm_attention": "norm1",
    "attention.out": "attention.output.dense",
    "norm_mlp": "norm2",
    "widen": "mlp.fc1",
    "narrow": "mlp.fc2",
}
_GATED_LAYERS = {"widen": "mlp.weights_in", "narrow": "mlp.weights_out"}
_DINO_USUAL = {"layer_norm_eps": 1e-6, "patch_size": 14, "mlp_ratio": 4, "use_swiglu_ffn": False}
_DINO_SCALES = {"attention.out": "layer_scale1.lambda1", "narrow": "layer_scale2.lambda1"}
_KINDS = {
    "vit": _ModelType(_USUAL, LAYERS, {}, ("cls_token",), False),
    "deit": _ModelType(_USUAL, LAYERS, {}, ("cls_token", "distillation_token"), False),
    "dinov2": _ModelType(_USUAL | _DINO_USUAL, _DINO_LAYERS, _DINO_SCALES, ("cls_token",), True),
}
_KINDS["dinov2_with_registers"] = _KINDS["dinov2"]._replace(
    usual=_KINDS["dinov2"].usual | {"patch_size": 16, "num_register_tokens": 4},
    registers="register_tokens",
)
_CLASSIFIERS = (
    "ViTForImageClassification",
    "DeiTForImageClassification",
    "DeiTForImageClassificationWithTeacher",
    "Dinov2ForImageClassification",
    "Dinov2WithRegistersForImageClassification",
)
_EMBEDDINGS = ("ViTModel", "Dinov2Model", "Dinov2WithRegistersModel")
_UNUSED = {
    r"(.*\.)?embeddings\.mask_token": "the token of masked patches, used in pretraining only",
    r"(.*\.)?pooler\.dense\.(weight|bias)": "the pooler; the embedding is the state before it",
}


class _Place(NamedTuple):
    """Our names of a trunk's parts, in one family."""

    blocks: str
    patches: str
    norm: str
    first: str
    registers: str  # a separate tensor, or empty if they follow the class tokens
    position: str


_SOT = _Place(
    "trunk.blocks", "trunk.embed.project", "trunk.norm", "trunk.class_tokens", "", "trunk.position"
)
_SPARO = _Place(
    *("image.blocks", "image.patches", "image_pool.norm", "image.class_token", "image.registers"),
    "image.position",
)


def convert(official: Official) -> Converted:
    """Read a classifier as family 'sot', a model without classifier as images only of 'sparo'.

    Raises: SaccadeError if an option of its configuration is not supported.
    """
    config = official.config or {}
    name = architecture_of(official, (*_CLASSIFIERS, *_EMBEDDINGS))
    kind = _KINDS[config["model_type"]]
    values = Values(f"{official.path}: config.json", config, kind.usual)
    values.require("hidden_act", "gelu")
    values.require("qkv_bias", True, False)
    if kind.resampled:
        values.require("use_swiglu_ffn", False, True)
    return _Conversion(official, name, kind, values).converted()


class _Conversion:
    """The conversion of one model, after its configuration has been checked."""

    def __init__(self, official: Official, name: str, kind: _ModelType, values: Values) -> None:
        self.official, self.name, self.kind, self.values = official, name, kind, values
        self.reading = Reading(official.path, official.tensors)
        self.registers = values.count("num_register_tokens") if kind.registers else 0
        self.prefix = f"{values['model_type']}." if name in _CLASSIFIERS else ""
        self.gated = kind.resampled and bool(values["use_swiglu_ffn"])
        self.images: AuthorsImages = processor_images(official, values.count("num_channels"))
        self.notes: tuple[str, ...] = ()

    def converted(self) -> Converted:
        """Return the model with all tensors."""
        self._check_size()
        for pattern, reason in _UNUSED.items():
            self.reading.ignore(pattern, reason)
        if self.name in _CLASSIFIERS:
            return self._classifier()
        return self._embedding()

    def _check_size(self) -> None:
        wanted = self._input()
        if not self.kind.resampled and wanted != self.values.sides("image_size"):
            raise self.values.refused(
                "image_size", f"{list(wanted)}, the input of preprocessor_config.json"
            )

    def _input(self) -> tuple[int, int]:
        return self.images.preprocessing.height_px, self.images.preprocessing.width_px

    def _image_fields(self) -> dict[str, Any]:
        preprocessing = self.images.preprocessing
        height, width = self._input()
        return {
            "height_px": height,
            "width_px": width,
            "channels": preprocessing.channels,
            "mean": preprocessing.mean,
            "std": preprocessing.std,
            "patch_px": self.values.side("patch_size"),
            "registers": self.registers,
            "activation": "swiglu" if self.gated else "gelu",
        }

    def _hidden(self) -> int:
        if not self.kind.resampled:
            return self.values.count("intermediate_size")
        hidden = int(self.values.count("hidden_size") * self.values.number("mlp_ratio"))
        # With a gate, two thirds of it, rounded up to a multiple of eight.
        return (hidden * 2 // 3 + 7) // 8 * 8 if self.gated else hidden

    def _classifier(self) -> Converted:
        values = self.values
        check_task(values)
        both = self.name.endswith("WithTeacher")
        key = "cls_classifier.weight" if both else "classifier.weight"
        classes = self.reading.shape(key)[0]
        fields: dict[str, Any] = {"fusion": "class"}
        if self.kind.resampled:
            fields = {"fusion": "concat", "pooling": "gap"}
        config = SoTConfig(
            **self._image_fields(),
            **fields,
            distillation=len(self.kind.specials) == 2,
            dim=values.count("hidden_size"),
            layers=values.count("num_hidden_layers"),
            heads=values.count("num_attention_heads"),
            mlp_dim=self._hidden(),
            qkv_bias=values["qkv_bias"],
            layer_norm_epsilon=values.number("layer_norm_eps"),
            classes=classes,
        )
        self.reading.take(self._trunk(_SOT, config.layers))
        self.reading.take(self._head(both))
        official = replace(self.official, labels=labels_of(self.official, classes))
        return self.reading.converted(official, "sot", config, self.images, self.notes)

    def _embedding(self) -> Converted:
        import torch

        values = self.values
        width = values.count("hidden_size")
        config = SparoConfig(
            **self._image_fields(),
            patch_bias=True,
            pre_norm=False,
            image_width=width,
            image_layers=values.count("num_hidden_layers"),
            image_heads=values.count("num_attention_heads"),
            image_hidden=self._hidden(),
            eps=values.number("layer_norm_eps"),
            text=False,
            pooling="cls",
            embed_dim=width,
        )
        if not values["qkv_bias"]:
            raise values.refused("qkv_bias", "true for a model without classifier")
        self.reading.take(self._trunk(_SPARO, config.image_layers))
        # As wide as the file's own norm: a wrong hidden_size is one more row of the report.
        own = self.reading.shape("layernorm.weight")[0]
        self.reading.put("image_pool.project.weight", torch.eye(own))
        self.notes += ("no classifier: the embedding is the class token, brought to length 1",)
        return self.reading.converted(self.official, "sparo", config, self.images, self.notes)

    def _trunk(self, place: _Place, layers: int) -> Iterator[Row]:
        import torch

        theirs = f"{self.prefix}embeddings"
        tokens = tuple(f"{theirs}.{token}" for token in self.kind.specials)
        registers = f"{theirs}.{self.kind.registers}" if self.kind.registers else ""
        if place.registers:
            yield place.first, tokens[0], lambda x: x.flatten()
            if registers:
                yield place.registers, registers, lambda x: x.flatten(0, -2)
        else:
            tokens += (registers,) if registers else ()
            yield place.first, tokens, lambda *parts: torch.cat([x.flatten(0, -2) for x in parts])
        yield place.position, f"{theirs}.position_embeddings", self._positions
        yield from layer(place.patches, f"{theirs}.patch_embeddings.projection")
        for index in range(layers):
            ours, block = f"{place.blocks}.{index}", f"{self.prefix}encoder.layer.{index}"
            yield from joined(
                f"{ours}.attention.qkv",
                f"{block}.attention.attention",
                ("query", "key", "value"),
                bias=self.values["qkv_bias"],
            )
            for mine, other in self._layers().items():
                names = f"{ours}.{mine}", f"{block}.{other}"
                factor = self.kind.scales.get(mine)
                yield from scaled(*names, f"{block}.{factor}") if factor else layer(*names)
        yield from layer(place.norm, f"{self.prefix}layernorm")

    def _layers(self) -> dict[str, str]:
        return self.kind.layers | (_GATED_LAYERS if self.gated else {})

    def _positions(self, table: "Tensor") -> "Tensor":
        """Return one position per token; the patches' grid is resampled as transformers does."""
        import torch

        specials, side = len(self.kind.specials), self.values.side("patch_size")
        height, width = self._input()
        grid = height // side, width // side
        own = tuple(px // side for px in self.values.sides("image_size"))
        table = table.flatten(0, -2)
        first, table = table[:specials].float(), table[specials:]
        first = torch.cat((first, first.new_zeros(self.registers, first.shape[1])))
        count = len(table)
        if not self.kind.resampled or grid == own:
            return torch.cat((first, table.float()))
        if count != own[0] * own[1] or own[0] != own[1]:
            raise SaccadeError(
                f"{self.official.path}: position_embeddings are for {count} patches, expected "
                f"{own[0]} x {own[1]} of a square image_size. Save the model again."
            )
        self.notes += (
            f"positions of {own[0]} x {own[1]} patches interpolated to {grid[0]} x {grid[1]}",
        )
        patches = table.float().reshape(1, *own, -1).permute(0, 3, 1, 2)
        # As in the models with registers, and not in those without.
        smooth = bool(self.kind.registers)
        resampled = torch.nn.functional.interpolate(
            patches, size=grid, mode="bicubic", align_corners=False, antialias=smooth
        )
        return torch.cat((first, resampled[0].flatten(1).T))

    def _head(self, both: bool) -> Iterator[Row]:
        import torch

        if both:
            names = ("cls_classifier", "distillation_classifier")
            weights = tuple(f"{name}.weight" for name in names)
            yield "head.class_fc.weight", weights, lambda a, b: torch.cat((a, b), 1) / 2
            biases = tuple(f"{name}.bias" for name in names)
            yield "head.class_fc.bias", biases, lambda a, b: (a + b) / 2
            return
        if len(self.kind.specials) == 2:
            self.notes += ("the classifier reads the class token, not the distillation token",)
            wide = "head.class_fc.weight", "classifier.weight"
            yield *wide, lambda x: torch.cat((x, torch.zeros_like(x)), 1)
            yield "head.class_fc.bias", "classifier.bias", lambda x: x
            return
        ours = "head.word_fc" if self.kind.resampled else "head.class_fc"
        yield from layer(ours, "classifier")
