# SPDX-License-Identifier: Apache-2.0
"""The README's examples, run one after the other, on few samples and free ports."""

import shutil
from functools import partial

import pytest
from page_reader import blocks, lines_of, reading, their_clip
from PIL import Image
from places import ROOT, TESTS
from quick_gate import quick_gate

import saccade
from saccade.serving.client.client import DEFAULT_URL


@pytest.fixture
def clone(tmp_path):
    """A folder with what a clone has, and the files that the reader is said to have."""
    place = tmp_path / "clone"
    place.mkdir()
    for name in ("src", "docs"):
        (place / name).symlink_to(ROOT / name)
    their_clip(tmp_path, place / "vit_b32.pt", place / "vit_b32.json")
    shutil.copytree(TESTS / "golden" / "hugging_face" / "vit", place / "vit-base")
    Image.new("RGB", (40, 30), "orange").save(place / "cat.jpg")
    return place


@pytest.mark.journey
@pytest.mark.timeout(1500)
def test_examples_work_in_the_order_of_the_page(needs_server, clone, leavings, monkeypatch):
    assert f"127.0.0.1:{saccade.ServeOptions().grpc_port}" == DEFAULT_URL
    monkeypatch.chdir(clone)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(clone / "build" / "inductor"))
    shown = blocks(ROOT / "README.md")
    with reading(clone) as reader, quick_gate():
        for kind, text in shown:
            if kind == "python":
                assert f'Client("{DEFAULT_URL}", ' in text
                here = partial(saccade.Client, reader.url)
                monkeypatch.setattr(
                    saccade, "Client", lambda url, model, ask=here: ask(model), raising=False
                )
                exec(text, {"__name__": "__main__"})
                continue
            for line in lines_of(text):
                reader.types(line)
    assert {kind for kind, _ in shown} == {"sh", "python"}
    assert not leavings()
