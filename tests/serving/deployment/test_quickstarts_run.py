# SPDX-License-Identifier: Apache-2.0
"""The quickstarts' commands: run page by page, and what asks a server by one server for all."""

import shlex
from pathlib import Path

import numpy as np
import pytest
from joined_repository import join
from page_reader import CALLS, blocks, lines_of, reading, their_clip
from PIL import Image
from places import ROOT
from quick_gate import quick_gate

from saccade.models import shipped

QUICKSTARTS = sorted((ROOT / "docs" / "quickstart").glob("[!i]*.md"))
# In place of the shipped checkpoints, whose own tests are test_shipped.py: as the pages ask, but
# small and untrained.
SHIPPED = {
    "captioner-shapes": "captioner", "slots-tetrominoes": "slot-attention", "sot-shapes": "sot",
    "sparo-shapes": "sparo", "vqa-shapes": "vqa",
}  # fmt: skip
QUESTION = ("what", "colour", "is", "the", "circle", "?")
# Files of authors that are made at some length in test_sources.py, which reads them all; training
# on generated scenes, which has tests in each family; and measuring, with what needs its figures,
# which the README's test does.
RUN_ELSEWHERE = (
    "convert deit ", "export deit.safetensors ", "convert tvmax-vqa ", "train vqa ",
    "train captioner ", "bench ", "choose ",
)  # fmt: skip
MEASURED = "--max-latency-ms"
# Ends before the first validation: what is looked at is that the page's options are right.
FEW_STEPS = 2


def photographs(place: Path) -> None:
    """A folder of two classes, as the quickstarts describe it."""
    rng = np.random.default_rng(0)
    for shade, name in ((60, "circle"), (180, "square")):
        (place / name).mkdir(parents=True)
        for count in range(1, 21):
            pixels = rng.integers(shade, shade + 40, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / name / f"{count:04}.png")


@pytest.fixture
def small_shipped(tmp_path, tiny_nac, monkeypatch):
    """`shipped:NAME` is a small model of that family."""
    import tiny_families

    place = tmp_path / "shipped"
    place.mkdir()
    fields = {
        "slot-attention": {"rounds": 3},
        "vqa": {"words": QUESTION, "tokens": 10, "question_length": 8},
    }
    for family, given in fields.items():
        whole = tiny_families.CONFIGS[family] | given
        monkeypatch.setitem(tiny_families.CONFIGS, family, whole)
    for name, family in SHIPPED.items():
        tiny_families.tiny(family, place / f"{name}.safetensors")
    tiny_nac(place / "digits-sum.safetensors", modules=8)
    monkeypatch.setattr(shipped, "__file__", str(place / "__init__.py"))


@pytest.fixture
def clone(tmp_path, small_shipped):
    """A folder with what a clone has, and the files that the reader is said to have."""
    place = tmp_path / "clone"
    place.mkdir()
    (place / "docs").symlink_to(ROOT / "docs")
    photographs(place / "photos")
    their_clip(tmp_path, place / "vit_b32.pt", place / "vit_b32.json")
    (place / "labels.txt").write_text("a circle\na square\n")
    (place / "templates.txt").write_text("a photo of {}.\n")
    return place


@pytest.mark.journey
@pytest.mark.timeout(1500)
def test_quickstarts_do_what_they_say(needs_server, clone, leavings, monkeypatch):
    monkeypatch.chdir(clone)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(clone / "build" / "inductor"))
    served, asked, programs = [], [], []
    with reading(clone, train=("--steps", str(FEW_STEPS))) as reader, quick_gate():
        for page in QUICKSTARTS:
            for kind, text in blocks(page):
                for line in lines_of(text) if kind == "sh" else ():
                    verb = line.split()[1]
                    if verb == "serve":
                        served.append(clone / shlex.split(line)[2])
                    elif verb in CALLS:
                        asked += [line] * (MEASURED not in line)
                    elif not line.startswith(tuple(f"saccade {words}" for words in RUN_ELSEWHERE)):
                        reader.types(line)
                if kind == "python":
                    programs.append(text)
        join(clone / "build" / "all", served)
        reader.types("saccade serve build/all")
        for line in asked:
            reader.types(line)
        reader.leaves()
        for text in programs:
            exec(text, {"__name__": "__main__"})
    assert len(served) == 8 and len(programs) == 1
    assert {line.split()[1] for line in asked} >= {"classify", "embed", "segment", "caption"}
    assert not leavings()
