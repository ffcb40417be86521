# SPDX-License-Identifier: Apache-2.0
"""Swin and Swin V2 with the names of the authors or timm; Swin also with torchvision's or SoT's."""

import re
from typing import Any

from saccade.core.errors import Damaged, SaccadeError
from saccade.models.official.authors_images import authors_images
from saccade.models.official.conversion import Converted, Official, Reading
from saccade.models.official.embeddings import NOTES, embedding_of
from saccade.models.official.sot import converted, imagenet
from saccade.models.official.sot_head_keys import has_head, read_head
from saccade.models.official.vit_keys import (
    block_rules,
    hint,
    is_torchvision,
    published_side,
    timm_reading,
)

_BLOCK = r"layers\.(\d+)\.blocks\.(\d+)\."
_RULES = (
    (r"patch_embed\.proj\.(weight|bias)", r"trunk.embed.\1"),
    (r"patch_embed\.norm\.(weight|bias)", r"trunk.embed_norm.\1"),
    (r"norm\.(weight|bias)", r"trunk.norm.\1"),
    *block_rules(_BLOCK, r"trunk.stages.\1.\2."),
    (
        _BLOCK + r"attn\.relative_position_bias_table",
        r"trunk.stages.\1.\2.attention.relative",
    ),
    (_BLOCK + r"attn\.logit_scale", r"trunk.stages.\1.\2.attention.log_scale"),
    (_BLOCK + r"attn\.cpb_mlp\.(.+)", r"trunk.stages.\1.\2.attention.position_bias.\3"),
)
_FIRST = "layers.0.blocks.0.attn"
_LOG_SCALE = f"{_FIRST}.logit_scale"  # only a Swin V2 has it


def convert(official: Official) -> Converted:
    """Read a Swin, whose tokens are averaged and classified, or pooled by SoT's head.

    Without a classifier, it becomes an embedding of family 'sparo'.

    The image is 224 pixels wide (384 with windows of 12; of a Swin V2, 256) unless --config has
    {"img_size": ...}. The windows of a Swin V2 are in its name.

    Raises: SaccadeError if the file is not a Swin.
    Source: Liu et al. 2021 and 2022, the authors' names, timm's and torchvision's.
    """
    reading = timm_reading(official)
    fields = _trunk(reading, official)
    width = fields["dim"] * 2 ** (len(fields["stage_layers"]) - 1)
    notes: tuple[str, ...] = ()
    place = next(
        (prefix for prefix in ("classifier.", "head.", "") if has_head(reading, prefix)), None
    )
    if place is None:
        if not any(key.startswith("head.") for key in reading.tensors):
            return _embedding(official, reading, fields)
        # Later releases of timm have the classifier one level deeper.
        key = "head.fc" if "head.fc.weight" in reading.tensors else "head"
        fields |= {
            "pooling": "gap",
            "fusion": "visual",
            "classes": reading.shape(f"{key}.weight")[0],
        }
        own = key.replace(".", r"\.") + r"\.(weight|bias)"
        reading.rename(((own, r"head.word_fc.\1"),))
    else:
        head, notes = read_head(reading, place, width, official.config)
        fields |= head | {"fusion": "visual"}
    config = imagenet(fields)
    images = authors_images("swin", config)
    if is_torchvision(official.backbone or official.tensors):
        sizes = {"dim": config.dim, "layers": sum(config.stage_layers)}
        images = authors_images("torchvision swin", config, **sizes)
    return converted(official, reading, config, images, notes)


def _embedding(official: Official, reading: Reading, fields: dict[str, Any]) -> Converted:
    """Return the mean of the tokens as an embedding, if the file has no classifier."""
    config = imagenet(fields | {"pooling": "gap", "fusion": "visual", "classes": 1})
    embedding = embedding_of(reading, config.shape, "mean")
    images = authors_images("swin", config)
    return reading.converted(official, "sparo", embedding, images, (NOTES["mean"],))


def _trunk(reading: Reading, official: Official) -> dict[str, Any]:
    dim, channels, patch, _ = reading.shape("patch_embed.proj.weight")
    stages = reading.depth(r"layers\.(\d+)\.blocks\.")
    second = _LOG_SCALE in reading.tensors
    windows = windows_of(official) if second else {"window": _window(reading)}
    usual = 256 if second else 384 if windows["window"] == 12 else 224
    side = hint(official.config, "img_size", default=published_side(official.config) or usual)
    if not isinstance(side, int):
        raise SaccadeError(
            f"{official.path}: img_size is {side!r}, expected a whole number. Correct the JSON."
        )
    reading.rename(_RULES)
    if second:
        _put_biases(reading)
    _mergings(reading)
    computed = "recomputed from the window and the image size"
    reading.ignore(r".*\.(relative_position_index|relative_coords_table|attn_mask)", computed)
    heads = _LOG_SCALE if second else f"{_FIRST}.relative_position_bias_table"
    return windows | {
        "trunk": "swinv2" if second else "swin",
        "dim": dim,
        "channels": channels,
        "patch_px": patch,
        "height_px": side,
        "width_px": side,
        "stage_layers": [
            reading.depth(rf"layers\.{stage}\.blocks\.(\d+)\.") for stage in range(stages)
        ],
        "stage_heads": [
            reading.shape(heads.replace("layers.0.", f"layers.{stage}."))[0 if second else 1]
            for stage in range(stages)
        ],
        "qkv_bias": f"{_FIRST}.{'q_bias' if second else 'qkv.bias'}" in reading.tensors,
    }


def _window(reading: Reading) -> int:
    """Return the window of a Swin, which the table of its biases tells."""
    name = "relative_position_bias_table"
    offsets, _ = reading.shape(f"{_FIRST}.{name}")
    window = (round(offsets**0.5) + 1) // 2
    if (2 * window - 1) ** 2 != offsets:
        raise Damaged(
            reading.path,
            f"{name} has {offsets} rows, expected the square of an odd number",
        )
    return window


def windows_of(official: Official) -> dict[str, Any]:
    """Return the window of a Swin V2, and those before it was fine-tuned; its tensors tell neither.

    They are in timm's name of the model (window8, or window12to16), unless its arguments differ.
    Raises: SaccadeError if the JSON has no such name.
    """
    own = hint(official.config, "model_args", default={})
    if "window_size" in own:
        trained = own.get("pretrained_window_sizes") or ()
        trained = trained if isinstance(trained, list) and any(trained) else ()
        return {"window": own["window_size"], "trained_windows": trained}
    name = str(hint(official.config, "architecture", default=""))
    match = re.search(r"_window(\d+)(?:to(\d+))?(?:_|$)", name)
    if match is None:
        raise SaccadeError(
            f"{official.path}: the tensors of a Swin V2 do not tell its windows. Pass the name of "
            'the model with --config, such as {"architecture": "swinv2_tiny_window8_256"}.'
        )
    first, later = int(match[1]), int(match[2] or match[1])
    if later == first:
        return {"window": first}
    # All of the authors' models had windows of half the size in the last of four stages.
    return {"window": later, "trained_windows": [first, first, first, first // 2]}


def _put_biases(reading: Reading) -> None:
    """Put the biases of queries, keys and values; a Swin V2 has none for its keys."""
    import torch

    for key, query in reading.tensors.items():
        if match := re.fullmatch(_BLOCK + r"attn\.q_bias", key):
            other = key.replace("q_bias", "v_bias")
            reading.shape(other)
            biases = (query, torch.zeros_like(query), reading.tensors[other])
            ours = f"trunk.stages.{match[1]}.{match[2]}.attention.qkv.bias"
            reading.put(ours, torch.cat(biases), key, other)


def _mergings(reading: Reading) -> None:
    """Put the mergings: at the end of a stage; in later timm at the start of the next."""
    later = 0 if any(key.startswith("layers.0.downsample.") for key in reading.tensors) else 1
    for key, value in reading.tensors.items():
        if match := re.fullmatch(r"layers\.(\d+)\.downsample\.(norm|reduction)\.(\w+)", key):
            part = "norm" if match[2] == "norm" else "reduce"
            ours = f"trunk.mergings.{int(match[1]) - later}.{part}.{match[3]}"
            reading.put(ours, value, key)
