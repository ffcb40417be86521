# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face's transformers: the model that config.json names, and what is shared."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.models.official.conversion import Converted, Official, Row
from saccade.models.official.given_files import numbered

# Theirs by our names: parts of a layer of ViT, DeiT and Swin.
LAYERS = {
    "norm_attention": "layernorm_before",
    "attention.out": "attention.output.dense",
    "norm_mlp": "layernorm_after",
    "widen": "intermediate.dense",
    "narrow": "output.dense",
}
# The converter of this package by model_type; `:name` if it is not `convert`.
CONVERTERS = {
    "vit": "hugging_face_vit",
    "deit": "hugging_face_vit",
    "dinov2": "hugging_face_vit",
    "dinov2_with_registers": "hugging_face_vit",
    "swin": "hugging_face_swin",
    "swinv2": "hugging_face_swin",
    "siglip": "hugging_face_siglip",
    "siglip_vision_model": "hugging_face_siglip",
    "resnet": "resnet:convert_transformers",
    "clip": "hugging_face_clip",
    "clip_vision_model": "hugging_face_clip",
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


def convert(official: Official) -> Converted:
    """Read a model that transformers saved with `save_pretrained`.

    Raises: SaccadeError if config.json is missing, or names a model that is not supported.
    """
    kind = check_type(official.path, official.config or {})
    name, _, function = CONVERTERS[kind].partition(":")
    module = import_module(f"saccade.models.official.{name}")
    converted: Converted = getattr(module, function or "convert")(official)
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
    if kind not in CONVERTERS:
        raise SaccadeError(
            f"{path}: config.json has model_type {kind!r:.60}, expected one of "
            f"{', '.join(CONVERTERS)}. {_CLOSEST.get(kind, 'saccade has no family for it')}. "
            f"{_TRAIN}"
        )
    return kind


def architecture_of(official: Official, known: tuple[str, ...]) -> str:
    """Return the class of the model, which decides about the head.

    Raises: SaccadeError if it is none of those known.
    """
    names = (official.config or {}).get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if name not in known:
        raise SaccadeError(
            f"{official.path}: config.json has architectures {names!r:.80}, expected one of "
            f"{', '.join(known)}. Load the model in such a class, and save it again."
        )
    return str(name)


class Values:
    """The values of a JSON with a model's defaults; transformers may leave out a default."""

    def __init__(self, where: str, given: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
        self._where, self._values = where, {**usual, **given}

    def refused(self, name: str, expected: str) -> SaccadeError:
        """Return the error about a value that is not supported."""
        return SaccadeError(
            f"{self._where}: {name} is {self._values.get(name)!r:.80}, expected {expected}. "
            "Convert another model, or correct the JSON."
        )

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def get(self, name: str) -> Any:
        """Return a value, or None."""
        return self._values.get(name)

    def count(self, name: str) -> int:
        """Return a whole number of at least 1."""
        value = self._values.get(name)
        if type(value) is not int or value < 1:
            raise self.refused(name, "a whole number of at least 1")
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        """Return a list of such numbers."""
        values = self._values.get(name)
        if not isinstance(values, list) or not all(type(n) is int and n > 0 for n in values):
            raise self.refused(name, "a list of whole numbers of at least 1")
        return tuple(values)

    def sides(self, name: str) -> tuple[int, int]:
        """Return height and width, which may be written as one number."""
        value = self._values.get(name)
        both: list[Any] = value if isinstance(value, list) else [value, value]
        if len(both) != 2 or not all(type(side) is int and side > 0 for side in both):
            raise self.refused(name, "height and width in pixels")
        return both[0], both[1]

    def side(self, name: str) -> int:
        """Return the side of a square."""
        height, width = self.sides(name)
        if height != width:
            raise self.refused(name, "a square")
        return height

    def number(self, name: str) -> float:
        """Return a number above 0."""
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise self.refused(name, "a number from 0 to 1e6")
        return float(value)

    def require(self, name: str, *allowed: Any) -> None:
        """Check a value that the family does not have as an option.

        Raises: SaccadeError if it is another one.
        """
        if self._values.get(name) not in allowed:
            raise self.refused(name, " or ".join(map(repr, allowed)))


def labels_of(official: Official, classes: int) -> tuple[str, ...]:
    """Return the names of --labels, or those of id2label.

    Raises: SaccadeError if id2label does not number as many names as there are classes.
    """
    if official.labels:
        return official.labels
    given = (official.config or {}).get("id2label")
    names = numbered(given) if isinstance(given, Mapping) else None
    if names is None or len(names) != classes or not all(isinstance(name, str) for name in names):
        found = "none" if given is None else f"{len(given) if names else 0} numbered from 0"
        raise SaccadeError(
            f"{official.path}: the classifier has {classes} outputs, but id2label of config.json "
            f"has {found}. Correct it, or pass the names with --labels FILE, one per line."
        )
    return names


def check_task(values: Values) -> None:
    """Check that the outputs are the classes of one label per image.

    Raises: SaccadeError if they are not.
    """
    values.require("problem_type", None, "single_label_classification")


def joined(ours: str, theirs: str, names: tuple[str, ...], *, bias: bool = True) -> Iterator[Row]:
    """Yield the rows of one layer with the outputs of several, such as queries, keys, values."""
    import torch

    for leaf in ("weight", "bias") if bias else ("weight",):
        keys = tuple(f"{theirs}.{name}.{leaf}" for name in names)
        yield f"{ours}.{leaf}", keys, lambda *parts: torch.cat(parts)


def scaled(ours: str, theirs: str, scale: str) -> Iterator[Row]:
    """Yield the rows of a layer whose outputs are then multiplied by `scale`."""
    yield (
        f"{ours}.weight",
        (f"{theirs}.weight", scale),
        lambda weight, factor: weight.double() * factor.double()[:, None],
    )
    yield (
        f"{ours}.bias",
        (f"{theirs}.bias", scale),
        lambda bias, factor: bias.double() * factor.double(),
    )
