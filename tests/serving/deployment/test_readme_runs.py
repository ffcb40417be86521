# SPDX-License-Identifier: Apache-2.0
"""The README's examples, run one after the other as they stand."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from official_files import open_clip
from places import ROOT

LEFT_OUT = ("make", "pip")  # the suite itself, the demo, and what would change the environment
PORTS = (8000, 8001, 8002, 8003)  # of a server that is not told others
LONG_S = 600
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
    for name in ("models", "docs"):
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
    """Types each command and looks whether it worked; a server runs until the next one starts."""

    def __init__(self, place: Path) -> None:
        self.place, self.server = place, None
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TORCHINDUCTOR_CACHE_DIR": str(place / "build" / "inductor"),
        }

    def types(self, command: str) -> None:
        words = shlex.split(command, comments=True)
        if words[:2] == ["saccade", "serve"]:
            self.serves(words)
        else:
            self.runs(words)

    def runs(self, words: list[str]) -> None:
        found = subprocess.run(
            words, cwd=self.place, env=self.environment, capture_output=True, timeout=LONG_S
        )
        said = f"{found.stdout.decode()}\n{found.stderr.decode()}"
        assert found.returncode == 0, f"{shlex.join(words)}\n{said}"

    def serves(self, words: list[str]) -> None:
        self.leaves()
        self.server = subprocess.Popen(
            words, cwd=self.place, env=self.environment, stderr=subprocess.PIPE, text=True
        )
        for line in self.server.stderr:
            if "ready: http" in line:
                return
        pytest.fail(f"{shlex.join(words)} ended with {self.server.wait()}")

    def leaves(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            self.server.communicate(timeout=60)
            self.server = None


@contextmanager
def reading(place: Path) -> Iterator[Reader]:
    reader = Reader(place)
    try:
        yield reader
    finally:
        reader.leaves()


def in_use(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.timeout(1500)
def test_examples_work_in_the_order_of_the_page(
    needs_server: None, clone: Path, leavings: Callable[[], list[Path]]
) -> None:
    if taken := [port for port in PORTS if in_use(port)]:
        pytest.skip(f"the README's server needs ports {taken}, which another program has")
    blocks = examples()
    with reading(clone) as reader:
        for kind, text in blocks:
            if kind == "python":
                reader.leaves()  # it starts a server of its own
                reader.runs([sys.executable, "-c", text])
                continue
            for line in text.splitlines():
                if line.strip():
                    reader.types(line)
    assert {kind for kind, _ in blocks} == {"sh", "python"}
    assert not leavings()
