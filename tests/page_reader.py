# SPDX-License-Identifier: Apache-2.0
"""Run the commands of a documentation page, with few samples and free ports."""

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from official_files import open_clip

from saccade.serving.client.client import DEFAULT_URL
from saccade.serving.commands import cli

# These set up an environment or run the test suite itself.
SET_UP = ("make", "pip", "python3")
# Options that shorten slow steps, whose quality does not matter here.
SHORTER = {"train": ("--steps", "300"), "bench": ("--seconds", "0.05", "--rounds", "1")}
CALLS = ("doctor", "classify", "embed", "segment", "answer", "caption", "edit", "show")
PORTS = ("grpc", "metrics", "ready")
CLIP_WORDS = 49_408


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return language and text of every block of commands or Python, in order.

    Blocks that set up an environment are left out.
    """
    found = re.findall(r"```(sh|python)\n(.*?)```", page.read_text(), re.S)
    return [(kind, text) for kind, text in found if text.split()[0] not in SET_UP]


def lines_of(text: str) -> list[str]:
    """Return the commands of a block."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def their_clip(place: Path, file: Path, config: Path) -> None:
    """Write a small CLIP like OpenCLIP, with CLIP's vocabulary."""
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
    """Runs each command and checks that it worked; a server runs until the next one starts.

    Commands run in this process, as the program `saccade` would run them, except for servers.
    """

    def __init__(self, place: Path, **shorter: tuple[str, ...]) -> None:
        self.place, self.server, self.url = place, None, ""
        self.shorter = SHORTER | shorter

    def types(self, command: str) -> None:
        program, *words = shlex.split(command, comments=True)
        assert program == "saccade", command
        if words[0] == "serve":
            self.serves(words)
            return
        if words[0] in CALLS:
            words = with_url(words, self.url)
        assert cli.run([*words, *self.shorter.get(words[0], ())]) == 0, command

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
    """Replace the default address in the arguments by that of the running server."""
    if "--url" in words:
        assert words[words.index("--url") + 1] == DEFAULT_URL
        return [url if word == DEFAULT_URL else word for word in words]
    return [*words, "--url", url]


@contextmanager
def reading(place: Path, **shorter: tuple[str, ...]) -> Iterator[Reader]:
    """Make a reader and stop its server at the end."""
    reader = Reader(place, **shorter)
    try:
        yield reader
    finally:
        reader.leaves()
