# SPDX-License-Identifier: Apache-2.0
"""ResNets with torchvision's or timm's names, and with those of transformers.

Source: torchvision's resnet.py and timm's, whose names agree; modeling_resnet.py of transformers
        4.57 and 5.23. All have the stride in a bottleneck's 3x3 convolution.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.models.official.authors_images import AuthorsImages, authors_images
from saccade.models.official.conversion import Converted, Official, Reading
from saccade.models.official.embeddings import NOTES, embedding_of
from saccade.models.official.hugging_face import Values, architecture_of, check_task, labels_of
from saccade.models.official.hugging_face_images import processor_images
from saccade.models.official.vit_keys import hint
from saccade.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from saccade.models.resnet_sizes import STEM_PX, WIDTHS
from saccade.models.sot.config import SoTConfig

_OURS = r"(?:conv1|bn1|layer\d+\..+)\.\w+"
_COUNTED = "num_batches_tracked"
_USUAL: dict[str, Any] = {
    "num_channels": 3,
    "embedding_size": 64,
    "hidden_sizes": [256, 512, 1024, 2048],
    "depths": [3, 4, 6, 3],
    "layer_type": "bottleneck",
    "hidden_act": "relu",
    "downsample_in_first_stage": False,
    "downsample_in_bottleneck": False,
}
_CLASSIFIER, _MODEL = "ResNetForImageClassification", "ResNetModel"


def convert(official: Official) -> Converted:
    """Read a ResNet with torchvision's names; without `fc`, it becomes an embedding.

    The image is 224 pixels wide unless the JSON has {"img_size": ...}.

    Raises: SaccadeError if it has other blocks, such as a ResNeXt or ResNet-D.
    """
    reading = Reading(official.path, official.tensors)
    fields = _fields(reading)
    published = (hint(official.config, "pretrained_cfg", "input_size") or [None])[-1]
    side = hint(official.config, "img_size", default=published or 224)
    if not isinstance(side, int):
        raise SaccadeError(
            f"{official.path}: img_size is {side!r:.40}, expected a whole number. Correct the JSON."
        )
    channels = fields["channels"]
    fields |= {
        "height_px": side,
        "width_px": side,
        "mean": IMAGENET_MEAN[:channels],
        "std": IMAGENET_STD[:channels],
    }
    return _converted(official, reading, fields)


def convert_transformers(official: Official) -> Converted:
    """Read a ResNet of transformers: a classifier, or without one an embedding.

    Raises: SaccadeError if an option of its configuration is not supported.
    """
    name = architecture_of(official, (_CLASSIFIER, _MODEL))
    values = Values(f"{official.path}: config.json", official.config or {}, _USUAL)
    for key in ("hidden_act", "downsample_in_first_stage", "downsample_in_bottleneck"):
        values.require(key, _USUAL[key])
    values.require("layer_type", "basic", "bottleneck")
    stem, depths = values.count("embedding_size"), values.counts("depths")
    last = 1 if values["layer_type"] == "basic" else 4
    widths = [stem * last * 2**stage for stage in range(len(depths))]
    if list(values.counts("hidden_sizes")) != widths:
        raise values.refused("hidden_sizes", f"{widths}, which doubles from stage to stage")
    prefix = "resnet." if name == _CLASSIFIER else ""
    renamed = {_torchvision_name(key.removeprefix(prefix)): key for key in official.tensors}
    tensors = {ours: official.tensors[key] for ours, key in renamed.items()}
    reading = Reading(official.path, tensors, file_keys=renamed)
    images = processor_images(official, values.count("num_channels"))
    shown = images.preprocessing
    fields = {
        "height_px": shown.height_px,
        "width_px": shown.width_px,
        "channels": shown.channels,
        "mean": shown.mean,
        "std": shown.std,
        "dim": stem,
        "stage_layers": depths,
        "bottleneck": last > 1,
    }
    if name == _CLASSIFIER:
        check_task(values)
        classes = reading.shape("fc.weight")[0]
        official = replace(official, labels=labels_of(official, classes))
    return _converted(official, reading, fields, images)


def _fields(reading: Reading) -> dict[str, Any]:
    """Return the fields that the tensors tell."""
    stem, channels, *_ = reading.shape("conv1.weight")
    stages = range(1, len(WIDTHS) + 1)
    bottleneck = "layer1.0.conv3.weight" in reading.tensors
    return {
        "channels": channels,
        "dim": stem,
        "stage_layers": [reading.depth(rf"layer{stage}\.(\d+)\.") for stage in stages],
        "bottleneck": bottleneck,
    }


def _converted(
    official: Official,
    reading: Reading,
    fields: dict[str, Any],
    images: AuthorsImages | None = None,
) -> Converted:
    """Return a classifier of family 'sot', or an embedding of family 'sparo'."""
    rules = [(rf"({_OURS})", r"trunk.resnet.\1"), (r"fc\.(weight|bias)", r"head.word_fc.\1")]
    reading.rename(rules)
    for ours, key in _uncounted(reading):
        reading.put(ours, _zero(), key)
    classes = reading.shape("fc.weight")[0] if "fc.weight" in reading.tensors else 1
    config = SoTConfig.from_dict(
        fields
        | {"trunk": "resnet", "patch_px": STEM_PX, "pooling": "gap", "fusion": "visual"}
        | {"classes": classes}
    )
    images = authors_images("resnet", config) if images is None else images
    if "fc.weight" in reading.tensors:
        return reading.converted(official, "sot", config, images)
    embedding = embedding_of(reading, config.shape, "mean")
    return reading.converted(official, "sparo", embedding, images, (NOTES["mean"],))


def _uncounted(reading: Reading) -> Iterator[tuple[str, str]]:
    """Yield our counter of batches, and another key, of each norm in a file that has no counters.

    Only training reads them, and PyTorch before 0.4.1 did not write them.
    """
    for key in reading.tensors:
        place, _, leaf = key.rpartition(".")
        if leaf == "running_mean" and f"{place}.{_COUNTED}" not in reading.tensors:
            yield f"trunk.resnet.{place}.{_COUNTED}", key


def _zero() -> Any:
    import torch

    return torch.zeros((), dtype=torch.int64)


_THEIR_LAYERS = (
    (r"embedder\.embedder\.convolution\.(\w+)", r"conv1.\1"),
    (r"embedder\.embedder\.normalization\.(\w+)", r"bn1.\1"),
    (r"classifier\.1\.(\w+)", r"fc.\1"),
)
_THEIR_BLOCK = re.compile(
    r"encoder\.stages\.(\d+)\.layers\.(\d+)\.(?:layer\.(\d+)|(shortcut))"
    r"\.(convolution|normalization)\.(\w+)"
)


def _torchvision_name(key: str) -> str:
    """Return torchvision's name of a tensor of transformers; others stay."""
    for pattern, ours in _THEIR_LAYERS:
        if match := re.fullmatch(pattern, key):
            return match.expand(ours)
    match = _THEIR_BLOCK.fullmatch(key)
    if match is None:
        return key
    stage, block, place, _, kind, leaf = match.groups()
    conv = kind == "convolution"
    inner = f"{'conv' if conv else 'bn'}{int(place or 0) + 1}"
    if place is None:
        inner = f"downsample.{0 if conv else 1}"
    return f"layer{int(stage) + 1}.{block}.{inner}.{leaf}"
