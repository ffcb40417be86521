# SPDX-License-Identifier: Apache-2.0
"""What each source's authors do to an image before it meets the model, where they evaluate it.

Source: OpenCLIP's transform.py (v2.20, SPARO's fork); DINO's eval_knn.py; DeiT's datasets.py;
        Swin's data/build.py and its 384 px configurations; timm's transforms_factory.py and the
        `_cfg` of its vision_transformer; torchvision's weights; SoT's main.py with timm 0.3.4;
        NAC's deit/datasets.py at 41ae372; invariant_slot_attention/lib/preprocessing.py.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from saccade.models.preprocessing import Preprocessing

if TYPE_CHECKING:
    from saccade.models.layers.pixels import Pictured


class AuthorsImages(NamedTuple):
    """One source's preprocessing, and what it is taken from."""

    preprocessing: Preprocessing
    origin: str


def authors_images(source: str, config: "Pictured", **sizes: int) -> AuthorsImages:
    """The preprocessing of a model of this source, whose size, mean and std its `config` has.

    `sizes` are what else decides: torchvision's depends on the model.
    Raises: KeyError for a source that takes no images.
    """
    rule, origin = _RULES[source]((config.height_px, config.width_px), **sizes)
    # Their files are opened by Pillow's convert("RGB"), which drops alpha.
    fields: dict[str, Any] = {"interpolation": "bicubic", "alpha": "dropped"} | rule
    return AuthorsImages(Preprocessing.of(config, **fields), origin)


_Sides = tuple[int, int]  # height and width of the model
_Rule = tuple[dict[str, Any], str]


def _covering(sides: _Sides, of_224: int = 224) -> dict[str, Any]:
    """The size to cover, as many times the model's as `of_224` pixels are of 224."""
    return {"resize_mode": "shortest", "resize_px": tuple(int(of_224 / 224 * x) for x in sides)}


def _open_clip(sides: _Sides) -> _Rule:
    # Its transform resizes what Pillow opened, and makes it RGB at the end.
    return {"conversion": "after"} | _covering(sides), "OpenCLIP's transform for evaluation"


def _sparo_clip(sides: _Sides) -> _Rule:
    fields, _ = _open_clip(sides)
    if sides[0] != sides[1]:
        fields["resize_mode"] = "squash"  # of the release that SPARO forked
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
    """The fields of timm's crop_mode 'center', which of the image keeps this share of its side."""
    resize_px = tuple(math.floor(side / share) for side in sides)
    # timm's transform does not hand its own filter on where the sides differ.
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
    "sot": _of_256("SoT's main.py, crop_pct 0.875 of timm 0.3.4"),
    "vit": _vit,
    "deit": _of_256("DeiT's datasets.py, eval_crop_ratio 0.875"),
    "swin": _swin,
    "torchvision vit": _torchvision_vit,
    "torchvision swin": _torchvision_swin,
    "nac": _of_256("NAC's deit/datasets.py"),
    "invariant-slot-attention": _slots,
}
