# SPDX-License-Identifier: Apache-2.0
"""Named sizes of the NAC, as fields of its configuration."""

from typing import Any

from saccade.models.data.listops import VOCABULARY

_COLOUR: dict[str, Any] = {"channels": 3, "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
_WIDE: dict[str, Any] = {"dim": 128, "code_dim": 64, "ffn_dim": 256}

# Of the last five the paper states the input, the classes, and for ImageNet 1,024 modules and 8
# propagator layers; the widths are this package's.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "modules": 16,
        "readout_modules": 2,
        "dim": 32,
        "code_dim": 16,
        "signature_dim": 8,
        "propagator_layers": 1,
        "heads": 2,
        "ffn_dim": 48,
    },
    "small": {},
    "bench": dict(
        height_px=32,
        width_px=32,
        patch_px=4,
        modules=256,
        propagator_layers=4,
        signature_init="random",
        **_COLOUR,
        **_WIDE,
    ),
    "tiny-imagenet": dict(
        height_px=64,
        width_px=64,
        patch_px=8,
        tokenizer="conv",
        modules=256,
        propagator_layers=8,
        classes=200,
        **_COLOUR,
        **_WIDE,
    ),
    "imagenet": dict(
        height_px=224,
        width_px=224,
        patch_px=28,
        tokenizer="conv",
        modules=1024,
        propagator_layers=8,
        classes=1000,
        **_COLOUR,
        **_WIDE,
    ),
    "points": dict(
        input="points", max_tokens=2048, modules=256, propagator_layers=4, classes=40, **_WIDE
    ),
    "listops": dict(
        input="characters",
        vocabulary=VOCABULARY,
        max_tokens=2000,
        modules=256,
        propagator_layers=4,
        **_WIDE,
    ),
    "text-bytes": dict(
        input="bytes", max_tokens=4000, modules=256, propagator_layers=4, classes=2, **_WIDE
    ),
}
