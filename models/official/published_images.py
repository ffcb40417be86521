# SPDX-License-Identifier: Apache-2.0
"""What a published model's own JSON says of its images: timm's pretrained_cfg, OpenCLIP's
preprocess_cfg. It wins over what the source's authors usually do.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from saccade.errors import SaccadeError
from saccade.models.official.authors_images import timm_crop
from saccade.models.official.conversion import Converted, Official
from saccade.models.preprocessing import CHOICES, Preprocessing

_TIMM_MODES = {"center": "shortest", "squash": "squash", "border": "longest"}


def with_published(converted: Converted, official: Official) -> Converted:
    """The conversion with the images that --config, or the JSON beside the file, asks for.

    Raises: SaccadeError if it says what is not known here, or another size than the weights.
    """
    usual, config = converted.preprocessing, official.config or {}
    if usual is None:
        return converted
    for name, read in (("pretrained_cfg", _timm), ("preprocess_cfg", _open_clip)):
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
    """The conversion with this preprocessing; the model applies mean and std itself.

    Raises: SaccadeError if its size is not that of the weights.
    """
    usual = converted.preprocessing
    assert usual is not None
    for name in ("height_px", "width_px", "channels"):
        found, wanted = getattr(preprocessing, name), getattr(usual, name)
        if found != wanted:
            raise SaccadeError(
                f"{where}: {name} is {found}, but the weights are for {wanted}. "
                "Leave it out of the JSON, or pass the weights that it belongs to."
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
    # Before timm 0.8 the fields lay at the top of the JSON.
    if name == "pretrained_cfg" and given is None and {"architecture", "mean"} <= set(config):
        given = config
    if given is not None and not isinstance(given, Mapping):
        raise SaccadeError(f"{name} is {given!r:.60}, expected an object. Correct the JSON.")
    return given


def _timm(given: Mapping[str, Any], usual: Preprocessing) -> dict[str, Any]:
    """As timm's resolve_data_config and create_transform read it for evaluation."""
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


def _open_clip(given: Mapping[str, Any], usual: Preprocessing) -> dict[str, Any]:
    """As OpenCLIP's PreprocessCfg and image_transform read it for evaluation."""
    side = given.get("size")
    size = [usual.channels, *(side if isinstance(side, list) else [side, side])] if side else None
    sizes = _sizes("preprocess_cfg", size, usual)
    modes = CHOICES["resize_mode"]
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
    return _one_of(where, given, "interpolation", "bicubic", CHOICES["interpolation"])


def _one_of(
    where: str, given: Mapping[str, Any], name: str, usual: str, known: tuple[str, ...]
) -> str:
    found = given.get(name) or usual
    if found not in known:
        raise SaccadeError(
            f"{where}: {name} is {found!r:.40}, expected {' or '.join(known)}. Correct the JSON, "
            "or say the fields with --preprocessing."
        )
    return str(found)


def _levels(
    given: Mapping[str, Any], name: str, usual: tuple[float, ...], channels: int
) -> list[float]:
    found = given.get(name) or usual
    values = list(found) if isinstance(found, list | tuple) else [found]
    return values * channels if len(values) == 1 else values
