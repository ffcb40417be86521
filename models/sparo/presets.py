# SPDX-License-Identifier: Apache-2.0
"""Fields of the paper's models, of a small one that trains on two cores, and of a tiny one."""

from typing import Any

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Pictures of 40 x 40 px: 256 of them, for calibration, leave room for the weights in 3 MiB.
SMALL: dict[str, Any] = {
    "height_px": 40,
    "width_px": 40,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.25, 0.25, 0.25),
    "patch_px": 5,
    "image_width": 80,
    "image_layers": 4,
    "image_heads": 4,
    "image_hidden": 240,
    "text_width": 64,
    "text_layers": 3,
    "text_heads": 4,
    "text_hidden": 128,
    "tokenizer": "words",
    "end_token": 2,
    "embed_dim": 128,
    "slots": 16,
    "slot_dim": 16,
    "attn_dim": 24,
}
_TINY_WORDS = ("a", "red", "green", "blue", "circle", "square", "left", "of")

PRESET_FIELDS: dict[str, dict[str, Any]] = {
    "vit-b-32-sparo": {"reduce_depth": 1},
    "vit-b-16-sparo": {"reduce_depth": 1, "patch_px": 16},
    "vit-b-32-sparo-l128": {"reduce_depth": 1, "slots": 128},
    "vit-b-32": {"pooling": "cls"},
    "vit-b-16": {"pooling": "cls", "patch_px": 16},
    "vit-b-32-gap": {"pooling": "gap"},
    "vit-b-32-bottleneck": {"pooling": "cls", "bottleneck_dim": 64},
    "vit-b-32-fdt": {"pooling": "codebook"},
    "dino-vit-s-16-sparo": {
        "patch_px": 16,
        "patch_bias": True,
        "pre_norm": False,
        "image_width": 384,
        "image_heads": 6,
        "image_hidden": 1536,
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "eps": 1e-6,
        "text": False,
        "reduce_depth": 1,
        "sparo_type": "cont:norm",
    },
    "sparo-tiny": SMALL
    | {
        "height_px": 16,
        "width_px": 16,
        "patch_px": 4,
        "image_width": 32,
        "image_layers": 1,
        "image_hidden": 64,
        "context_length": 8,
        "vocabulary": len(_TINY_WORDS) + 4,
        "words": _TINY_WORDS,
        "text_width": 24,
        "text_layers": 1,
        "text_heads": 2,
        "text_hidden": 48,
        "slots": 8,
        "slot_dim": 4,
        "attn_dim": 8,
    },
}
