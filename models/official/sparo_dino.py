# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of DINO with SPARO's read-out instead of the last block: images only."""

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.models.official.authors_images import authors_images
from saccade.models.official.clip import (
    TIED,
    Row,
    is_copy,
    layer,
    model_json,
    read_out,
    same,
)
from saccade.models.official.conversion import Converted, Official, Reading
from saccade.models.official.open_clip import put_buffers
from saccade.models.official.sparo_clip import slot_fields
from saccade.models.official.vit_keys import TIMM_BLOCK
from saccade.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from saccade.models.sparo.config import SparoConfig

if TYPE_CHECKING:
    from torch import Tensor

NOTES = (
    "keys inferred, no official file seen: DINO's backbone with `sparo.*`",
    "the embedding is the concatenation of the slots, brought to length 1 as k-NN compares it",
)
_HEAD_WIDTH = 64  # of all ViTs that DINO trains


def convert(official: Official) -> Converted:
    """Read the image tower of one network (teacher or student), without its training head.

    Raises: SaccadeError if the file has no read-out, or is not a ViT for square images.
    Source: Vani et al. 2024, section 3.4; keys as DINO's vision transformer names them.
    """
    tensors = {_bare(key): value for key, value in official.tensors.items()}
    prefix = next((p for p in ("backbone.", "") if f"{p}cls_token" in official.tensors), "")
    for key in ("cls_token", "pos_embed", "patch_embed.proj.weight", "sparo.q_emb", "norm.weight"):
        if key not in tensors:
            raise SaccadeError(
                f"{official.path}: has no {prefix}{key} (found {sorted(tensors)[:3]}). Expected "
                "one network of a DINO checkpoint with SPARO. Choose it with --checkpoint-key "
                "teacher or student."
            )
    json = model_json(official.path, official.config)
    config = _config(official.path, tensors, json)
    reading = Reading(official.path, tensors)
    reading.take(_rows(config), prefix)
    put_buffers(reading, config)
    images = authors_images("sparo-dino", config)
    for key in official.tensors:
        if key.startswith("head."):
            reading.ignored[key] = "DINO's training head"
        elif config.share_kv and key.startswith(f"{prefix}sparo.v."):
            reading.ignored[key] = TIED
    return reading.converted(official, "sparo", config, images, NOTES)


def _bare(key: str) -> str:
    return key.removeprefix("backbone.")


def _config(path: str, tensors: "dict[str, Tensor]", json: dict[str, Any]) -> SparoConfig:
    width, channels, patch, _ = tensors["patch_embed.proj.weight"].shape
    side = math.isqrt(tensors["pos_embed"].shape[1] - 1)
    if tensors["norm.weight"].shape[0] != width:
        raise SaccadeError(
            f"{path}: norm.weight has {tensors['norm.weight'].shape[0]} values, expected the "
            f"tokens' width {width}: a norm after the slots is not supported."
        )
    depth = {m.group(1) for key in tensors if (m := re.match(r"blocks\.(\d+)\.", key))}
    hidden = tensors.get("blocks.0.mlp.fc1.weight")
    values, keys = tensors.get("sparo.v.weight"), tensors["sparo.k.weight"]
    shared = values is None or is_copy(values, keys)
    fields = slot_fields(path, tensors, "sparo", json)
    # DINO has no temperature for single slots: k-NN normalizes the whole code.
    fields["sparo_type"] = json.get("sparo_type", "cont:norm")
    return SparoConfig(
        **fields,
        height_px=side * patch,
        width_px=side * patch,
        channels=channels,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        patch_px=patch,
        patch_bias="patch_embed.proj.bias" in tensors,
        pre_norm=False,
        image_width=width,
        image_layers=len(depth),
        image_heads=json["vision_cfg"].get("heads", max(1, width // _HEAD_WIDTH)),
        image_hidden=4 * width if hidden is None else hidden.shape[0],
        eps=1e-6,
        text=False,
        attn_dim=tensors["sparo.q_emb"].shape[-1],
        value_dim=0 if shared else tensors["sparo.proj.weight"].shape[1],
        share_kv=shared,
    )


def _rows(config: SparoConfig) -> Iterator[Row]:
    yield "image.class_token", "cls_token", lambda x: x.flatten()
    yield "image.position", "pos_embed", lambda x: x[0]
    yield "image.patches.weight", "patch_embed.proj.weight", same
    if config.patch_bias:
        yield "image.patches.bias", "patch_embed.proj.bias", same
    for i in range(config.image_layers):
        for theirs, ours in TIMM_BLOCK.items():
            yield from layer(f"image.blocks.{i}.{ours}", f"blocks.{i}.{theirs}")
    yield from layer("image_pool.norm", "norm")
    yield from read_out("image_pool.read_out", "sparo", config, "image")
