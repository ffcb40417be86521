# SPDX-License-Identifier: Apache-2.0
"""The tensors of SPARO's own code and the ids of CLIP's own tokenizer."""

import json
import shutil

import golden_check
import pytest
from golden_cases import sparo as cases
from places import TESTS
from safetensors.torch import load_file, save_file

from saccade.core.errors import SaccadeError
from saccade.models.sparo.text_tokens import TextEncoder, checked_merges, clean

FOLDER = TESTS / "golden" / "sparo"


def test_every_copied_case_is_within_its_tolerance():
    assert cases.check(FOLDER) == []
    assert cases.count(FOLDER) == 27


def test_the_check_can_fail(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "sparo")
    manifest = json.loads((folder / "manifest.json").read_text())
    kept = [case for case in manifest["cases"] if case["id"] == "clip_sparo_sep_kv_rd0"]
    (folder / "manifest.json").write_text(json.dumps(manifest | {"cases": kept, "key_lists": []}))
    file = folder / kept[0]["weights"]["file"]
    weights = load_file(file)
    weights["text_sparo.v.weight"][0, 0] += 0.01
    save_file(weights, file)
    failures = "\n".join(cases.check(folder))
    assert "text_slots" in failures and "logits_per_image" in failures
    assert "image_features" not in failures


def test_a_refused_case_is_a_failure_and_the_others_go_on(tmp_path, capsys):
    folder = shutil.copytree(FOLDER, tmp_path / "sparo")
    manifest = json.loads((folder / "manifest.json").read_text())
    kept = [case for case in manifest["cases"] if case["id"].startswith("clip_attn_pool")]
    kept[0]["config"]["embed_dim"] = 12
    kept[1]["config"]["vision_cfg"]["n_queries"] = 7
    lists = [listed for listed in manifest["key_lists"] if "SPARO" not in listed["file"]]
    keys = json.loads((folder / lists[0]["file"]).read_text())
    (folder / lists[0]["file"]).write_text(json.dumps(keys | {"config": {"reduce_depth": -1}}))
    (folder / "manifest.json").write_text(json.dumps({"cases": kept, "key_lists": lists}))
    assert golden_check.main([str(folder)]) == 1
    said = capsys.readouterr().out
    assert f"{kept[1]['id']}: refused: " in said
    assert "n_queries 7, but the file's tensors have" in said
    assert f"{lists[0]['file']}: refused: " in said
    assert said.strip().endswith(f"sparo: {len(kept) + 1} cases, 2 failures")


def test_ids_are_those_of_clips_own_tokenizer():
    recorded = json.loads((FOLDER / "token_ids.json").read_text())["sentences"]
    assert len(recorded) == 50
    rows = TextEncoder("clip", 77)([each["text"] for each in recorded])
    for row, each in zip(rows, recorded, strict=True):
        ids = [49406, *each["ids"], 49407]
        assert row.tolist() == ids + [0] * (77 - len(ids)), each["text"]


def test_a_users_own_merges_give_their_ids():
    # 512 single bytes, then the merges, then start and end.
    lines = ["#version: 0.2", "a t</w>", "c at</w>", "t h", "th e</w>", "c c"]
    merges = checked_merges(lines, 518)
    assert merges == ("a t</w>", "c at</w>", "t h", "th e</w>")
    encode = TextEncoder("custom", 8, merges=merges, vocabulary=518)
    the, cat, c, letter_at_end = 515, 513, ord("c") - 33, 256 + ord("!") - 33
    row = encode(["The  cat c!"])[0]
    assert row.tolist() == [516, the, cat, 256 + c, letter_at_end, 517, 0, 0]
    with pytest.raises(SaccadeError, match="has 4 merges"):
        checked_merges(lines[:5], 519)
    with pytest.raises(SaccadeError, match="--vocabulary"):
        TextEncoder("custom", 8, vocabulary=518)


def test_long_texts_are_refused_or_cut_when_asked():
    encode = TextEncoder("clip", 5)
    with pytest.raises(SaccadeError, match="5 tokens, expected at most 3"):
        encode(["a photo of a cat"])
    assert encode(["a photo of a cat"], truncate=True)[0].tolist() == [49406, 320, 1125, 539, 49407]
    assert clean("\u201c\ufb01ne\u201d  &amp; \uff57ide") == '"fine" & wide'
