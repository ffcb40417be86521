# SPDX-License-Identifier: Apache-2.0
"""A model of each family that is small enough for tests, with random weights and data."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from quick_gate import FEW_SAMPLES
from traced_graphs import traced_once

from saccade.models.budget import BudgetLike
from saccade.models.checkpoint import Checkpoint, save
from saccade.models.families import build, family_class
from saccade.models.preprocessing import Preprocessing

WORDS = ("a", "red", "blue", "circle", "square", "photo", "of", "what", "is", "left", ".", "?")
_MASKS = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "sot": {
        "height_px": 16, "width_px": 16, "channels": 3, "patch_px": 8, "dim": 24, "layers": 1,
        "heads": 2, "mlp_dim": 32, "classes": 5, "token_embedding": "naive", "pool_heads": 2,
        "m": 6, "n": 6, **_MASKS,
    },
    "sparo": {
        "height_px": 16, "width_px": 16, "patch_px": 8, "image_width": 24, "image_layers": 1,
        "image_heads": 2, "image_hidden": 32, "context_length": 8, "text_width": 16,
        "text_layers": 1, "text_heads": 2, "text_hidden": 24, "tokenizer": "words",
        "words": WORDS, "vocabulary": 4 + len(WORDS), "end_token": 2, "slots": 4, "slot_dim": 6,
        "embed_dim": 24, **_MASKS,
    },
    "slot-attention": {
        "height_px": 16, "width_px": 16, "encoder_channels": (12,), "encoder_kernels": (5,),
        "encoder_strides": (1,), "attention": "ts-sa", "rounds": 2, "slots": 3, "slot_dim": 12,
        "qkv_dim": 16, "mlp_dim": 16, "grid_mlp_dim": 16, "scales_factor": 5.0,
        "initial_slots": "gaussian", "decoder_height": 16, "decoder_width": 16,
        "decoder_channels": (16,),
    },
    "vqa": {
        "height_px": 16, "width_px": 16, "grid": (2, 2), "words": WORDS,
        "tokens": 4 + len(WORDS), "question_length": 6, "word_dim": 12, "dim": 16, "heads": 2,
        "layers": 1, "hidden": 24, "pool_hidden": 12, "pool_dim": 16, "answers": 5,
        "feature_dim": 16, **_MASKS,
    },
    "captioner": {
        "attention": "sparsemax", "words": WORDS, "max_length": 6, "height_px": 16,
        "width_px": 16, "widths": (8, 12), "strides": (4, 1), "grid_height": 4, "grid_width": 4,
        "feature_dim": 12, "dim": 12, "attention_dim": 8, "hidden_dim": 16, "embedding_dim": 8,
    },
}  # fmt: skip
LABELS = {family: tuple(f"answer {index}" for index in range(5)) for family in ("sot", "vqa")}
BUDGETS: dict[str, tuple[BudgetLike, ...]] = {
    "sot": ("exact", "class"), "sparo": (1, 2 / 3, Fraction(1, 6)), "slot-attention": ("t2", "t1"),
}  # fmt: skip
OUTPUTS = dict.fromkeys(CONFIGS, ()) | {"slot-attention": ("reconstruction",)}
SAMPLES = 256


def tiny(family: str, path: Path) -> Checkpoint:
    """Save an untrained model of that family."""
    config = family_class(family).config_class(**CONFIGS[family])
    model = build(family, config.to_dict()).eval()
    rng = np.random.default_rng(0)
    shape = (SAMPLES, config.height_px, config.width_px, 3)
    calibration = {"image": rng.integers(0, 256, shape, dtype=np.uint8)}
    if family == "sparo":
        words = rng.integers(4, config.vocabulary, (SAMPLES, config.context_length))
        words[:, 0], words[:, -1] = 1, config.end_token
        calibration["tokens"] = words
    if family == "slot-attention":
        calibration["masks"] = rng.integers(0, 3, shape[:3], dtype=np.uint8)
    if family == "vqa":
        calibration["question"] = rng.integers(4, config.tokens, (SAMPLES, config.question_length))
    return save(
        path,
        family=family,
        config=config.to_dict(),
        weights=model.state_dict(),
        preprocessing=Preprocessing(
            config.height_px, config.width_px, 3, tuple(config.mean), tuple(config.std)
        ),
        labels=LABELS.get(family, ()),
        calibration=calibration,
        card={"data": "random", "seed": 0},
    )


def exported(
    family: str,
    place: Path,
    precision: tuple[str, ...] = ("fp32",),
    *,
    budget: tuple[BudgetLike, ...] | None = None,
    inline_ops: bool = False,
) -> Path:
    """Export that model; the gate uses few samples here, because it has separate tests."""
    from saccade.exporter.export import ExportOptions, export

    tiny(family, place / f"{family}.safetensors")
    options = ExportOptions(
        out=place / "folder",
        name=family,
        budget=BUDGETS.get(family, ()) if budget is None else budget,
        inline_ops=inline_ops,
        outputs=OUTPUTS[family],
        precision=precision,
    )
    with traced_once():
        return export(place / f"{family}.safetensors", options, FEW_SAMPLES).folder
