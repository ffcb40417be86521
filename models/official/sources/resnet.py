# SPDX-License-Identifier: Apache-2.0
"""ResNets with torchvision's or timm's names, and with those of transformers.

Source: torchvision's resnet.py and timm's, whose names agree; modeling_resnet.py of transformers
        4.57 and 5.23. All have the stride in a bottleneck's 3x3 convolution.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from saccade.core.schema import Count
from saccade.models.official.authors_images import AuthorsImages, authors_images
from saccade.models.official.conversion import Conversion, Original, Reading
from saccade.models.official.json_files import declared, refused
from saccade.models.official.sources.hugging_face import (
    ModelJson,
    architecture_of,
    images_of,
    labels_of,
)
from saccade.models.official.sources.swin import SwinJson
from saccade.models.official.sources.timm import embedding, published_side
from saccade.models.official.tables import Row
from saccade.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from saccade.models.resnet_sizes import STEM_PX, WIDTHS
from saccade.models.sot.config import SoTConfig

JSON = SwinJson
_STAGES = range(1, len(WIDTHS) + 1)
_COUNTED = "num_batches_tracked"
_TRUNK = (
    Row("trunk.resnet.conv1.*", "conv1.*"),
    Row("trunk.resnet.bn1.*", "bn1.*"),
    Row("trunk.resnet.layer#.#.*.*", "layer#.#.*.*"),
    Row("trunk.resnet.layer#.#.downsample.#.*", "layer#.#.downsample.#.*"),
)
_CLASSIFIER, _MODEL = "ResNetForImageClassification", "ResNetModel"


@dataclass(frozen=True)
class TransformersResNet(ModelJson):
    """The configuration of transformers."""

    embedding_size: Count = 64
    hidden_sizes: tuple[Count, ...] = (256, 512, 1024, 2048)
    depths: tuple[Count, ...] = (3, 4, 6, 3)
    layer_type: Literal["basic", "bottleneck"] = "bottleneck"
    hidden_act: Literal["relu"] = "relu"
    downsample_in_first_stage: Literal[False] = False
    downsample_in_bottleneck: Literal[False] = False


def _torchvision_rows(prefix: str) -> tuple[Row, ...]:
    """Return torchvision's names of the tensors of transformers, whose blocks count from 0."""
    block = f"{prefix}encoder.stages.#-1.layers.#."
    parts = {"convolution": ("conv", 0), "normalization": ("bn", 1)}
    return (
        Row("conv1.*", f"{prefix}embedder.embedder.convolution.*"),
        Row("bn1.*", f"{prefix}embedder.embedder.normalization.*"),
        Row("fc.*", "classifier.1.*"),
        *(
            row
            for theirs, (ours, place) in parts.items()
            for row in (
                Row(f"layer#.#.{ours}#.*", f"{block}layer.#-1.{theirs}.*"),
                Row(f"layer#.#.downsample.{place}.*", f"{block}shortcut.{theirs}.*"),
            )
        ),
    )


def convert(official: Original) -> Conversion:
    """Read a ResNet with torchvision's names; without `fc`, it becomes an embedding.

    The image is 224 pixels wide unless the JSON has {"img_size": ...}.

    Raises: SaccadeError if it has other blocks, such as a ResNeXt or ResNet-D.
    """
    reading, json = (Reading(official.path, official.tensors), declared(SwinJson, official.config))
    stem, channels, *_ = reading.shape("conv1.weight", 4)
    side = json.img_size or published_side(official.config) or 224
    fields = {
        "height_px": side,
        "width_px": side,
        "channels": channels,
        "mean": IMAGENET_MEAN[:channels],
        "std": IMAGENET_STD[:channels],
        "dim": stem,
        "stage_layers": [reading.depth(f"layer{stage}.#.") for stage in _STAGES],
        "bottleneck": "layer1.0.conv3.weight" in reading.tensors,
    }
    return _converted(official, reading, fields, None)


def convert_transformers(official: Original) -> Conversion:
    """Read a ResNet of transformers: a classifier, or without one an embedding.

    Raises: SaccadeError if an option of its configuration is not supported.
    """
    name = architecture_of(official, (_CLASSIFIER, _MODEL))
    where = f"{official.path}: config.json"
    json = declared(TransformersResNet, official.config, where)
    last = 1 if json.layer_type == "basic" else 4
    widths = tuple(json.embedding_size * last * 2**stage for stage in range(len(json.depths)))
    if json.hidden_sizes != widths:
        expected = f"{list(widths)}, which doubles from stage to stage"
        raise refused(f"{where}: hidden_sizes", list(json.hidden_sizes), expected)
    rows = _torchvision_rows("resnet." if name == _CLASSIFIER else "")
    reading = Reading.renamed(official.path, official.tensors, rows)
    images, fields = images_of(official, json, resampled=True)
    fields |= {"dim": json.embedding_size, "stage_layers": json.depths, "bottleneck": last > 1}
    if name == _CLASSIFIER:
        labels = labels_of(official, reading.shape("fc.weight")[0])
        official = replace(official, labels=labels)
    return _converted(official, reading, fields, images)


def _converted(
    official: Original, reading: Reading, fields: dict[str, Any], images: AuthorsImages | None
) -> Conversion:
    """Return a classifier of family 'sot', or an embedding of family 'sparo'."""
    classes = reading.size("fc.weight", default=1)
    fixed = {"trunk": "resnet", "patch_px": STEM_PX, "pooling": "gap", "fusion": "visual"}
    config = SoTConfig.from_dict(fields | fixed | {"classes": classes})
    rows = (*_TRUNK, *_uncounted(reading))
    if "fc.weight" not in reading.tensors:
        return embedding(official, reading, config.shape, rows, images or "resnet")
    reading.take((*rows, Row("head.word_fc.*", "fc.*")))
    images = images or authors_images("resnet", config)
    return reading.converted(official, "sot", config, images)


def _uncounted(reading: Reading) -> tuple[Row, ...]:
    """Return a row for the counter of batches of each norm in a file that has no counters.

    Only training reads them, and PyTorch before 0.4.1 did not write them.
    """
    places = [key.rpartition(".") for key in reading.tensors if key.endswith(".running_mean")]
    return tuple(
        Row(f"trunk.resnet.{place}.{_COUNTED}", f"{place}.running_mean", _zero)
        for place, _, _ in places
        if f"{place}.{_COUNTED}" not in reading.tensors
    )


def _zero(_: Any) -> Any:
    import torch

    return torch.zeros((), dtype=torch.int64)
