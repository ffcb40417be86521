# SPDX-License-Identifier: Apache-2.0
"""`saccade predict`: the lines, JSON and exit codes of the commands that ask a server."""

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from family_folders import family_folder
from picture_files import picture_files
from places import ROOT
from policy_files import write_policy

from saccade.serving.client.client import load_embeddings

pytest.importorskip("onnxruntime", reason="missing: pip install '.[cpu]'")

SEVEN = str(ROOT / "docs" / "examples" / "seven.png")


def test_it_prints_what_a_server_answers(server, tiny_folder, tmp_path, saccade):
    wrong = tmp_path / "wrong.png"
    wrong.write_text("nonsense")
    files = [*picture_files(tmp_path), wrong, tmp_path / "nosuch.png"]
    at = ["--model", server.model, "--url", server.url, "-q"]
    for own in ((), ("--json",), ("--budget", "0.25", "--top", "2"), ("--json", "--top", "99")):
        here, there = (
            saccade("predict", tiny_folder, *files, *own, "-q"),
            saccade("classify", *files, *own, *at),
        )
        assert here == there and here[0] == 1 and "not a JPEG" in here[2]
    outs = [tmp_path / f"{name}.npz" for name in ("here", "there")]
    here = saccade("predict", tiny_folder, SEVEN, "--task", "embed", "--out", outs[0], "-q")
    there = saccade("embed", SEVEN, "--out", outs[1], *at)
    assert here[1].replace("here", "there") == there[1] and here[0] == there[0] == 0
    one, other = (load_embeddings(out) for out in outs)
    assert np.array_equal(one[0].vectors, other[0].vectors) and one[1] == other[1]
    for own in (("--budget", "1e-6"), ("--min-score", "0.5"), ("--policy", "auto"), ("--strict",)):
        here, there = (
            saccade("predict", tiny_folder, SEVEN, *own),
            saccade("classify", SEVEN, *own, *at),
        )
        assert here[0] == there[0] == 2
        assert here[2].replace(f"{tiny_folder}: ", "") == there[2].replace(f"{server.url}: ", "")


@pytest.mark.parametrize(
    "family, words, keys",
    [
        ("captioner", ("--beam", "2"), {"caption", "steps"}),
        ("vqa", ("--question", "shape is left ?"), {"labels", "unknown_words"}),
        ("slot-attention", ("--raw", "--seed", "3"), {"masks", "slots"}),
        ("sparo", ("--labels", "labels.txt"), {"labels"}),
        (
            "sparo",
            ("--labels", "labels.txt", "--max-risk", "0.1"),
            {"labels", "steps", "certified"},
        ),
    ],
)
def test_the_task_is_that_of_the_family(family, words, keys, tmp_path, monkeypatch, saccade):
    monkeypatch.chdir(tmp_path)
    Path("labels.txt").write_text("red\nblue\nsquare\n")
    folder = family_folder(family)
    if "--max-risk" in words:
        folder = Path(shutil.copytree(folder, "artefact"))
        write_policy(folder)
    code, out, err = saccade("predict", folder, SEVEN, *words, "--json")
    assert code == 0, err
    assert set(json.loads(out)[0]) == keys | {"image", "variant"}


def test_answers_are_written_as_csv(tiny_folder, tmp_path, saccade):
    names = ['a, "b".png', "räksmörgås.png", "=1+1.png", os.fsdecode(b"\xff.png")]
    for name in names:
        shutil.copy(SEVEN, tmp_path / name)
    (tmp_path / "wrong.png").write_text("nonsense")
    files, out = [tmp_path / name for name in (*names, "wrong.png")], tmp_path / "x.CSV"
    code, printed, _ = saccade("predict", tiny_folder, *files, "--top", "2", "--out", out)
    assert code == 1 and printed == f"{out}: 4 answers\n"
    with out.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == [str(path) for path in files]
    keys = ["image", "label", "probability", "label_2", "probability_2", "variant", "error"]
    assert [*rows[0]] == keys and "not a JPEG" in rows[-1]["error"] and not rows[-1]["label"]
    (same,) = {(row["label"], row["probability"], row["variant"]) for row in rows[:-1]}
    one = json.loads(saccade("predict", tiny_folder, files[0], "--json")[1])[0]
    best = one["labels"][0]
    assert same == (best["label"], str(best["probability"]), one["variant"])
    before = out.read_bytes()
    for words, said in {
        ("--out", str(out)): "exists already",
        ("--out", "answers.txt"): "expected a name that ends in .csv for --task classify",
        ("--out", "x.csv", "--task", "embed"): "expected an .npz file: embeddings are arrays",
    }.items():
        code, _, err = saccade("predict", tiny_folder, SEVEN, *words)
        assert code == 2 and said in err, err
    assert out.read_bytes() == before
    assert saccade("predict", tiny_folder, SEVEN, "--out", out, "--force", "--json")[0] == 0
    assert len(out.read_text().splitlines()) == 2


def test_an_image_and_a_text_are_embedded_by_one_variant(tmp_path, monkeypatch, saccade):
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("red\nblue\n")
    for words in ((SEVEN, "--out", "a.npz"), ("--texts", "texts.txt", "--out", "b.npz")):
        code, out, err = saccade("predict", family_folder("sparo"), *words, "--budget", "2/3")
        assert code == 0 and "from sparo-b0667-fp32" in out and ".npz: " in err
    one, other = (load_embeddings(Path(f"{name}.npz"))[0] for name in "ab")
    assert one.similarity(other).shape == (1, 2)


def test_options_of_another_task_are_refused(tiny_folder, tmp_path, saccade):
    labels = str(tmp_path / "labels.txt")
    Path(labels).write_text("red\nblue\n")
    refused = {
        ("--beam", "3"): "--beam is an option of caption, but --task is classify for nac",
        ("--task", "embed", "--top", "1"): "of classify and answer, but --task is embed",
        ("--task", "caption"): "is a model of family nac, which answers classify or embed",
        ("--labels", labels): "nac: found a model of family nac",
        ("--question", "what?"): "--question is an option of answer, but",
    }
    for words, expected in refused.items():
        code, out, err = saccade("predict", tiny_folder, SEVEN, *words)
        assert (code, out) == (2, "") and expected in err, err
    assert saccade("predict", tiny_folder)[0] == 2
