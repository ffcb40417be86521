# SPDX-License-Identifier: Apache-2.0
"""A misspelled key of --config is refused, or reported where a project's own JSON has many keys."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from places import TESTS

from saccade.core.errors import SaccadeError
from saccade.models.official.convert import ConvertOptions as Options
from saccade.models.official.convert import config_notes, official_from

GOLDEN = TESTS / "golden"


def test_a_misspelled_key_of_a_users_json_is_refused(tmp_path: Path) -> None:
    torch.save({"cls_token": torch.zeros(1)}, tmp_path / "vit.pth")
    (tmp_path / "c.json").write_text('{"num_head": 4}')
    options = Options(tmp_path / "o.safetensors", config=tmp_path / "c.json")
    with pytest.raises(SaccadeError, match=r"unknown key 'num_head'.* Did you mean num_heads\?"):
        official_from("vit", tmp_path / "vit.pth", options)
    # A source with a project's JSON only gets a note.
    (tmp_path / "c.json").write_text('{"quick_gleu": true}')
    official = official_from("open-clip", tmp_path / "vit.pth", options)
    assert official.notes == ("--config: 'quick_gleu' is not read. Did you mean quick_gelu?",)


@pytest.mark.parametrize("source", ["vit", "deit", "swin"])
def test_a_users_json_has_known_keys(source: str) -> None:
    assert config_notes(source, {"num_heads": 3, "img_size": 32}) == ()
    for given in ({"nothing_like_it": 1}, {"representationConfg": {}}):
        with pytest.raises(SaccadeError, match=next(iter(given))):
            config_notes(source, given)
    # timm's own JSON has keys that nobody reads, and those of the folder are known.
    timm = {"architecture": "vit_tiny", "first_conv": "x", "pretrained_cfg": {"crop_pc": 0.9}}
    assert config_notes(source, timm) == (
        "--config: 'pretrained_cfg.crop_pc' is not read. Did you mean pretrained_cfg.crop_pct?",
    )
    assert config_notes(source, {"first_conv": "x"}, beside={"first_conv": "y"}) == ()


@pytest.mark.parametrize(
    ("source", "given", "close"),
    [
        ("open-clip", {"model_cfg": {"vision_cfg": {"head_widht": 32}}}, "vision_cfg.head_width"),
        ("sparo-clip", {"share_query": False}, "share_queries"),
        ("sparo-dino", {"sparo_typ": "cont:norm"}, "sparo_type"),
        ("sot", {"ViTConfig": {"num_head": 4}}, "ViTConfig.num_heads"),
        (
            "nac",
            {"model": {"kwargs": {"latent_graph_kwargs": {"head_dimm": 4}}}},
            "latent_graph_kwargs.head_dim",
        ),
        ("transformers", {"num_attention_head": 4}, "num_attention_heads"),
    ],
)
def test_a_projects_json_is_never_refused(source: str, given: dict[str, Any], close: str) -> None:
    (note,) = config_notes(source, given)
    assert note.startswith("--config: ") and note.endswith(f"Did you mean {close}?")


def test_the_projects_own_files_give_no_notes() -> None:
    for path in (GOLDEN / "hugging_face").rglob("config.json"):
        assert config_notes("transformers", json.loads(path.read_text())) == ()
    cases = [path for path in GOLDEN.rglob("*.json") if path.parent.name in ("sparo", "nac", "sot")]
    assert cases
    for path in cases:
        content = json.loads(path.read_text())
        for case in content if isinstance(content, list) else [content]:
            if isinstance(case, dict) and isinstance(case.get("config"), dict):
                for source in ("open-clip", "sparo-clip") if path.parent.name == "sparo" else ():
                    assert config_notes(source, case["config"]) == ()
                if path.parent.name != "sparo":
                    assert config_notes(path.parent.name, case["config"]) == ()


def test_openclips_keys_that_are_not_read_give_no_notes() -> None:
    names = (
        "image_size layers width patch_size mlp_ratio ls_init_value patch_dropout pool_type "
        "no_ln_pre final_ln_after_pool output_tokens"
    )
    vision = dict.fromkeys(names.split(), 1)
    names = "context_length vocab_size width heads layers no_causal_mask pad_id"
    text = dict.fromkeys(names.split(), 1)
    given = {"embed_dim": 4, "quick_gelu": True, "custom_text": True}
    assert config_notes("open-clip", given | {"vision_cfg": vision, "text_cfg": text}) == ()
