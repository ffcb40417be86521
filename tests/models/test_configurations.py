# SPDX-License-Identifier: Apache-2.0
"""Configurations of every family: they survive JSON, and one that cannot be is refused by field."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from small_nac import KINDS, SMALL

from saccade.core.errors import SaccadeError
from saccade.models.catalogue import presets
from saccade.models.families import FAMILIES, build
from saccade.models.nac.config import NACConfig
from saccade.models.sot.config import SoTConfig

BASES: dict[str, Any] = {
    "nac": NACConfig(**SMALL),
    "sot": SoTConfig(dim=16, heads=2, layers=2, mlp_dim=24, pool_heads=2, m=3, n=4, gcp_dim=5),
    **{
        name.rpartition("-")[0]: presets(name.rpartition("-")[0])[name]
        for name in ("sparo-tiny", "slot-attention-tiny", "vqa-tiny", "captioner-tiny")
    },
}
BASES["vqa"] = replace(
    BASES["vqa"], features="given", layout="flat", grid=(4, 5), rows=14, feature_dim=12, boxes=5,
    box_dim=7, layers=2,
)  # fmt: skip
# What is out of range whatever the others are, in the order of the families.
VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "nac": {
        "modules": (0, 4097, 2.5, True), "heads": (3, 0), "patch_px": (3,), "channels": (2,),
        "epsilon": (0.0, "wide"), "p_min": (0.0, 0.99999),
        "graph_prior": ("tree", "watts-strogatz"),
        "connectivity": ("sparse",), "module_dropout": (0.0, 1.5), "std": ((0.0,), (1.0, 1.0)),
        "generator_modules": (32,), "input_sets": (3,), "positions": ("rotary",),
        "local_layers": (1,), "local_width": (4,),
    },
    "sot": {"patch_px": (3,), "heads": (3,), "alpha": (0.0,), "normalization": ("sqrt",)},
    "sparo": {
        "sparo_type": ("sem:norm",), "slot_heads": (3,), "value_dim": (5,), "kept": ([3, 1],),
        "words": (["a"],), "bottleneck_dim": (4,),
    },
    "slot-attention": {"attention": ("rotated",), "slots": ("many",)},
    "vqa": {"attention": ("tv",), "heads": (5,), "rows": (0,), "words": (["red"],)},
    "captioner": {
        "attention": ("entmax",), "height_px": (20,), "strides": ((2,),), "beam": (0,),
        "lam": (float("nan"), -1.0),
    },
}  # fmt: skip
# What does not go together, and the words that say so.
SWIN: dict[str, Any] = {"trunk": "swin", "stage_layers": (1,), "stage_heads": (2,)}
RIDGE = r"svpn_ridge is 0\.1, expected 0 unless the head has"
TOGETHER: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("nac", {"input": "tokens"}, "token_dim is "),
    ("nac", {"input": "points"}, "max_tokens is "),
    ("nac", {"input": "characters", "max_tokens": 4}, "vocabulary is "),
    ("nac", {"input": "characters", "max_tokens": 4, "vocabulary": ("a", "a")}, "vocabulary is "),
    ("nac", {"conditional": True, "condition_tokens": 3}, "condition_tokens is "),
    ("nac", {"activation": "relu", "ffn_gate": "geglu"}, "is 'relu', expected 'gelu' if ffn_gate"),
    ("nac", {"prior_form": "official", "graph_prior": "erdos-renyi"}, "expected 'standard'"),
    ("sot", SWIN, "fusion is "),
    ("sot", {"trunk": "swin", "fusion": "visual"}, "stage_layers is "),
    ("sot", {"token_embedding": "densenet"}, "patch_px is "),
    ("sot", {"fusion": "concat", "class_projection": 8}, "class_projection is "),
    ("sot", {"input": "tokens", "distillation": True}, "distillation is "),
    ("sot", {"svpn_ridge": 0.1, "normalization": "svpn-fast"}, RIDGE),
    ("sot", {"svpn_ridge": 0.1, "fusion": "class"}, RIDGE),
    ("sot", {"svpn_ridge": 0.1, "pooling": "gap"}, RIDGE),
    ("sparo", {"height_px": 2, "width_px": 2, "patch_px": 4}, "height_px is "),
    ("sparo", {"attn_dim": 0, "share_queries": True}, "share_queries is "),
    ("sparo", {"text": False, "share_queries": True}, "share_queries is "),
    ("sparo", {"pooling": "attention", "text_pooler_heads": 3}, "text_pooler_heads is "),
    ("sparo", {"pooling": "attention", "pooler_heads": 3, "text_pooler_heads": 2}, "pooler_heads"),
    ("sparo", {"pooling": "gap", "text_mean_of_queries": True}, "text_mean_of_queries is "),
    ("slot-attention", {"heads": 2}, "heads is 2, expected 1 unless attention is 'sa'"),
    ("slot-attention", {"encoder_strides": (1,)}, "encoder_strides is .* expected 2 values, one p"),
    ("slot-attention", {"encoder_kernels": (5, 2.5)}, "encoder_kernels is .* a whole number"),
    ("slot-attention", {"encoder": "resnet", "resnet_width": 48}, "is 48, expected a multiple"),
    ("slot-attention", {"rounds": 0, "attention": "sa"}, "rounds is 0, expected at least 1"),
    ("captioner", {"words": ("a", "a")}, "more than once"),
    ("vqa", {"image": "both", "boxes": 0}, "boxes is "),
    ("vqa", {"features": "image", "layout": "grid", "grid": [7, 7]}, "grid is "),
)


def misfits() -> Iterator[tuple[str, dict[str, Any], str]]:
    for family, values in VALUES.items():
        for name, wrong in values.items():
            said = "tokens" if (family, name) == ("vqa", "words") else name
            yield from ((family, {name: value}, f"{said} is ") for value in wrong)
    yield from TOGETHER


@pytest.mark.parametrize(("family", "changes", "words"), [*misfits()])
def test_what_cannot_be_is_refused(family: str, changes: dict[str, Any], words: str) -> None:
    base = BASES[family]
    with pytest.raises(SaccadeError, match=rf"\w+: (.* )?{words}"):
        type(base).from_dict(base.to_dict() | changes)
    with pytest.raises(SaccadeError, match=words):
        replace(base, **changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_size_survives_json_and_refuses_strangers(family: str) -> None:
    colored = replace(BASES["nac"], **KINDS["colour"])
    for known in (BASES[family], *presets(family).values(), colored):
        assert type(known).from_dict(known.to_dict()) == known
    with pytest.raises(SaccadeError, match="unknown field 'wings'"):
        type(BASES[family]).from_dict({"wings": 2})
    assert "wings" not in {field.name for field in fields(BASES[family])}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_follow_the_seed_alone(family: str) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, same, other = (
        build(family, replace(BASES[family], seed=seed).to_dict()).state_dict()
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(value, same[name]) for name, value in one.items())
    assert any(not torch.equal(value, other[name]) for name, value in one.items())
