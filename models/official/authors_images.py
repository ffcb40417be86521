# SPDX-License-Identifier: Apache-2.0
"""The preprocessing of converted models: as the source's authors do it when they evaluate, or as
the published model's own JSON declares (timm's pretrained_cfg, OpenCLIP's preprocess_cfg).

Source: OpenCLIP's transform.py (v2.20, SPARO's fork); DINO's eval_knn.py; DeiT's datasets.py;
        Swin's data/build.py and its 384 px configurations; timm's transforms_factory.py and the
        `_cfg` of its vision_transformer; torchvision's weights; SoT's main.py with timm 0.3.4;
        NAC's deit/datasets.py at 41ae372; invariant_slot_attention/lib/preprocessing.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count, Range
from saccade.models.official.conversion import Conversion, Original
from saccade.models.official.json_files import declared
from saccade.models.preprocessing import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Interpolation,
    Preprocessing,
    ResizeMode,
)

if TYPE_CHECKING:
    from saccade.models.config_values import ImageFields


class AuthorsImages(NamedTuple):
    """One source's preprocessing, and where it comes from."""

    preprocessing: Preprocessing
    origin: str


class _Rule(NamedTuple):
    """How a source's authors resize an image before the crop to the model's size."""

    origin: str
    of_224: int = 224  # the size to cover for a model of 224 pixels; others in proportion
    fields: Mapping[str, Any] = {}  # further fields of the preprocessing


_BILINEAR = {"interpolation": "bilinear"}
_SQUASHED = {"resize_mode": "squash"}
# OpenCLIP's transform resizes the image as Pillow opened it, and converts to RGB at the end.
_AS_OPENED = {"conversion": "after"}
_RULES = {
    "open-clip": _Rule("OpenCLIP's transform for evaluation", 224, _AS_OPENED),
    "sparo-clip": _Rule("SPARO's OpenCLIP 2.20, its transform for evaluation", 224, _AS_OPENED),
    "sparo-dino": _Rule("DINO's eval_knn.py", 256),
    "resnet": _Rule("torchvision's ResNet weights IMAGENET1K_V1", 256, _BILINEAR),
    "sot": _Rule("SoT's main.py, crop_pct 0.875 of timm 0.3.4", 256),
    "vit": _Rule("timm's vision_transformer, crop_pct"),
    "deit": _Rule("DeiT's datasets.py, eval_crop_ratio 0.875", 256),
    "swin": _Rule("Swin's data/build.py", 256),
    "torchvision vit": _Rule("torchvision's ViT weights IMAGENET1K_V1", 256, _BILINEAR),
    "torchvision swin": _Rule("torchvision's Swin weights IMAGENET1K_V1", 232),
    "nac": _Rule("NAC's deit/datasets.py", 256),
    "invariant-slot-attention": _Rule(
        "resize_small of lib/preprocessing.py, which is tf.image.resize; the cut of a data set "
        'before it, as CLEVR\'s, by --preprocessing {"cut": [29, 64, 192, 192]}',
        224,
        _BILINEAR | {"antialias": False},
    ),
}
_Sides = tuple[int, int]  # height and width of the model
# torchvision's sizes for models of 224 pixels that differ: layers and patch, width and layers.
_TORCHVISION: dict[str, dict[tuple[int, ...], int]] = {"torchvision vit": {(24, 16): 242}}
_TORCHVISION |= {"torchvision swin": {(96, 24): 246, (128, 24): 238}}


def authors_images(source: str, config: "ImageFields", **sizes: int) -> AuthorsImages:
    """Return the preprocessing of a model of this source; `config` has its size, mean and std.

    `sizes` are further sizes that decide: torchvision's preprocessing depends on the model.
    Raises: KeyError if the source takes no images.
    """
    sides = (config.height_px, config.width_px)
    rule = _rule(source, sides, tuple(sizes.values()))
    resize_px = tuple(int(rule.of_224 / 224 * side) for side in sides)
    # The authors open files with Pillow's convert("RGB"), which drops alpha.
    usual: dict[str, Any] = {"interpolation": "bicubic", "alpha": "dropped"}
    usual |= {"resize_mode": "shortest", "resize_px": resize_px}
    return AuthorsImages(Preprocessing.of(config, **(usual | dict(rule.fields))), rule.origin)


def _rule(source: str, sides: _Sides, sizes: tuple[int, ...]) -> _Rule:
    """Return the rule of a source for a model of this size."""
    rule, large = _RULES[source], max(sides) >= 384
    if source == "vit":
        share = 1.0 if large else 0.9
        return _Rule(f"{rule.origin} {share}", fields=timm_crop(sides, share))
    if source == "torchvision vit" and large:
        return _Rule("torchvision's ViT weights IMAGENET1K_SWAG_E2E_V1")
    if source == "swin" and sides == (384, 384):
        origin = f"{rule.origin}, TEST.CROP false as in its 384 px configurations"
        return _Rule(origin, fields=_SQUASHED)
    if source == "sparo-clip" and sides[0] != sides[1]:
        # As in the release that SPARO forked.
        return rule._replace(fields={**rule.fields, **_SQUASHED})
    return rule._replace(of_224=_TORCHVISION.get(source, {}).get(sizes, rule.of_224))


def timm_crop(sides: _Sides, share: float, interpolation: str = "bicubic") -> dict[str, Any]:
    """Return the fields of timm's crop_mode 'center', which keeps this share of each side."""
    resize_px = tuple(math.floor(side / share) for side in sides)
    # timm's transform does not pass its filter on if the sides differ.
    way = interpolation if len(set(resize_px)) == 1 else "bilinear"
    return {"resize_mode": "shortest", "resize_px": resize_px, "interpolation": way}


@dataclass(frozen=True)
class PretrainedCfg:
    """timm's pretrained_cfg; null, 0 and an empty list stand for its defaults."""

    input_size: tuple[Count, Count, Count] | None = None  # channels, height, width
    crop_pct: Annotated[float, Range(0, 1)] | None = None
    crop_mode: Literal["center", "squash", "border"] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: Interpolation | None = None

    def changed(self, usual: Preprocessing) -> dict[str, Any]:
        """Return the fields, as resolve_data_config and create_transform do for evaluation."""
        size = self.input_size or (usual.channels, usual.height_px, usual.width_px)
        way, mode = self.interpolation or "bicubic", self.crop_mode or "center"
        crop = timm_crop(size[1:], self.crop_pct or 0.875, way)
        if mode != "center":
            resize_mode = {"squash": "squash", "border": "longest"}[mode]
            crop |= {"resize_mode": resize_mode, "interpolation": way}
        mean = _levels(self.mean or IMAGENET_MEAN, size[0])
        fill = [round(255 * value) for value in mean] if mode == "border" else [0] * size[0]
        levels = {"mean": mean, "std": _levels(self.std or IMAGENET_STD, size[0])}
        converted = {"antialias": True, "conversion": "before", "fill": fill}
        return _sizes(size) | levels | crop | converted


@dataclass(frozen=True)
class PreprocessCfg:
    """OpenCLIP's preprocess_cfg."""

    size: tuple[Count, Count] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize_mode: ResizeMode | None = None
    interpolation: Interpolation | None = None
    fill_color: tuple[int, ...] = (0,)

    def changed(self, usual: Preprocessing) -> dict[str, Any]:
        """Return the fields, as PreprocessCfg and image_transform do for evaluation."""
        size = self.size or (usual.height_px, usual.width_px)
        return _sizes((usual.channels, *size)) | {
            "mean": _levels(self.mean or usual.mean, usual.channels),
            "std": _levels(self.std or usual.std, usual.channels),
            "resize_mode": self.resize_mode or "shortest",
            "resize_px": list(size),
            "interpolation": self.interpolation or "bicubic",
            "fill": _levels(self.fill_color, usual.channels),
        }


def _sizes(size: tuple[int, ...]) -> dict[str, Any]:
    return dict(zip(("channels", "height_px", "width_px"), size, strict=True))


def _levels(levels: tuple[Any, ...], channels: int) -> list[Any]:
    return [*levels] * channels if len(levels) == 1 else [*levels]


def published(config: Mapping[str, Any] | None) -> tuple[str, PretrainedCfg | PreprocessCfg] | None:
    """Return the name and the values of the images' part of timm's or OpenCLIP's JSON, if any.

    Raises: SaccadeError if they are not supported.
    """
    given = dict(config or {})
    # Before timm 0.8 the fields were at the top level of the JSON.
    if given.get("pretrained_cfg") is None and {"architecture", "mean"} <= given.keys():
        given["pretrained_cfg"] = config
    for name, kind in (("pretrained_cfg", PretrainedCfg), ("preprocess_cfg", PreprocessCfg)):
        content = given.get(name)
        if content is not None and not isinstance(content, Mapping):
            raise SaccadeError(f"{name} is {content!r:.60}, expected an object. Correct the JSON.")
        if content is not None:
            return name, declared(kind, content, name)  # type: ignore[return-value]
    return None


def with_published(converted: Conversion, official: Original) -> Conversion:
    """Return the conversion with the preprocessing of --config, or of the JSON next to the file.

    Raises: SaccadeError if it is not supported, or its size is not that of the weights.
    """
    usual = converted.preprocessing
    if usual is None or (read := published(official.config)) is None:
        return converted
    name, values = read
    preprocessing = Preprocessing.from_dict(usual.to_dict() | values.changed(usual))
    return with_images(converted, preprocessing, name, f"its {name}")


def with_images(
    converted: Conversion, preprocessing: Preprocessing, where: str, images_from: str
) -> Conversion:
    """Return the conversion with this preprocessing; the model applies mean and std itself.

    Raises: SaccadeError if its size is not that of the weights.
    """
    usual = converted.preprocessing
    assert usual is not None
    for name in ("height_px", "width_px", "channels"):
        current, wanted = getattr(preprocessing, name), getattr(usual, name)
        if current != wanted:
            raise SaccadeError(
                f"{where}: {name} is {current}, but the weights are for {wanted}. Leave it out of "
                "the JSON, or pass the weights that belong to the JSON."
            )
    own = {field.name for field in fields(converted.config)} & {"mean", "std"}
    changes = {name: getattr(preprocessing, name) for name in own}
    return replace(
        converted,
        preprocessing=preprocessing,
        images_from=images_from,
        config=replace(converted.config, **changes),
        exact=None if converted.exact is None else replace(converted.exact, **changes),
    )
