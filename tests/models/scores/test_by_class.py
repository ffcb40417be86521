# SPDX-License-Identifier: Apache-2.0
"""Scores per class, with what each class is taken for, from answers to files."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_artefacts import FULL, LABELS, artefacts

from saccade.models.scores.by_class import ClassAnswers
from saccade.serving.commands import cli

NAMES = ("cat", "dog", "lynx", "hare")


def test_each_class_has_its_share_and_what_it_is_taken_for():
    labels, answers = np.array([0, 0, 0, 0, 1, 1, 2]), np.array([0, 1, 2, 1, 1, 1, 0])
    given = ClassAnswers(labels, answers, NAMES, tuple("abcdefg"))
    lynx, cat, dog = given.classes()
    assert (lynx["class"], lynx["n"], lynx["value"], lynx["taken_for"]) == (
        "lynx",
        1,
        0,
        {"cat": 1},
    )
    assert cat["value"] == 1 / 4 and list(cat["taken_for"].items()) == [("dog", 2), ("lynx", 1)]
    assert dog["value"] == 1 and not dog["taken_for"] and dog["interval"][0] < 1
    expected = [
        ("b", "cat", "dog"),
        ("c", "cat", "lynx"),
        ("d", "cat", "dog"),
        ("g", "lynx", "cat"),
    ]
    assert list(given.mistakes()) == expected


@pytest.fixture
def images(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in LABELS:
        (tmp_path / "images" / "test" / name).mkdir(parents=True)
        for at in range(6):
            pixels = rng.integers(0, 256, (4, 4), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / "test" / name / f"{at}.png")
    return tmp_path / "images"


def test_the_command_names_the_files_of_mistakes(images, tmp_path, capsys):
    pytest.importorskip("onnxruntime", reason="missing: pip install '.[cpu]'")
    folder, out = artefacts(tmp_path / "tiny"), tmp_path / "mistakes.csv"
    words = ["evaluate", str(folder), "--data", str(images), "--mistakes", str(out), "--json"]
    assert cli.run(words) == 0
    first = json.loads(capsys.readouterr().out)["found"][0]
    assert {one["class"] for one in first["classes"]} <= set(LABELS)
    wrong = round(18 * (1 - first["scores"][0]["value"]))
    rows = [row for row in csv.DictReader(out.open()) if row["variant"] == FULL]
    assert len(rows) == wrong > 0
    assert all((images / row["sample"]).is_file() and row["label"] in row["sample"] for row in rows)
    assert sum(sum(one["taken_for"].values()) for one in first["classes"]) == wrong
    assert cli.run(words) == 2
    assert "exists already. Pass another path, or remove the file." in capsys.readouterr().err
    plain = [*words[:4], "--by-class", "--task", "knn"]
    assert cli.run(plain) == 2
