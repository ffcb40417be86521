# SPDX-License-Identifier: Apache-2.0
"""torchvision's names of ViT and Swin as timm's."""

import re
from collections.abc import Iterable

_VIT = (
    (r"class_token", "cls_token"),
    (r"encoder\.pos_embedding", "pos_embed"),
    (r"conv_proj\.(.+)", r"patch_embed.proj.\1"),
    (r"encoder\.ln\.(.+)", r"norm.\1"),
    (r"heads\.head\.(.+)", r"head.\1"),
    (r"heads\.pre_logits\.(.+)", r"pre_logits.fc.\1"),
    *(
        (rf"encoder\.layers\.encoder_layer_(\d+)\.{theirs}", rf"blocks.\1.{ours}")
        for theirs, ours in (
            (r"ln_1\.(.+)", r"norm1.\2"),
            (r"self_attention\.in_proj_(.+)", r"attn.qkv.\2"),
            (r"self_attention\.out_proj\.(.+)", r"attn.proj.\2"),
            (r"ln_2\.(.+)", r"norm2.\2"),
            (r"mlp\.(?:0|linear_1)\.(.+)", r"mlp.fc1.\2"),
            (r"mlp\.(?:3|linear_2)\.(.+)", r"mlp.fc2.\2"),
        )
    ),
)


def is_torchvision(keys: Iterable[str]) -> bool:
    """Whether a file's keys are those of torchvision's ViT or Swin."""
    return not {"conv_proj.weight", "features.0.0.weight"}.isdisjoint(keys)


def timm_name(key: str) -> str:
    """timm's name of a tensor of torchvision's ViT or Swin; another one's own name."""
    for pattern, ours in _VIT:
        if match := re.fullmatch(pattern, key):
            return match.expand(ours)
    match = re.fullmatch(r"features\.(\d+)\.(.+)", key)
    return _swin_name(int(match[1]), match[2]) if match else key


def _swin_name(place: int, inside: str) -> str:
    """Patches at 0, then stages at odd places and the merging behind each at even ones."""
    if place == 0:
        part, leaf = inside.split(".", 1)
        return f"patch_embed.{'proj' if part == '0' else 'norm'}.{leaf}"
    stage, merging = divmod(place - 1, 2)
    if merging:
        return f"layers.{stage}.downsample.{inside}"
    inside = inside.replace(".mlp.0.", ".mlp.fc1.").replace(".mlp.3.", ".mlp.fc2.")
    return f"layers.{stage}.blocks.{inside}"
