# SPDX-License-Identifier: Apache-2.0
"""The image tower of SigLIP and SigLIP 2 with the names of transformers.

Models of SigLIP 2 for images of one size are the same network (model_type siglip).

Source: modeling_siglip.py and configuration_siglip.py of transformers 4.57 and 5.23; Zhai et al.
        2023, Sigmoid Loss for Language Image Pre-Training.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from saccade.models.official.clip import layer, same, third
from saccade.models.official.conversion import Converted, Official, Reading, Row
from saccade.models.official.embeddings import NOTES, embedding_of
from saccade.models.official.hugging_face import Values, architecture_of, check_task, labels_of
from saccade.models.official.hugging_face_clip import block_rows
from saccade.models.official.hugging_face_images import processor_images
from saccade.models.sot.config import SoTConfig
from saccade.models.sparo.config import Pooling

_BOTH, _ALONE, _CLASSES = "SiglipModel", "SiglipVisionModel", "SiglipForImageClassification"
_USUAL: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": True,
}
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_UNUSED = {
    r"text_model\..+|logit_(scale|bias)": "the text tower, whose SentencePiece vocabulary saccade "
    "does not read",
    r".*\.position_ids": "counts from 0",
}


def convert(official: Official) -> Converted:
    """Read a classifier as family 'sot', the image tower of others as images only of 'sparo'.

    Raises: SaccadeError if an option of its configuration is not supported.
    """
    name = architecture_of(official, (_BOTH, _ALONE, _CLASSES))
    values = _tower(official, official.config or {})
    values.require("hidden_act", *_ACTIVATIONS)
    values.require("vision_use_head", True, False)
    images = processor_images(official, values.count("num_channels"))
    shown = images.preprocessing
    if (shown.height_px, shown.width_px) != values.sides("image_size"):
        found = f"{[shown.height_px, shown.width_px]}, the input of preprocessor_config.json"
        raise values.refused("image_size", found)
    reading = Reading(official.path, official.tensors)
    # transformers 5 saves SiglipVisionModel without the prefix.
    prefix = "" if "post_layernorm.weight" in official.tensors else "vision_model."
    classes = reading.shape("classifier.weight")[0] if name == _CLASSES else 1
    side = values.side("patch_size")
    config = SoTConfig(
        height_px=shown.height_px,
        width_px=shown.width_px,
        channels=shown.channels,
        mean=shown.mean,
        std=shown.std,
        patch_px=side,
        remainder=bool(shown.height_px % side or shown.width_px % side),
        patches_only=True,
        activation=_ACTIVATIONS[values["hidden_act"]],  # type: ignore[arg-type]
        dim=values.count("hidden_size"),
        layers=values.count("num_hidden_layers"),
        heads=values.count("num_attention_heads"),
        mlp_dim=values.count("intermediate_size"),
        qkv_bias=True,
        layer_norm_epsilon=values.number("layer_norm_eps"),
        pooling="gap",
        fusion="visual",
        classes=classes,
    )
    reading.take(_trunk(config, prefix))
    for pattern, reason in _UNUSED.items():
        reading.ignore(pattern, reason)
    if name == _CLASSES:
        check_task(values)
        reading.take(layer("head.word_fc", "classifier"))
        reading.ignore(r".*\bhead\..+", "the attention pooling, which the classifier does not read")
        official = replace(official, labels=labels_of(official, classes))
        return reading.converted(official, "sot", config, images)
    if values["vision_use_head"]:
        reading.take(_pool(f"{prefix}head"))
    pooling: Pooling = "map" if values["vision_use_head"] else "mean"
    embedding = embedding_of(reading, config.shape, pooling)
    return reading.converted(official, "sparo", embedding, images, (NOTES[pooling],))


def _tower(official: Official, config: Mapping[str, Any]) -> Values:
    """Return the values of the image tower, which has them at the top level if it is alone."""
    inner = config.get("vision_config")
    given, where = dict(config), "config.json"
    if isinstance(inner, Mapping):
        given, where = dict(inner), "vision_config of config.json"
    task = {"problem_type": config.get("problem_type")}
    return Values(f"{official.path}: {where}", given | task, _USUAL)


def _trunk(config: SoTConfig, theirs: str) -> Iterator[Row]:
    yield "trunk.position", f"{theirs}embeddings.position_embedding.weight", same
    yield from layer("trunk.embed.project", f"{theirs}embeddings.patch_embedding")
    yield from block_rows("trunk", theirs, config.layers)
    yield from layer("trunk.norm", f"{theirs}post_layernorm")


def _pool(theirs: str) -> Iterator[Row]:
    yield "image_pool.query", f"{theirs}.probe", lambda x: x.flatten(0, -2)
    for place, name in enumerate("qkv"):
        for leaf in ("weight", "bias"):
            yield f"image_pool.{name}.{leaf}", f"{theirs}.attention.in_proj_{leaf}", third(place)
    yield from layer("image_pool.out", f"{theirs}.attention.out_proj")
    yield from layer("image_pool.norm_mlp", f"{theirs}.layernorm")
    yield from layer("image_pool.widen", f"{theirs}.mlp.fc1")
    yield from layer("image_pool.narrow", f"{theirs}.mlp.fc2")
