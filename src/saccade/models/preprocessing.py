# SPDX-License-Identifier: Apache-2.0
"""Preprocessing: the model's input, the way from image to input, and limits on images."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from saccade import limits
from saccade.errors import SaccadeError
from saccade.models.config_values import ConfigValues
from saccade.schema import Count, Natural, Range

if TYPE_CHECKING:
    from saccade.models.image_decoding import Wanted

ResizeMode = Literal["shortest", "squash", "longest"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Side = Annotated[int, Range(1, limits.PIXELS)]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
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
class Preprocessing(ConfigValues):
    """From an encoded image to the model's uint8 [b, h, w, c], and the normalisation behind it.

    The image, or the `cut` of it, is resized to `resize_px` (height, width), then cropped at its
    centre, or padded with `fill` where it is smaller. `shortest` resizes until it covers
    `resize_px`, `longest` until it fits in, both keep its shape; `squash` does not. The mean and
    std are applied by the model itself: (x / 255 - mean) / std, per channel.
    Units:  mean and std as fractions of full white; fill from 0 to 255; caps in MiB, megapixels,
            pixels, images.
    Raises: SaccadeError if a value is out of range.
    """

    called = "Preprocessing"

    height_px: Side
    width_px: Side
    channels: int  # 1: grey, 3: red, green, blue
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize_mode: ResizeMode = "shortest"
    resize_px: tuple[Side, ...] = ()  # none: height_px and width_px
    interpolation: Interpolation = "bilinear"
    antialias: bool = True  # False: OpenCV's and tf.image.resize's, which look at two pixels
    fill: tuple[Annotated[int, Range(0, 255)], ...] = ()  # none: black
    conversion: Literal["before", "after"] = "before"  # to grey or colour, of the resize
    # what a transparent image lies on; dropped: what its colours are
    alpha: Literal["white", "black", "dropped"] = "white"
    exif: bool = True  # turned as the camera was held
    cut: tuple[Natural, ...] = ()  # top, left, height, width of what is resized; none: everything
    channel_order: Literal["rgb", "bgr"] = "rgb"
    max_image_mib: Count = 16
    max_megapixels: Count = 50
    max_side_px: Side = 16384
    max_images: Count = 64
    min_side_px: Side = 2

    def __post_init__(self) -> None:
        # Manifests say mean and deviation as they were written, whole numbers too.
        self._check_types(as_written=("mean", "std"))
        area = self.height_px * self.width_px <= limits.IMAGE_PIXELS
        self._expect("height_px", area, f"at most {limits.IMAGE_PIXELS} pixels with width_px")
        self._check_pixels()
        self._check_places()

    def _check_places(self) -> None:
        # An empty tuple is the usual value, and what is written is the value itself.
        object.__setattr__(self, "resize_px", self.resize_px or (self.height_px, self.width_px))
        object.__setattr__(self, "fill", self.fill or (0,) * self.channels)
        self._expect("resize_px", len(self.resize_px) == 2, "height and width")
        levels = f"{self.channels} whole numbers from 0 to 255"
        self._expect("fill", len(self.fill) == self.channels, levels)
        parts = len(self.cut) == 4 and min(self.cut[2:]) > 0
        self._expect("cut", not self.cut or parts, "top, left, height and width in pixels")
        plain = self.interpolation in ("nearest", "bilinear") and self.conversion == "before"
        self._expect("antialias", self.antialias or plain, "true with this filter or conversion")
        ordered = self.channels == 3 or self.channel_order == "rgb"
        self._expect("channel_order", ordered, "rgb where images are grey")

    def _expect(self, name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise SaccadeError(
                f"Preprocessing: {name} is {getattr(self, name)!r:.200}, expected {wanted}."
            )

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
        """Settings that `image_decoding` needs."""
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
