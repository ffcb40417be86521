# SPDX-License-Identifier: Apache-2.0
"""The README's examples, run one after the other, on few samples and free ports."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from official_files import open_clip
from places import ROOT
from quick_gate import quick_gate

import saccade
from saccade.serving.client.client import DEFAULT_URL
from saccade.serving.commands import cli

# The suite itself, the demo (its steps are the page's first blocks, and tests of their own), and
# what would change the environment.
LEFT_OUT = ("make", "pip")
# What takes long and proves nothing here: how well it learns, how well it is measured.
SHORTER = {"train": ("--steps", "300"), "bench": ("--seconds", "0.05", "--rounds", "1")}
CALLS = ("doctor", "classify", "embed", "segment", "answer", "caption", "edit", "show")
PORTS = ("grpc", "metrics", "ready")
CLIP_WORDS = 49_408


def examples() -> list[tuple[str, str]]:
    """Language and text of every block that can be run, in order."""
    blocks = re.findall(r"```(sh|python)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return [(kind, text) for kind, text in blocks if text.split()[0] not in LEFT_OUT]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what a clone has, and the files that the reader is said to have."""
    place = tmp_path / "clone"
    place.mkdir()
    for name in ("src", "docs"):
        (place / name).symlink_to(ROOT / name)
    their_clip(tmp_path, place / "vit_b32.pt", place / "vit_b32.json")
    (place / "labels.txt").write_text("a circle\na square\n")
    (place / "templates.txt").write_text("a photo of {}.\n")
    return place


def their_clip(place: Path, file: Path, config: Path) -> None:
    """A small CLIP as OpenCLIP writes it, which reads the words that CLIP does."""
    import torch

    made = open_clip(place)
    given = json.loads(Path(made.flags[made.flags.index("--config") + 1]).read_text())
    given["text_cfg"]["vocab_size"] = CLIP_WORDS
    config.write_text(json.dumps(given))
    content = torch.load(made.path, weights_only=True)
    words = content["state_dict"]["module.token_embedding.weight"]
    drawn = torch.randn(CLIP_WORDS, words.shape[1], generator=torch.Generator().manual_seed(0))
    content["state_dict"]["module.token_embedding.weight"] = drawn
    torch.save(content, file)


class Reader:
    """Types each command and looks whether it worked; a server runs until the next one starts.

    The commands run here, as the program `saccade` would run them, but for the server.
    """

    def __init__(self, place: Path) -> None:
        self.place, self.server, self.url = place, None, ""

    def types(self, command: str) -> None:
        program, *words = shlex.split(command, comments=True)
        assert program == "saccade", command
        if words[0] == "serve":
            self.serves(words)
            return
        if words[0] in CALLS:
            words = with_url(words, self.url)
        assert cli.run([*words, *SHORTER.get(words[0], ())]) == 0, command

    def serves(self, words: list[str]) -> None:
        self.leaves()
        free = (f"--{port}-port=0" for port in PORTS)
        self.server = subprocess.Popen(
            [Path(sys.executable).with_name("saccade"), *words, *free],
            cwd=self.place, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        said = []
        for line in self.server.stderr:
            said.append(line)
            if "ready: http" in line:
                self.url = re.search(r"gRPC (\S+)", "".join(said))[1]
                return
        pytest.fail(f"{shlex.join(words)} ended with {self.server.wait()}:\n{''.join(said)}")

    def leaves(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            self.server.communicate()
            self.server = None


def with_url(words: list[str], url: str) -> list[str]:
    """The words with the place of the server that runs, in place of the one that is usual."""
    if "--url" in words:
        assert words[words.index("--url") + 1] == DEFAULT_URL
        return [url if word == DEFAULT_URL else word for word in words]
    return [*words, "--url", url]


@contextmanager
def reading(place: Path) -> Iterator[Reader]:
    reader = Reader(place)
    try:
        yield reader
    finally:
        reader.leaves()


@pytest.mark.timeout(1500)
def test_examples_work_in_the_order_of_the_page(
    needs_server: None,
    clone: Path,
    leavings: Callable[[], list[Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert f"127.0.0.1:{saccade.ServeOptions().grpc_port}" == DEFAULT_URL
    monkeypatch.chdir(clone)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(clone / "build" / "inductor"))
    free = saccade.ServeOptions(**{f"{port}_port": 0 for port in PORTS})
    monkeypatch.setattr(saccade, "Server", partial(saccade.Server, options=free), raising=False)
    blocks = examples()
    with reading(clone) as reader, quick_gate():
        for kind, text in blocks:
            if kind == "python":
                exec(text, {"__name__": "__main__"})
                continue
            for line in text.splitlines():
                if line.strip():
                    reader.types(line)
    assert {kind for kind, _ in blocks} == {"sh", "python"}
    assert not leavings()
