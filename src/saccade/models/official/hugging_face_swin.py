# SPDX-License-Identifier: Apache-2.0
"""Swin classifiers with the names of transformers.

Source: modeling_swin.py of transformers 4.57 and 5.23. There, the norms of the patches and of the
        mergings have epsilon 1e-5 whatever layer_norm_eps is.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from saccade.models.official.clip import layer, same
from saccade.models.official.conversion import Converted, Official, Reading, Row
from saccade.models.official.hugging_face import (
    LAYERS,
    Values,
    architecture_of,
    check_task,
    joined,
    labels_of,
)
from saccade.models.official.hugging_face_images import processor_images
from saccade.models.sot.config import SoTConfig

_USUAL: dict[str, Any] = {
    "image_size": 224,
    "patch_size": 4,
    "num_channels": 3,
    "embed_dim": 96,
    "depths": [2, 2, 6, 2],
    "num_heads": [3, 6, 12, 24],
    "window_size": 7,
    "mlp_ratio": 4.0,
    "qkv_bias": True,
    "hidden_act": "gelu",
    "use_absolute_embeddings": False,
    "layer_norm_eps": 1e-5,
}


def convert(official: Official) -> Converted:
    """Read a Swin, whose tokens are averaged and classified.

    Raises: SaccadeError if an option of its configuration is not supported.
    """
    architecture_of(official, ("SwinForImageClassification",))
    values = Values(f"{official.path}: config.json", official.config or {}, _USUAL)
    for name in ("hidden_act", "mlp_ratio", "use_absolute_embeddings", "layer_norm_eps"):
        values.require(name, _USUAL[name])
    values.require("qkv_bias", True, False)
    check_task(values)
    images = processor_images(official, values.count("num_channels"))
    preprocessing = images.preprocessing
    size = preprocessing.height_px, preprocessing.width_px
    if size != values.sides("image_size"):
        raise values.refused("image_size", f"{list(size)}, the input of preprocessor_config.json")
    reading = Reading(official.path, official.tensors)
    config = SoTConfig(
        height_px=size[0],
        width_px=size[1],
        channels=preprocessing.channels,
        mean=preprocessing.mean,
        std=preprocessing.std,
        trunk="swin",
        patch_px=values.side("patch_size"),
        dim=values.count("embed_dim"),
        stage_layers=values.counts("depths"),
        stage_heads=values.counts("num_heads"),
        window=values.count("window_size"),
        qkv_bias=values["qkv_bias"],
        layer_norm_epsilon=values.number("layer_norm_eps"),
        pooling="gap",
        fusion="visual",
        classes=reading.shape("classifier.weight")[0],
    )
    reading.take(_rows(config))
    computed = "recomputed from the window and the image size"
    reading.ignore(r".*\.relative_position_index", computed)
    reading.ignore(r"swin\.embeddings\.mask_token", "the token of masked patches")
    official = replace(official, labels=labels_of(official, config.classes))
    return reading.converted(official, "sot", config, images)


def _rows(config: SoTConfig) -> Iterator[Row]:
    yield from layer("trunk.embed", "swin.embeddings.patch_embeddings.projection")
    yield from layer("trunk.embed_norm", "swin.embeddings.norm")
    for stage, count in enumerate(config.stage_layers):
        theirs = f"swin.encoder.layers.{stage}"
        for index in range(count):
            yield from _block(f"trunk.stages.{stage}.{index}", f"{theirs}.blocks.{index}", config)
        if stage + 1 < len(config.stage_layers):
            merging = f"trunk.mergings.{stage}"
            yield from layer(f"{merging}.norm", f"{theirs}.downsample.norm")
            yield f"{merging}.reduce.weight", f"{theirs}.downsample.reduction.weight", same
    yield from layer("trunk.norm", "swin.layernorm")
    yield from layer("head.word_fc", "classifier")


def _block(ours: str, theirs: str, config: SoTConfig) -> Iterator[Row]:
    attention = f"{theirs}.attention.self"
    names = ("query", "key", "value")
    yield from joined(f"{ours}.attention.qkv", attention, names, bias=config.qkv_bias)
    table = f"{attention}.relative_position_bias_table"
    yield f"{ours}.attention.relative", table, same
    for mine, other in LAYERS.items():
        yield from layer(f"{ours}.{mine}", f"{theirs}.{other}")
