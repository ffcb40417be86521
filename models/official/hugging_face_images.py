# SPDX-License-Identifier: Apache-2.0
"""The preprocessing of a transformers model: its image processor's JSON, step by step.

Source: image_processing_vit.py, _deit.py, _clip.py, _bit.py, _siglip.py and _convnext.py of
        transformers 4.57 and 5.23, and `center_crop` of image_transforms.py, which rounds odd
        margins down.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from saccade.core.errors import SaccadeError
from saccade.models.official.authors_images import AuthorsImages
from saccade.models.official.conversion import Official
from saccade.models.preprocessing import Preprocessing
from saccade.models.sparo.config import CLIP_MEAN, CLIP_STD

_HALF = (0.5, 0.5, 0.5)
# Pillow's numbers of its filters.
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_convert_rgb")
_VALUES = ("size", "crop_size", "resample", "rescale_factor", "image_mean", "image_std")
# Keys that change nothing here: names, and formats of arrays.
_NAMES = {
    *("image_processor_type", "feature_extractor_type", "processor_class", "_processor_class"),
    *("default_to_square", "data_format", "input_data_format", "return_tensors", "device"),
    *("_valid_processor_keys", "disable_grouping", "image_seq_length", "_name_or_path"),
    *("transformers_version", "auto_map", "backend"),
}


class Processor(NamedTuple):
    """The defaults of one class of image processors."""

    size: Mapping[str, int]
    resample: int
    mean: tuple[float, ...] = _HALF
    std: tuple[float, ...] = _HALF
    crop: int = 0  # side of the center crop, if it does one by default
    square: bool = True  # a size of one number is height and width, else the shortest edge
    share: float = 0.0  # of a smaller image's side that its own center crop keeps, if it does one


_224 = {"height": 224, "width": 224}
_CLIP = Processor({"shortest_edge": 224}, 3, CLIP_MEAN, CLIP_STD, crop=224, square=False)
PROCESSORS = {
    "ViT": Processor(_224, 2),
    "DeiT": Processor({"height": 256, "width": 256}, 3, crop=224),
    "CLIP": _CLIP,
    "Bit": _CLIP,
    "Siglip": Processor(_224, 3),
    "ConvNext": Processor({"shortest_edge": 384}, 3, square=False, share=224 / 256),
}
_WHOLE_PX = 384  # from this side, ConvNext's processor squashes images instead of cropping them
_ENDINGS = ("Fast", "Pil", "ImageProcessor", "FeatureExtractor")


def processor_images(official: Official, channels: int) -> AuthorsImages:
    """Return the preprocessing that the folder's image processor describes.

    Raises: SaccadeError if there is none, or it has a step or a class that is not supported.
    """
    given = (official.config or {}).get("preprocessor_config")
    if not isinstance(given, Mapping):
        raise SaccadeError(
            f"{official.path}: has no preprocessor_config.json next to it, which tells how an "
            "image becomes the input. Copy it from the model, or from the one it was fine-tuned "
            "from."
        )
    name = str(given.get("image_processor_type") or given.get("feature_extractor_type") or "ViT")
    reading = _Reading(name, given)
    height, width, fields = reading.sizes()
    preprocessing = Preprocessing(
        height,
        width,
        channels,
        reading.levels("image_mean", reading.usual.mean, 0.0, channels),
        reading.levels("image_std", reading.usual.std, 1.0, channels),
        interpolation=reading.interpolation(),  # type: ignore[arg-type]
        alpha="dropped",  # as Pillow's convert("RGB"), with which transformers opens files
        **fields,
    )
    return AuthorsImages(preprocessing, f"its preprocessor_config.json, {name}")


class _Reading:
    """The JSON of an image processor, with the defaults of its class."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        self.given, self.name = given, name
        for ending in _ENDINGS:
            name = name.removesuffix(ending)
        if name not in PROCESSORS:
            known = ", ".join(f"{each}ImageProcessor" for each in PROCESSORS)
            raise self._refused(
                "image_processor_type", self.name, f"one of {known}, with or without Fast"
            )
        self.usual = PROCESSORS[name]
        self._check()

    def _refused(self, key: str, value: Any, expected: str) -> SaccadeError:
        return SaccadeError(
            f"preprocessor_config.json: {key} is {value!r:.80}, expected {expected}. If images are "
            "prepared in a supported way too, correct the JSON."
        )

    def _check(self) -> None:
        known = {*_STEPS, *_VALUES, *_NAMES, *(("crop_pct",) if self.usual.share else ())}
        for key, value in self.given.items():
            if key not in known and value not in (None, False):
                expected = f"only the steps {', '.join(step[3:] for step in _STEPS)}"
                raise self._refused(key, value, expected)
        for step in ("do_resize", "do_rescale"):
            if not self._does(step, True):
                raise self._refused(step, self.given[step], "true")
        factor = self.given.get("rescale_factor", 1 / 255)
        if not isinstance(factor, int | float) or abs(factor * 255 - 1) > 1e-6:
            raise self._refused("rescale_factor", factor, "1/255")

    def _does(self, step: str, usual: bool) -> bool:
        given = self.given.get(step)
        if given is not None and not isinstance(given, bool):
            raise self._refused(step, given, "true or false")
        return usual if given is None else given

    def sizes(self) -> tuple[int, int, dict[str, Any]]:
        """Return height and width of the input, and the fields of the resize before the crop."""
        size = self._size("size", self.usual.size, square=self.usual.square)
        if self.usual.share:
            return self._own_crop(size)
        if "shortest_edge" in size:
            mode, resize_px = "shortest", (size["shortest_edge"],) * 2
        else:
            mode, resize_px = "squash", (size["height"], size["width"])
        fields: dict[str, Any] = {"resize_mode": mode, "resize_px": resize_px}
        if self._does("do_center_crop", bool(self.usual.crop)):
            usual = {"height": self.usual.crop, "width": self.usual.crop}
            crop = self._size("crop_size", usual, square=True)
            height, width = crop.get("height", 0), crop.get("width", 0)
            if not (0 < height <= resize_px[0] and 0 < width <= resize_px[1]):
                expected = f"height and width of at most {resize_px[0]} and {resize_px[1]}"
                raise self._refused("crop_size", self.given.get("crop_size"), expected)
            return height, width, fields | {"crop_rounding": "down"}
        if mode == "shortest":
            raise self._refused("do_center_crop", False, "true, as shortest_edge keeps the shape")
        return *resize_px, fields

    def _own_crop(self, size: Mapping[str, int]) -> tuple[int, int, dict[str, Any]]:
        share, side = self.given.get("crop_pct", self.usual.share), size.get("shortest_edge")
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise self._refused("crop_pct", share, "a number above 0 and up to 1")
        if side is None or self._does("do_center_crop", False):
            name = "size" if side is None else "do_center_crop"
            raise self._refused(name, self.given.get(name), "shortest_edge, and no other crop")
        if side >= _WHOLE_PX:
            return side, side, {"resize_mode": "squash", "resize_px": (side, side)}
        resize_px = (int(side / share),) * 2
        return (
            side,
            side,
            {
                "resize_mode": "shortest",
                "resize_px": resize_px,
                "crop_rounding": "down",
            },
        )

    def _size(self, key: str, usual: Mapping[str, int], *, square: bool) -> Mapping[str, int]:
        given = self.given.get(key)
        given = usual if given is None else given
        if type(given) is int:
            given = {"height": given, "width": given} if square else {"shortest_edge": given}
        elif isinstance(given, list) and len(given) == 2:
            given = {"height": given[0], "width": given[1]}
        names = set(given) if isinstance(given, Mapping) else set()
        whole = isinstance(given, Mapping) and all(
            type(side) is int and side > 0 for side in given.values()
        )
        if names not in ({"height", "width"}, {"shortest_edge"}) or not whole:
            raise self._refused(key, given, "height and width, or shortest_edge, in pixels")
        return dict(given)

    def interpolation(self) -> str:
        """Return the name of the filter."""
        given = self.given.get("resample")
        given = self.usual.resample if given is None else given
        if type(given) is not int or given not in _FILTERS:
            known = ", ".join(f"{number} ({way})" for number, way in _FILTERS.items())
            raise self._refused("resample", given, f"one of {known}")
        return _FILTERS[given]

    def levels(
        self, key: str, usual: tuple[float, ...], without: float, channels: int
    ) -> tuple[float, ...]:
        """Return the mean or std per channel; `without` normalization it is that number."""
        if not self._does("do_normalize", True):
            return (without,) * channels
        given = self.given.get(key)
        if given is None:
            given = usual[:channels]
        values = list(given) if isinstance(given, list | tuple) else [given] * channels
        numbers = all(type(value) in (int, float) for value in values)
        if len(values) != channels or not numbers:
            raise self._refused(key, given, f"{channels} numbers, one per channel")
        return tuple(values)
