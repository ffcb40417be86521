# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face's transformers: the model that config.json names, and what is shared:
labels, and the preprocessing in the image processor's JSON, step by step.

Source: image_processing_vit.py, _deit.py, _clip.py, _bit.py, _siglip.py and _convnext.py of
        transformers 4.57 and 5.23, and `center_crop` of image_transforms.py, which rounds odd
        margins down.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple

from saccade.core.checks import check_one_of
from saccade.core.errors import SaccadeError
from saccade.core.schema import Count, Range
from saccade.models.official.authors_images import AuthorsImages
from saccade.models.official.conversion import Conversion, Original
from saccade.models.official.json_files import declared, numbered, refused
from saccade.models.preprocessing import Preprocessing
from saccade.models.sparo.config import CLIP_MEAN, CLIP_STD

QKV = ("query", "key", "value")
# Theirs by our names: parts of a layer of ViT, DeiT and Swin.
LAYERS = {
    "norm_attention.*": "layernorm_before.*",
    "attention.out.*": "attention.output.dense.*",
    "norm_mlp.*": "layernorm_after.*",
    "widen.*": "intermediate.dense.*",
    "narrow.*": "output.dense.*",
}
# The converter of this package by model_type; `:name` if it is not `convert`.
CONVERTERS = {
    **dict.fromkeys(("vit", "deit", "dinov2", "dinov2_with_registers"), "hugging_face_vit"),
    **dict.fromkeys(("swin", "swinv2"), "swin:convert_transformers"),
    **dict.fromkeys(("siglip", "siglip_vision_model"), "hugging_face_clip:convert_siglip"),
    "resnet": "resnet:convert_transformers",
    **dict.fromkeys(("clip", "clip_vision_model"), "hugging_face_clip"),
}
_OTHER_CONVOLUTIONS = (
    "Of convolutional trunks saccade reads ResNets. A ViT or Swin does the same task"
)
_ANY_SHAPE = (
    "It takes images of any shape. Convert a SigLIP 2 for images of one size, whose model_type is "
    "siglip"
)
# What to use instead of a model that no family here computes.
_CLOSEST = {
    **dict.fromkeys(("convnext", "convnextv2", "regnet"), _OTHER_CONVOLUTIONS),
    **dict.fromkeys(("siglip2", "siglip2_vision_model"), _ANY_SHAPE),
    "beit": "Its attention has a position bias in each layer. Convert a ViT or DeiT",
}
_TRAIN = (
    "To train a family of saccade on your images instead, run: saccade train nac --data FOLDER "
    "--out NAME.safetensors"
)


@dataclass(frozen=True)
class ModelJson:
    """What is read of every model's config.json; transformers may leave out a default."""

    model_type: str = ""
    image_size: tuple[Count, Count] = (224, 224)
    patch_size: tuple[Count, Count] = (16, 16)
    num_channels: Count = 3


Epsilon = Annotated[float, Range(0, 1e6, above=True, below=True)]


@dataclass(frozen=True)
class TransformerJson(ModelJson):
    """The same of a model whose layers are alike."""

    hidden_size: Count = 768
    num_hidden_layers: Count = 12
    num_attention_heads: Count = 12
    intermediate_size: Count = 3072
    layer_norm_eps: Epsilon = 1e-6

    @property
    def hidden(self) -> int:
        """Hidden width of the MLPs."""
        return self.intermediate_size

    @property
    def sizes(self) -> dict[str, Any]:
        """The fields of our configuration of a trunk."""
        return {
            "dim": self.hidden_size,
            "layers": self.num_hidden_layers,
            "heads": self.num_attention_heads,
            "mlp_dim": self.hidden,
            "layer_norm_epsilon": self.layer_norm_eps,
        }


@dataclass(frozen=True)
class TowerJson:
    """The names of values in any model's config.json, or in that of one of its towers."""

    UNREAD = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("hidden_act", "layer_norm_eps", "image_size", "patch_size", "num_channels", "qkv_bias"),
        *("embed_dim", "depths", "num_heads", "window_size", "mlp_ratio", "use_swiglu_ffn"),
        *("projection_dim", "vocab_size", "eos_token_id", "max_position_embeddings"),
        *("vision_use_head", "projection_size", "embedding_size", "hidden_sizes", "layer_type"),
        *("model_type", "architectures", "id2label", "preprocessor_config"),
    )


@dataclass(frozen=True)
class FolderJson(TowerJson):
    """The same of a whole model."""

    vision_config: TowerJson = TowerJson()
    text_config: TowerJson = TowerJson()


JSON = FolderJson


def convert(official: Original) -> Conversion:
    """Read a model that transformers saved with `save_pretrained`.

    Raises: SaccadeError if config.json is missing, or names a model that is not supported.
    """
    kind = check_type(official.path, official.config or {})
    name, _, function = CONVERTERS[kind].partition(":")
    module = import_module(f"saccade.models.official.sources.{name}")
    converted: Conversion = getattr(module, function or "convert")(official)
    return converted


def check_type(path: str, config: Mapping[str, Any]) -> str:
    """Return the model_type of config.json.

    Raises: SaccadeError if there is none, or no converter for it; the message says what is.
    """
    if "model_type" not in config:
        raise SaccadeError(
            f"{path}: has no config.json with model_type next to it, which transformers writes. "
            "Pass the folder that contains config.json, preprocessor_config.json and the "
            "weights: saccade convert FOLDER --out NAME.safetensors"
        )
    kind = str(config["model_type"])
    advice = f"{_CLOSEST.get(kind, 'saccade has no family for it')}. {_TRAIN}"
    check_one_of(f"{path}: key 'model_type' of config.json", kind, CONVERTERS, advice)
    return kind


def architecture_of(official: Original, known: tuple[str, ...]) -> str:
    """Return the class of the model, which decides about the head.

    Raises: SaccadeError if it is none of those known.
    """
    names = (official.config or {}).get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    advice = "Load the model in such a class, and save it again."
    check_one_of(f"{official.path}: key 'architectures' of config.json", name, known, advice)
    return str(name)


def labels_of(official: Original, classes: int) -> tuple[str, ...]:
    """Return the names of --labels, or those of id2label.

    Raises: SaccadeError if the outputs are not the classes of one label per image, or id2label
        does not number as many names as there are classes.
    """
    config = official.config or {}
    task, one = config.get("problem_type"), "single_label_classification"
    if task not in (None, one):
        raise refused(f"{official.path}: config.json: problem_type", task, f"None or {one!r}")
    if official.labels:
        return official.labels
    given = config.get("id2label")
    names = numbered(given) if isinstance(given, Mapping) else None
    if names is None or len(names) != classes or not all(isinstance(name, str) for name in names):
        found = "none" if given is None else f"{len(given) if names else 0} numbered from 0"
        raise SaccadeError(
            f"{official.path}: the classifier has {classes} outputs, but id2label of config.json "
            f"has {found}. Correct it, or pass the names with --labels FILE, one per line."
        )
    return names


def images_of(
    official: Original, json: ModelJson, *, resampled: bool = False
) -> tuple[AuthorsImages, dict[str, Any]]:
    """Return the preprocessing of a model, and the fields of our configuration about images.

    Raises: SaccadeError if it is not supported, or its images do not have
        the size of the model's, unless positions are `resampled`.
    """
    images = processor_images(official, json.num_channels)
    shown, where = images.preprocessing, f"{official.path}: config.json"
    size = (shown.height_px, shown.width_px)
    if not resampled and size != json.image_size:
        expected = f"{list(size)}, the input of preprocessor_config.json"
        raise refused(f"{where}: image_size", list(json.image_size), expected)
    if len(set(json.patch_size)) > 1:
        raise refused(f"{where}: patch_size", list(json.patch_size), "a square")
    return images, {
        "height_px": shown.height_px,
        "width_px": shown.width_px,
        "channels": shown.channels,
        "mean": shown.mean,
        "std": shown.std,
        "patch_px": json.patch_size[0],
    }


_HALF = (0.5, 0.5, 0.5)
_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic")  # by Pillow's numbers


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
_LEVELS = ("image_mean", "image_std")
_WHERE = "preprocessor_config.json"


@dataclass(frozen=True)
class ProcessorJson:
    """An image processor's JSON; null stands for the default of its class."""

    # Names, and formats of arrays: they change nothing here.
    UNREAD = (
        *("processor_class", "_processor_class", "default_to_square", "data_format"),
        *("input_data_format", "return_tensors", "device", "_valid_processor_keys"),
        *("disable_grouping", "image_seq_length", "_name_or_path", "transformers_version"),
        *("auto_map", "backend"),
    )
    image_processor_type: str | None = None
    feature_extractor_type: str | None = None
    do_resize: Literal[True] | None = None
    do_rescale: Literal[True] | None = None
    do_normalize: bool | None = None
    do_center_crop: bool | None = None
    do_convert_rgb: bool | None = None
    size: Any = None
    crop_size: Any = None
    crop_pct: Annotated[float, Range(0, 1, above=True)] | None = None
    resample: Literal[0, 1, 2, 3] | None = None
    rescale_factor: float | None = None
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None


def processor_images(official: Original, channels: int) -> AuthorsImages:
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
    numbers = {name: x for name, x in given.items() if isinstance(x, int | float)}
    levels = {name: [numbers[name]] * channels for name in _LEVELS if name in numbers}
    json = declared(ProcessorJson, {**given, **levels}, _WHERE)
    name = json.image_processor_type or json.feature_extractor_type or "ViT"
    kind = name
    for ending in _ENDINGS:
        kind = kind.removesuffix(ending)
    if kind not in PROCESSORS:
        known = ", ".join(f"{own}ImageProcessor" for own in PROCESSORS)
        expected = f"one of {known}, with or without Fast"
        raise refused(f"{_WHERE}: image_processor_type", name, expected)
    usual = PROCESSORS[kind]
    _check_steps(given, json, usual)
    size = _size("size", usual.size if json.size is None else json.size, square=usual.square)
    height, width, steps = (_own_crop if usual.share else _crop)(json, usual, size)
    steps |= {"mean": (0.0,) * channels, "std": (1.0,) * channels}
    if json.do_normalize is not False:
        mean, std = (
            json.image_mean or usual.mean[:channels],
            json.image_std or usual.std[:channels],
        )
        steps |= {
            "mean": _levels("image_mean", mean, channels),
            "std": _levels("image_std", std, channels),
        }
    way = _FILTERS[usual.resample if json.resample is None else json.resample]
    # As Pillow's convert("RGB"), with which transformers opens files.
    steps |= {"interpolation": way, "alpha": "dropped"}
    preprocessing = Preprocessing(height, width, channels, **steps)
    return AuthorsImages(preprocessing, f"its preprocessor_config.json, {name}")


def _check_steps(given: Mapping[str, Any], json: ProcessorJson, usual: Processor) -> None:
    known = {field.name for field in fields(json)} | {*ProcessorJson.UNREAD}
    known -= set() if usual.share else {"crop_pct"}
    for key, value in given.items():
        if key not in known and value not in (None, False):
            expected = "only the steps resize, rescale, normalize, center_crop, convert_rgb"
            raise refused(f"{_WHERE}: {key}", value, expected)
    factor = 1 / 255 if json.rescale_factor is None else json.rescale_factor
    if abs(factor * 255 - 1) > 1e-6:
        raise refused(f"{_WHERE}: rescale_factor", factor, "1/255")


def _crop(
    json: ProcessorJson, usual: Processor, size: Mapping[str, int]
) -> tuple[int, int, dict[str, Any]]:
    """Return height and width of the input, and the fields of the resize before the crop."""
    shortest = "shortest_edge" in size
    resize_px = (size["shortest_edge"],) * 2 if shortest else (size["height"], size["width"])
    steps = {"resize_mode": "shortest" if shortest else "squash", "resize_px": resize_px}
    crops = bool(usual.crop) if json.do_center_crop is None else json.do_center_crop
    if not crops and shortest:
        expected = "true, as shortest_edge keeps the shape"
        raise refused(f"{_WHERE}: do_center_crop", False, expected)
    if not crops:
        return *resize_px, steps
    own = {"height": usual.crop, "width": usual.crop} if json.crop_size is None else json.crop_size
    crop = _size("crop_size", own, square=True)
    height, width = crop.get("height", 0), crop.get("width", 0)
    if not (0 < height <= resize_px[0] and 0 < width <= resize_px[1]):
        expected = f"height and width of at most {resize_px[0]} and {resize_px[1]}"
        raise refused(f"{_WHERE}: crop_size", json.crop_size, expected)
    return height, width, steps | {"crop_rounding": "down"}


def _own_crop(
    json: ProcessorJson, usual: Processor, size: Mapping[str, int]
) -> tuple[int, int, dict[str, Any]]:
    """Return the same of a processor that crops a share of the image."""
    share, side = json.crop_pct or usual.share, size.get("shortest_edge")
    if side is None or json.do_center_crop:
        name = "size" if side is None else "do_center_crop"
        raise refused(f"{_WHERE}: {name}", getattr(json, name), "shortest_edge, and no other crop")
    if side >= _WHOLE_PX:
        return side, side, {"resize_mode": "squash", "resize_px": (side, side)}
    steps = {"resize_mode": "shortest", "resize_px": (int(side / share),) * 2}
    return side, side, steps | {"crop_rounding": "down"}


def _size(key: str, given: Any, *, square: bool) -> Mapping[str, int]:
    if type(given) is int:
        given = {"height": given, "width": given} if square else {"shortest_edge": given}
    elif isinstance(given, list) and len(given) == 2:
        given = {"height": given[0], "width": given[1]}
    sides = dict(given) if isinstance(given, Mapping) else {}
    whole = all(type(side) is int and side > 0 for side in sides.values())
    if set(sides) not in ({"height", "width"}, {"shortest_edge"}) or not whole:
        expected = "height and width, or shortest_edge, in pixels"
        raise refused(f"{_WHERE}: {key}", given, expected)
    return sides


def _levels(key: str, levels: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Return the mean or std per channel."""
    if len(levels) != channels:
        raise refused(f"{_WHERE}: {key}", list(levels), f"{channels} numbers, one per channel")
    return levels
