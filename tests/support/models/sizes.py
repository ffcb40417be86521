# SPDX-License-Identifier: Apache-2.0
"""Fields of the smallest model of each family, for `set`: the data decides what is not here."""

from typing import Any

TINY: dict[str, dict[str, Any]] = {
    "sot": {"dim": 8, "heads": 1, "layers": 1, "mlp_dim": 8, "pool_heads": 1, "m": 2, "n": 2},
    "nac": {"modules": 4, "dim": 8, "propagator_layers": 1},
    "sparo": {
        **dict.fromkeys(("image_width", "text_width", "image_hidden", "text_hidden"), 8),
        **dict.fromkeys(("image_layers", "text_layers", "image_heads", "text_heads"), 1),
    },
    "slot-attention": {
        **dict.fromkeys(("slot_dim", "qkv_dim", "mlp_dim", "grid_mlp_dim"), 8),
        "encoder_channels": [8],
        "encoder_kernels": [3],
        "encoder_strides": [2],
        "decoder_channels": [8],
    },
    "vqa": {
        **dict.fromkeys(("dim", "hidden", "word_dim", "feature_dim", "pool_hidden", "pool_dim"), 8),
        "grid": [2, 2],
        "heads": 2,
        "layers": 1,
        "attention": "sparsemax",
    },
    "captioner": {
        **dict.fromkeys(("dim", "feature_dim", "hidden_dim"), 8),
        **dict.fromkeys(("attention_dim", "embedding_dim"), 4),
        "widths": [4, 4, 8],
        "attention": "sparsemax",
    },
}
# A SPARO whose towers have two blocks, so that a read-out may replace the last one.
TOWERS: dict[str, Any] = {
    **dict.fromkeys(("image_width", "text_width", "image_hidden", "text_hidden"), 16),
    **dict.fromkeys(("image_layers", "text_layers", "image_heads", "text_heads"), 2),
    "patch_px": 8,
    "embed_dim": 16,
    "slots": 4,
    "slot_dim": 6,
    "attn_dim": 8,
}
