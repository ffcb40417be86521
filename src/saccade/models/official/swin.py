# SPDX-License-Identifier: Apache-2.0
"""Swin checkpoints with the authors', timm's or torchvision's names, or with SoT's head."""

import re
from typing import Any

from saccade.errors import SaccadeError
from saccade.models.official.authors_images import authors_images
from saccade.models.official.conversion import Converted, Official, Reading
from saccade.models.official.sot import converted, imagenet
from saccade.models.official.sot_head_keys import has_head, read_head
from saccade.models.official.vit_keys import block_rules, hint, is_torchvision, timm_reading

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
)


def convert(official: Official) -> Converted:
    """Read a Swin, whose tokens are averaged and classified, or pooled by SoT's head.

    The image is 224 pixels wide (384 with windows of 12) unless --config has {"img_size": ...}.
    Raises: SaccadeError if the file is not a Swin.
    Source: Liu et al. 2021, the authors' names, timm's and torchvision's.
    """
    reading = timm_reading(official)
    fields = _trunk(reading, official)
    width = fields["dim"] * 2 ** (len(fields["stage_layers"]) - 1)
    notes: tuple[str, ...] = ()
    place = next(
        (prefix for prefix in ("classifier.", "head.", "") if has_head(reading, prefix)), None
    )
    if place is None:
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


def _trunk(reading: Reading, official: Official) -> dict[str, Any]:
    dim, channels, patch, _ = reading.shape("patch_embed.proj.weight")
    stages = reading.depth(r"layers\.(\d+)\.blocks\.")
    bias = "layers.{}.blocks.0.attn.relative_position_bias_table"
    offsets, _ = reading.shape(bias.format(0))
    window = (round(offsets**0.5) + 1) // 2
    published = (hint(official.config, "pretrained_cfg", "input_size") or [None])[-1]
    usual = published or (384 if window == 12 else 224)
    side = hint(official.config, "img_size", default=usual)
    if (2 * window - 1) ** 2 != offsets or not isinstance(side, int):
        raise SaccadeError(
            f"{official.path}: relative_position_bias_table has {offsets} rows, expected the "
            f"square of an odd number; img_size is {side!r}, expected a whole number."
        )
    reading.rename(_RULES)
    _mergings(reading)
    computed = "recomputed from the window and the image size"
    reading.ignore(r".*\.(relative_position_index|attn_mask)", computed)
    return {
        "trunk": "swin",
        "dim": dim,
        "channels": channels,
        "patch_px": patch,
        "window": window,
        "height_px": side,
        "width_px": side,
        "stage_layers": [
            reading.depth(rf"layers\.{stage}\.blocks\.(\d+)\.") for stage in range(stages)
        ],
        "stage_heads": [reading.shape(bias.format(stage))[1] for stage in range(stages)],
        "qkv_bias": "layers.0.blocks.0.attn.qkv.bias" in reading.tensors,
    }


def _mergings(reading: Reading) -> None:
    """Put the mergings: at the end of a stage; in later timm at the start of the next."""
    later = 0 if any(key.startswith("layers.0.downsample.") for key in reading.tensors) else 1
    for key, value in reading.tensors.items():
        if match := re.fullmatch(r"layers\.(\d+)\.downsample\.(norm|reduction)\.(\w+)", key):
            part = "norm" if match[2] == "norm" else "reduce"
            ours = f"trunk.mergings.{int(match[1]) - later}.{part}.{match[3]}"
            reading.put(ours, value, key)
