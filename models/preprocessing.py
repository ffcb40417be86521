# SPDX-License-Identifier: Apache-2.0
"""Preprocessing: the model's input, how an image becomes that input, and limits on images."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from saccade.core import limits
from saccade.core.errors import SaccadeError
from saccade.core.schema import Count, Natural, Range
from saccade.models.config_values import ConfigValues, ImageFields

if TYPE_CHECKING:
    from saccade.models.image_decoding import ImageInput

ResizeMode = Literal["shortest", "squash", "longest"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Side = Annotated[int, Range(1, limits.PIXELS)]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# The meaning of files written before resizing could keep an image's shape.
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

# Fields that older releases do not know, with their defaults.
_LATER: dict[str, Any] = {"crop_rounding": "even", "trained_px": []}


@dataclass(frozen=True)
class Preprocessing(ImageFields, ConfigValues):
    """How an encoded image becomes the model's uint8 [b, h, w, c], and the normalization after it.

    The image, or its `cut`, is resized to `resize_px` (height, width), then cropped at its center,
    or padded with `fill` if it is smaller. `shortest` resizes until the image covers `resize_px`,
    `longest` until it fits in; both keep its shape, `squash` does not. The model itself applies
    the mean and std: (x / 255 - mean) / std, per channel.
    Units:  mean and std as fractions of full white; fill from 0 to 255; caps in MiB, megapixels,
            pixels, images.
    Raises: SaccadeError if a value is out of range.
    """

    called = "Preprocessing"

    height_px: Side
    width_px: Side
    resize_mode: ResizeMode = "shortest"
    resize_px: tuple[Side, ...] = ()  # empty: height_px and width_px
    interpolation: Interpolation = "bilinear"
    antialias: bool = True  # False: as OpenCV and tf.image.resize, from two pixels per axis
    fill: tuple[Annotated[int, Range(0, 255)], ...] = ()  # empty: black
    conversion: Literal["before", "after"] = "before"  # to gray or color, before or after resizing
    # background of transparent images; dropped: ignore alpha and keep the colors
    alpha: Literal["white", "black", "dropped"] = "white"
    exif: bool = True  # rotate as the EXIF orientation says
    cut: tuple[Natural, ...] = ()  # top, left, height, width of what is resized; empty: everything
    channel_order: Literal["rgb", "bgr"] = "rgb"
    max_image_mib: Count = 16
    max_megapixels: Count = 50
    max_side_px: Side = 16384
    max_images: Count = 64
    min_side_px: Side = 2
    # of half a pixel in the center crop's place; down: as Hugging Face's image processors
    crop_rounding: Literal["even", "down"] = "even"
    # height and width that the model was trained with, if these images are smaller: arrays of
    # pixels of that size are resized
    trained_px: tuple[Side, ...] = ()

    def __post_init__(self) -> None:
        # Manifests repeat mean and std as they were written, integers too.
        self._check_types(as_written=("mean", "std"))
        area = self.height_px * self.width_px <= limits.IMAGE_PIXELS
        self._expect("height_px", area, f"at most {limits.IMAGE_PIXELS} pixels with width_px")
        self._check_pixels()
        self._check_places()

    def _check_places(self) -> None:
        # An empty tuple means the default; the file contains the default itself.
        object.__setattr__(self, "resize_px", self.resize_px or (self.height_px, self.width_px))
        object.__setattr__(self, "fill", self.fill or (0,) * self.channels)
        self._expect("resize_px", len(self.resize_px) == 2, "height and width")
        self._expect("trained_px", len(self.trained_px) in (0, 2), "height and width, or nothing")
        levels = f"{self.channels} whole numbers from 0 to 255"
        self._expect("fill", len(self.fill) == self.channels, levels)
        parts = len(self.cut) == 4 and min(self.cut[2:]) > 0
        self._expect("cut", not self.cut or parts, "top, left, height and width in pixels")
        plain = self.interpolation in ("nearest", "bilinear") and self.conversion == "before"
        self._expect("antialias", self.antialias or plain, "true with this filter or conversion")
        ordered = self.channels == 3 or self.channel_order == "rgb"
        self._expect("channel_order", ordered, "rgb for gray images")

    def _expect(self, name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise SaccadeError(
                f"Preprocessing: {name} is {getattr(self, name)!r:.200}, expected {wanted}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; those of `_LATER` only if they are not the default."""
        values = super().to_dict()
        return {key: value for key, value in values.items() if _LATER.get(key, ...) != value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocessing":
        """Read what `to_dict` wrote; files of older versions keep their meaning.

        Raises: SaccadeError if a key is unknown or missing, or a value is out of range.
        """
        if not isinstance(values, dict):
            raise SaccadeError(f"Preprocessing: found {values!r:.100}, expected a JSON object.")
        values = with_later(upgraded(values))
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known, key=str)
        missing = sorted(known - set(values))
        if unknown or missing:
            renamed = "'resize' is now called 'interpolation'. " if "resize" in unknown else ""
            raise SaccadeError(
                f"Preprocessing: unknown keys {unknown}, missing keys {missing}. {renamed}"
                "Another version of saccade wrote the file. Write it again with this version."
            )
        return cls(**values)

    @classmethod
    def of(cls, config: Any, **others: Any) -> "Preprocessing":
        """Return the preprocessing for a configuration with the size, mean and std of its images.

        Raises: SaccadeError if a value is out of range.
        """
        size = (config.height_px, config.width_px, config.channels)
        return cls(*size, tuple(config.mean), tuple(config.std), **others)

    @property
    def array_px(self) -> tuple[int, ...]:
        """Height and width of images in arrays of pixels."""
        return self.trained_px or (self.height_px, self.width_px)

    def at_height(self, height_px: int) -> "Preprocessing":
        """Return the same view of an image in fewer pixels, at the same aspect ratio.

        The sides of resize and crop are scaled alike and rounded to whole pixels, halves up: 256
        and 224 become 183 and 160.
        """
        if height_px == self.height_px:
            return self

        def scaled(px: int) -> int:
            return max(1, (2 * px * height_px + self.height_px) // (2 * self.height_px))

        return replace(
            self,
            height_px=height_px,
            width_px=scaled(self.width_px),
            resize_px=tuple(map(scaled, self.resize_px)),
            trained_px=self.array_px,
        )

    def wanted(self) -> "ImageInput":
        """Return the settings that `image_decoding` needs."""
        from saccade.models.image_decoding import ImageInput

        return ImageInput.from_dict(asdict(self))

    def described(self) -> str:
        """Describe the steps from the opened image to normalized numbers, for reports."""
        to = _by(self.resize_px)
        way = self.interpolation + ("" if self.antialias else " without antialiasing")
        resized = {
            "shortest": f"resized to cover {to} px ({way}), cropped at the center",
            "squash": f"squashed to {to} px ({way}), aspect ratio not kept",
            "longest": f"resized to fit in {to} px ({way}), padded with {list(self.fill)}",
        }[self.resize_mode]
        if self.resize_mode != "shortest" and self.resize_px != (self.height_px, self.width_px):
            resized += ", cropped at the center"
        if self.crop_rounding == "down":
            resized = resized.replace("at the center", "at the center, rounded down")
        if self.cut:
            resized = f"cut at {list(self.cut)}, {resized}"
        kind = "gray" if self.channels == 1 else self.channel_order.upper()
        return (
            f"{_by((self.height_px, self.width_px))} px {kind}: {resized}; "
            f"mean {_numbers(self.mean)}, std {_numbers(self.std)}"
        )


def with_later(values: dict[str, Any]) -> dict[str, Any]:
    """Add the fields that `to_dict` leaves out, and that older files lack."""
    return _LATER | values


def upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """Upgrade the fields of a file from before resize modes, which squashed every image."""
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
