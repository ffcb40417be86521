# SPDX-License-Identifier: Apache-2.0
"""Swin and Swin V2 classifiers with the names of transformers.

Source: modeling_swin.py and modeling_swinv2.py of transformers 4.57 and 5.23. There, the norms of
        the patches and of the mergings have epsilon 1e-5 whatever layer_norm_eps is.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from torch import Tensor

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
    architecture_of(official, ("SwinForImageClassification", "Swinv2ForImageClassification"))
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
        trunk=values["model_type"],
        patch_px=values.side("patch_size"),
        dim=values.count("embed_dim"),
        stage_layers=values.counts("depths"),
        stage_heads=values.counts("num_heads"),
        window=values.count("window_size"),
        trained_windows=_trained_windows(values),
        qkv_bias=values["qkv_bias"],
        layer_norm_epsilon=values.number("layer_norm_eps"),
        pooling="gap",
        fusion="visual",
        classes=reading.shape("classifier.weight")[0],
    )
    reading.take(_rows(config))
    computed = "recomputed from the window and the image size"
    reading.ignore(r".*\.relative_(position_index|coords_table)", computed)
    reading.ignore(r"swin(v2)?\.embeddings\.mask_token", "the token of masked patches")
    official = replace(official, labels=labels_of(official, config.classes))
    return reading.converted(official, "sot", config, images)


def _trained_windows(values: Values) -> tuple[int, ...]:
    """Return Swin V2's windows before it was fine-tuned with larger ones; 0 means none."""
    given = values.get("pretrained_window_sizes")
    if values["model_type"] == "swin" or given is None or not any(given):
        return ()
    if not all(type(side) is int and side >= 0 for side in given):
        raise values.refused("pretrained_window_sizes", "a list of whole numbers")
    return tuple(given)


def _rows(config: SoTConfig) -> Iterator[Row]:
    whole = config.trunk
    yield from layer("trunk.embed", f"{whole}.embeddings.patch_embeddings.projection")
    yield from layer("trunk.embed_norm", f"{whole}.embeddings.norm")
    for stage, count in enumerate(config.stage_layers):
        theirs = f"{whole}.encoder.layers.{stage}"
        for index in range(count):
            yield from _block(f"trunk.stages.{stage}.{index}", f"{theirs}.blocks.{index}", config)
        if stage + 1 < len(config.stage_layers):
            merging = f"trunk.mergings.{stage}"
            yield from layer(f"{merging}.norm", f"{theirs}.downsample.norm")
            yield f"{merging}.reduce.weight", f"{theirs}.downsample.reduction.weight", same
    yield from layer("trunk.norm", f"{whole}.layernorm")
    yield from layer("head.word_fc", "classifier")


def _block(ours: str, theirs: str, config: SoTConfig) -> Iterator[Row]:
    attention = f"{theirs}.attention.self"
    names = ("query", "key", "value")
    mine, second = f"{ours}.attention", config.trunk == "swinv2"
    yield from joined(f"{mine}.qkv", attention, names, bias=config.qkv_bias and not second)
    if second:
        if config.qkv_bias:
            biases = (f"{attention}.query.bias", f"{attention}.value.bias")
            yield f"{mine}.qkv.bias", biases, _without_key
        yield f"{mine}.log_scale", f"{attention}.logit_scale", same
        mlp = f"{attention}.continuous_position_bias_mlp"
        yield from layer(f"{mine}.position_bias.0", f"{mlp}.0")
        yield f"{mine}.position_bias.2.weight", f"{mlp}.2.weight", same
    else:
        yield f"{mine}.relative", f"{attention}.relative_position_bias_table", same
    for part, other in LAYERS.items():
        yield from layer(f"{ours}.{part}", f"{theirs}.{other}")


def _without_key(query: "Tensor", value: "Tensor") -> "Tensor":
    """Return the bias of queries, keys and values; Swin V2 has none for its keys."""
    import torch

    return torch.cat((query, torch.zeros_like(query), value))
