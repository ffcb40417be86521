# SPDX-License-Identifier: Apache-2.0
"""The gallery shows every picture that its script makes, and stays small."""

import json
import re

from places import ROOT

FOLDER = ROOT / "docs" / "gallery"
MOST_BYTES = 2**20


def test_gallery_shows_all_of_its_pictures():
    page = (ROOT / "docs" / "gallery.md").read_text()
    shown = re.findall(r"!\[(.+)\]\(gallery/([a-z]+)\.png\)", page)
    made = json.loads((ROOT / "benchmarks" / "results" / "gallery.json").read_text())["pictures"]
    files = list(FOLDER.iterdir())
    assert {name for _, name in shown} == set(made) == {file.stem for file in files}
    assert all(len(words.split()) > 3 for words, _ in shown)  # said to those who cannot see it
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
