# SPDX-License-Identifier: Apache-2.0
"""What the model's input is, how an image becomes it, and which images are refused before."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from saccade import limits
from saccade.errors import SaccadeError

if TYPE_CHECKING:
    from saccade.models.image_decoding import Wanted

CHOICES = {
    "resize_mode": ("shortest", "squash", "longest"),
    "interpolation": ("nearest", "bilinear", "bicubic", "lanczos"),
    "conversion": ("before", "after"),
    "alpha": ("white", "black", "dropped"),
    "channel_order": ("rgb", "bgr"),
}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MOST = 4  # numbers in a list
_COUNTS = ("height_px", "width_px", "max_image_mib", "max_megapixels", "max_side_px", "max_images")
_SIDES = ("height_px", "width_px", "max_side_px", "min_side_px")
_LISTS = ("mean", "std", "resize_px", "fill", "cut")
# What files meant that were written before an image's shape could be kept.
_SQUASHED = {
    "resize_mode": "squash",
    "antialias": True,
    "conversion": "before",
    "alpha": "white",
    "exif": True,
    "cut": [],
    "channel_order": "rgb",
    "min_side_px": 1,
}


@dataclass(frozen=True)
class Preprocessing:
    """From an encoded image to the model's uint8 [b, h, w, c], and the normalisation behind it.

    The image, or the `cut` of it, is resized to `resize_px` (height, width), then cropped at its
    centre, or padded with `fill` where it is smaller. `shortest` resizes until it covers
    `resize_px`, `longest` until it fits in, both keep its shape; `squash` does not. The mean and
    std are applied by the model itself: (x / 255 - mean) / std, per channel.
    Units:  mean and std as fractions of full white; fill from 0 to 255; caps in MiB, megapixels,
            pixels, images.
    Raises: SaccadeError if a value is out of range.
    """

    height_px: int
    width_px: int
    channels: int  # 1: grey, 3: red, green, blue
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize_mode: str = "shortest"
    resize_px: tuple[int, ...] = ()  # none: height_px and width_px
    interpolation: str = "bilinear"
    antialias: bool = True  # False: OpenCV's and tf.image.resize's, which look at two pixels
    fill: tuple[int, ...] = ()  # none: black
    conversion: str = "before"  # to grey or colour, before or after the resize
    alpha: str = "white"  # what a transparent image lies on; dropped: what its colours are
    exif: bool = True  # turned as the camera was held
    cut: tuple[int, ...] = ()  # top, left, height, width of what is resized; none: everything
    channel_order: str = "rgb"
    max_image_mib: int = 16
    max_megapixels: int = 50
    max_side_px: int = 16384
    max_images: int = 64
    min_side_px: int = 2

    def __post_init__(self) -> None:
        for name in (*_COUNTS, "min_side_px"):
            self._require(_is_count(getattr(self, name)), name, "a whole number of at least 1")
            most = limits.PIXELS if name in _SIDES else limits.SIZE
            self._require(getattr(self, name) <= most, name, f"at most {most}")
        area = self.height_px * self.width_px <= limits.IMAGE_PIXELS
        self._require(area, "height_px", f"at most {limits.IMAGE_PIXELS} pixels with width_px")
        known = type(self.channels) is int and self.channels in (1, 3)
        self._require(known, "channels", "1 (grey) or 3 (colour)")
        for name, choices in CHOICES.items():
            self._require(getattr(self, name) in choices, name, " or ".join(choices))
        for name in ("antialias", "exif"):
            self._require(isinstance(getattr(self, name), bool), name, "true or false")
        for name in _LISTS:
            value = getattr(self, name)
            fits = isinstance(value, list | tuple) and len(value) <= _MOST
            self._require(fits, name, f"at most {_MOST} numbers")
        self._check_scale()
        self._check_places()

    def _check_scale(self) -> None:
        each = f"{self.channels} finite numbers, one a channel"
        self._require(_are_finite(self.mean, self.channels), "mean", each)
        self._require(_are_finite(self.std, self.channels), "std", each)
        self._require(min(self.std) > 0, "std", "above 0")
        low, high = limits.STD
        within = low <= min(self.std) and max(self.std) <= high
        self._require(within, "std", f"from {low:g} to {high:g}")
        within = max(map(abs, self.mean)) <= limits.MEAN
        self._require(within, "mean", f"from {-limits.MEAN:g} to {limits.MEAN:g}")

    def _check_places(self) -> None:
        # An empty tuple is the usual value, and what is written is the value itself.
        object.__setattr__(self, "resize_px", self.resize_px or (self.height_px, self.width_px))
        object.__setattr__(self, "fill", self.fill or (0,) * self.channels)
        sides = len(self.resize_px) == 2 and all(map(_is_count, self.resize_px))
        sides = sides and max(self.resize_px) <= limits.PIXELS
        whole = f"height and width, two whole numbers of at least 1 and at most {limits.PIXELS}"
        self._require(sides, "resize_px", whole)
        levels = len(self.fill) == self.channels and all(map(_is_whole, self.fill))
        self._require(
            levels and max(self.fill) < 256, "fill", f"{self.channels} whole numbers from 0 to 255"
        )
        parts = all(map(_is_whole, self.cut)) and len(self.cut) == 4 and min(self.cut[2:]) > 0
        self._require(not self.cut or parts, "cut", "top, left, height and width in pixels")
        plain = self.interpolation in ("nearest", "bilinear") and self.conversion == "before"
        self._require(self.antialias or plain, "antialias", "true with this filter or conversion")
        ordered = self.channels == 3 or self.channel_order == "rgb"
        self._require(ordered, "channel_order", "rgb where images are grey")

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON holds them."""
        return asdict(self) | {name: list(getattr(self, name)) for name in _LISTS}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocessing":
        """The inverse of `to_dict`; what older versions wrote keeps its meaning.

        Raises: SaccadeError if a key is unknown or missing, or a value is out of range.
        """
        if not isinstance(values, dict):
            raise SaccadeError(f"Preprocessing: found {values!r:.100}, expected a JSON object.")
        values = upgraded(values)
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known, key=str)
        missing = sorted(known - set(values))
        if unknown or missing:
            renamed = "What was 'resize' is 'interpolation' now. " if "resize" in unknown else ""
            raise SaccadeError(
                f"Preprocessing: unknown keys {unknown}, missing keys {missing}. {renamed}"
                "The file was written by another version of saccade: write it again with this one."
            )
        lists = {key: values[key] for key in _LISTS}
        if not all(isinstance(value, list | tuple) for value in lists.values()):
            raise SaccadeError(
                f"Preprocessing: {', '.join(_LISTS)} are {lists!r:.200}, expected lists."
            )
        return cls(**values | {key: tuple(value) for key, value in lists.items()})

    @classmethod
    def of(cls, config: Any, **others: Any) -> "Preprocessing":
        """That of a model whose configuration says size, mean and std of its images.

        Raises: SaccadeError if a value is out of range.
        """
        size = (config.height_px, config.width_px, config.channels)
        return cls(*size, tuple(config.mean), tuple(config.std), **others)

    def wanted(self) -> "Wanted":
        """What `image_decoding` needs of it."""
        from saccade.models.image_decoding import Wanted

        return Wanted.from_dict(asdict(self))

    def described(self) -> str:
        """In words, for reports: from the opened image to numbers around 0."""
        to = _by(self.resize_px)
        way = self.interpolation + ("" if self.antialias else " without antialiasing")
        resized = {
            "shortest": f"resized to cover {to} px ({way}), cropped at the centre",
            "squash": f"squashed to {to} px ({way}), its shape not kept",
            "longest": f"resized to fit in {to} px ({way}), padded with {list(self.fill)}",
        }[self.resize_mode]
        if self.resize_mode != "shortest" and self.resize_px != (self.height_px, self.width_px):
            resized += ", cropped at the centre"
        if self.cut:
            resized = f"cut at {list(self.cut)}, {resized}"
        kind = "grey" if self.channels == 1 else self.channel_order.upper()
        return (
            f"{_by((self.height_px, self.width_px))} px {kind}: {resized}; "
            f"mean {_numbers(self.mean)}, std {_numbers(self.std)}"
        )

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise SaccadeError(
                f"Preprocessing: {name} is {getattr(self, name)!r:.200}, expected {expected}."
            )


def upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a file that was written before resize modes: it squashed every image."""
    if "resize" not in values or "resize_mode" in values:
        return values
    kept = {key: value for key, value in values.items() if key != "resize"}
    sides = [values.get("height_px"), values.get("width_px")]
    channels = values.get("channels")
    fill = [0] * (channels if isinstance(channels, int) else 0)
    return kept | _SQUASHED | {"interpolation": values["resize"], "resize_px": sides, "fill": fill}


def _by(sides: Sequence[int]) -> str:
    return " x ".join(map(str, sides))


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.6g}" for value in values)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limits.SIZE


def _are_finite(values: tuple[float, ...], count: int) -> bool:
    return len(values) == count and all(
        isinstance(value, int | float) and type(value) is not bool and abs(value) < math.inf
        for value in values
    )
