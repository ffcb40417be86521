# SPDX-License-Identifier: Apache-2.0
"""The preprocessing of converted models: as the source's authors do it when they evaluate, or as
the published model's own JSON declares (timm's pretrained_cfg, OpenCLIP's preprocess_cfg).

Source: OpenCLIP's transform.py (v2.20, SPARO's fork); DINO's eval_knn.py; DeiT's datasets.py;
        Swin's data/build.py and its 384 px configurations; timm's transforms_factory.py and the
        `_cfg` of its vision_transformer; torchvision's weights; SoT's main.py with timm 0.3.4;
        NAC's deit/datasets.py at 41ae372; invariant_slot_attention/lib/preprocessing.py.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from saccade.core.errors import SaccadeError
from saccade.models.official.conversion import Converted, Official
from saccade.models.preprocessing import Interpolation, Preprocessing, ResizeMode

if TYPE_CHECKING:
    from saccade.models.layers.pixels import ImageFields


class AuthorsImages(NamedTuple):
    """One source's preprocessing, and where it comes from."""

    preprocessing: Preprocessing
    origin: str


def authors_images(source: str, config: "ImageFields", **sizes: int) -> AuthorsImages:
    """Return the preprocessing of a model of this source; `config` has its size, mean and std.

    `sizes` are further sizes that decide: torchvision's preprocessing depends on the model.
    Raises: KeyError if the source takes no images.
    """
    rule, origin = _RULES[source]((config.height_px, config.width_px), **sizes)
    # The authors open files with Pillow's convert("RGB"), which drops alpha.
    fields: dict[str, Any] = {"interpolation": "bicubic", "alpha": "dropped"} | rule
    return AuthorsImages(Preprocessing.of(config, **fields), origin)


_Sides = tuple[int, int]  # height and width of the model
_Rule = tuple[dict[str, Any], str]


def _covering(sides: _Sides, of_224: int = 224) -> dict[str, Any]:
    """Return the size to cover: the model's, times `of_224` / 224."""
    return {"resize_mode": "shortest", "resize_px": tuple(int(of_224 / 224 * x) for x in sides)}


def _open_clip(sides: _Sides) -> _Rule:
    # Its transform resizes the image as Pillow opened it, and converts to RGB at the end.
    return {"conversion": "after"} | _covering(sides), "OpenCLIP's transform for evaluation"


def _sparo_clip(sides: _Sides) -> _Rule:
    fields, _ = _open_clip(sides)
    if sides[0] != sides[1]:
        fields["resize_mode"] = "squash"  # as in the release that SPARO forked
    return fields, "SPARO's OpenCLIP 2.20, its transform for evaluation"


def _of_256(origin: str) -> Callable[[_Sides], _Rule]:
    return lambda sides: (_covering(sides, 256), origin)


def _swin(sides: _Sides) -> _Rule:
    if sides == (384, 384):
        squashed = {"resize_mode": "squash", "resize_px": sides}
        return squashed, "Swin's data/build.py, TEST.CROP false as in its 384 px configurations"
    return _covering(sides, 256), "Swin's data/build.py"


def _vit(sides: _Sides) -> _Rule:
    share = 0.9 if max(sides) < 384 else 1.0
    return timm_crop(sides, share), f"timm's vision_transformer, crop_pct {share}"


def timm_crop(sides: _Sides, share: float, interpolation: str = "bicubic") -> dict[str, Any]:
    """Return the fields of timm's crop_mode 'center', which keeps this share of each side."""
    resize_px = tuple(math.floor(side / share) for side in sides)
    # timm's transform does not pass its filter on if the sides differ.
    way = interpolation if len(set(resize_px)) == 1 else "bilinear"
    return {"resize_mode": "shortest", "resize_px": resize_px, "interpolation": way}


def _torchvision_vit(sides: _Sides, layers: int = 12, patch_px: int = 16) -> _Rule:
    if max(sides) >= 384:
        return _covering(sides), "torchvision's ViT weights IMAGENET1K_SWAG_E2E_V1"
    of_224 = 242 if (layers, patch_px) == (24, 16) else 256
    fields = {"interpolation": "bilinear"} | _covering(sides, of_224)
    return fields, "torchvision's ViT weights IMAGENET1K_V1"


def _torchvision_swin(sides: _Sides, dim: int = 96, layers: int = 12) -> _Rule:
    of_224 = {(96, 24): 246, (128, 24): 238}.get((dim, layers), 232)
    return _covering(sides, of_224), "torchvision's Swin weights IMAGENET1K_V1"


def _resnet(sides: _Sides) -> _Rule:
    fields = {"interpolation": "bilinear"} | _covering(sides, 256)
    return fields, "torchvision's ResNet weights IMAGENET1K_V1"


def _slots(sides: _Sides) -> _Rule:
    fields = {"interpolation": "bilinear", "antialias": False} | _covering(sides)
    origin = "resize_small of lib/preprocessing.py, which is tf.image.resize; the cut of a data set"
    return (
        fields,
        origin + ' before it, as CLEVR\'s, by --preprocessing {"cut": [29, 64, 192, 192]}',
    )


_RULES: dict[str, Callable[..., _Rule]] = {
    "open-clip": _open_clip,
    "sparo-clip": _sparo_clip,
    "sparo-dino": _of_256("DINO's eval_knn.py"),
    "resnet": _resnet,
    "sot": _of_256("SoT's main.py, crop_pct 0.875 of timm 0.3.4"),
    "vit": _vit,
    "deit": _of_256("DeiT's datasets.py, eval_crop_ratio 0.875"),
    "swin": _swin,
    "torchvision vit": _torchvision_vit,
    "torchvision swin": _torchvision_swin,
    "nac": _of_256("NAC's deit/datasets.py"),
    "invariant-slot-attention": _slots,
}


_TIMM_MODES = {"center": "shortest", "squash": "squash", "border": "longest"}


def with_published(converted: Converted, official: Official) -> Converted:
    """Return the conversion with the preprocessing of --config, or of the JSON next to the file.

    Raises: SaccadeError if it is not supported, or its size is not that of the weights.
    """
    usual, config = converted.preprocessing, official.config or {}
    if usual is None:
        return converted
    for name, read in (("pretrained_cfg", _pretrained_cfg), ("preprocess_cfg", _preprocess_cfg)):
        given = _of(config, name)
        if given is None:
            continue
        changed = read(given, usual)
        values = usual.to_dict() | changed
        return with_images(converted, Preprocessing.from_dict(values), name, f"its {name}")
    return converted


def with_images(
    converted: Converted, preprocessing: Preprocessing, where: str, images_from: str
) -> Converted:
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


def _of(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    given = config.get(name)
    # Before timm 0.8 the fields were at the top level of the JSON.
    if name == "pretrained_cfg" and given is None and {"architecture", "mean"} <= set(config):
        given = config
    if given is not None and not isinstance(given, Mapping):
        raise SaccadeError(f"{name} is {given!r:.60}, expected an object. Correct the JSON.")
    return given


def _pretrained_cfg(given: Mapping[str, Any], usual: Preprocessing) -> dict[str, Any]:
    """Read it as timm's resolve_data_config and create_transform do for evaluation."""
    size = _sizes("pretrained_cfg", given.get("input_size"), usual)
    share = given.get("crop_pct") or 0.875
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise SaccadeError(
            f"pretrained_cfg: crop_pct is {share!r:.40}, expected a number above 0 and up to 1. "
            "Correct the JSON."
        )
    mode = _one_of("pretrained_cfg", given, "crop_mode", "center", tuple(_TIMM_MODES))
    crop = timm_crop((size[1], size[2]), share, _filter("pretrained_cfg", given))
    if mode != "center":
        crop |= {
            "resize_mode": _TIMM_MODES[mode],
            "interpolation": _filter("pretrained_cfg", given),
        }
    mean = _levels(given, "mean", (0.485, 0.456, 0.406), size[0])
    return {
        **dict(zip(("channels", "height_px", "width_px"), size, strict=True)),
        "mean": mean,
        "std": _levels(given, "std", (0.229, 0.224, 0.225), size[0]),
        **crop,
        "antialias": True,
        "conversion": "before",
        "fill": [round(255 * value) for value in mean] if mode == "border" else [0] * size[0],
    }


def _preprocess_cfg(given: Mapping[str, Any], usual: Preprocessing) -> dict[str, Any]:
    """Read it as OpenCLIP's PreprocessCfg and image_transform do for evaluation."""
    side = given.get("size")
    size = [usual.channels, *(side if isinstance(side, list) else [side, side])] if side else None
    sizes = _sizes("preprocess_cfg", size, usual)
    modes = get_args(ResizeMode)
    fill = given.get("fill_color", 0)
    return {
        **dict(zip(("channels", "height_px", "width_px"), sizes, strict=True)),
        "mean": _levels(given, "mean", usual.mean, usual.channels),
        "std": _levels(given, "std", usual.std, usual.channels),
        "resize_mode": _one_of("preprocess_cfg", given, "resize_mode", "shortest", modes),
        "resize_px": sizes[1:],
        "interpolation": _filter("preprocess_cfg", given),
        "fill": fill if isinstance(fill, list) else [fill] * usual.channels,
    }


def _sizes(where: str, given: Any, usual: Preprocessing) -> list[int]:
    if given is None:
        return [usual.channels, usual.height_px, usual.width_px]
    whole = isinstance(given, list) and len(given) == 3
    if not whole or not all(type(side) is int and side > 0 for side in given):
        raise SaccadeError(
            f"{where}: the size is {given!r:.60}, expected channels, height and width. "
            "Correct the JSON."
        )
    return list(given)


def _filter(where: str, given: Mapping[str, Any]) -> str:
    return _one_of(where, given, "interpolation", "bicubic", get_args(Interpolation))


def _one_of(
    where: str, given: Mapping[str, Any], name: str, usual: str, known: tuple[str, ...]
) -> str:
    value = given.get(name) or usual
    if value not in known:
        raise SaccadeError(
            f"{where}: {name} is {value!r:.40}, expected {' or '.join(known)}. Correct the JSON, "
            "or pass the fields with --preprocessing."
        )
    return str(value)


def _levels(
    given: Mapping[str, Any], name: str, usual: tuple[float, ...], channels: int
) -> list[float]:
    levels = given.get(name) or usual
    values = list(levels) if isinstance(levels, list | tuple) else [levels]
    return values * channels if len(values) == 1 else values
