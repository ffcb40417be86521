# SPDX-License-Identifier: Apache-2.0
"""The first hour of a new user: README and quickstarts, typed line by line into a fresh clone.

    make check-first-hour
    python tests/first_hour.py --pages README.md docs/quickstart/vqa.md

Each command runs in an environment that has nothing of this machine's users: an empty home, only
the system's programs on the path, a virtual environment that the README's own commands make, and,
where the kernel allows it, an empty folder in place of the one around this checkout. Only the
settings of pip and of the network are passed on. What is not committed is not in the clone.

`make test-journeys` runs the same pages within one process, with small models
(serving/deployment/test_quickstarts_run.py).
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from page_reader import their_clip
from PIL import Image
from timm_files import block, drawn, norm, pair

from saccade.core.files import json_bytes, write_atomically
from saccade.core.machine import this_machine

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/quickstart/index.md", *sorted(
    str(page.relative_to(ROOT)) for page in (ROOT / "docs/quickstart").glob("[!i]*.md")
))  # fmt: skip
BLOCK = re.compile(r"```(sh|python)\n(.*?)```", re.S)
PASSED_ON = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy")
# Run by itself, and by `make test`; needs a file of 200 MB that only its authors can give.
LEFT_OUT = {"make ": "has its own check", "saccade convert tvmax-vqa ": "the authors' file"}
LONGEST_S = 1800
ACTIVATE = "if [ -f .venv/bin/activate ]; then . .venv/bin/activate; fi; "
HIDING = 'mount -t tmpfs none "$1" && shift && exec "$@"'


class Failed(Exception):
    """A command of a page that did not work; its output is the message."""


class Newcomer:
    """Somebody with a clone, a shell, and one server at a time."""

    def __init__(self, place: Path, hide: Path | None) -> None:
        self.clone, self.home, self.hide = place / "clone", place / "home", hide
        self.home.mkdir()
        self.server: subprocess.Popen[str] | None = None
        self.typed: list[dict[str, Any]] = []

    def types(self, page: str, line: str) -> None:
        """Run one line; a server that it starts runs until the next one or the end of the page."""
        reason = next((LEFT_OUT[start] for start in LEFT_OUT if line.startswith(start)), None)
        began = time.monotonic()
        if reason is None and line.startswith("saccade serve "):
            self.serves(line)
        elif reason is None:
            self.runs(["bash", "-c", ACTIVATE + line], line)
        seconds = round(time.monotonic() - began, 1)
        said = f"left out: {reason}" if reason else f"{seconds} s"
        print(f"{page}: {line}  [{said}]", flush=True)
        self.typed.append({"page": page, "line": line, "seconds": seconds, "left_out": reason})

    def runs(self, command: Sequence[str], line: str) -> None:
        """Run a command to its end; it has to succeed."""
        done = subprocess.run(
            self.alone(command), cwd=self.clone, env=self.environment(), text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=LONGEST_S, check=False,
        )  # fmt: skip
        if done.returncode or "Traceback (most recent call last)" in done.stderr:
            raise Failed(f"{line}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")

    def serves(self, line: str) -> None:
        """Start a server and wait until it is ready."""
        self.leaves()
        self.server = subprocess.Popen(
            self.alone(["bash", "-c", ACTIVATE + "exec " + line]), cwd=self.clone,
            env=self.environment(), text=True, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        said = []
        assert self.server.stderr is not None
        for text in self.server.stderr:
            said.append(text)
            if "ready: http" in text:
                return
        raise Failed(f"{line}: exit {self.server.wait()}\n{''.join(said)}")

    def leaves(self) -> None:
        """Press Ctrl-C in the terminal of the server."""
        if self.server is None:
            return
        os.killpg(self.server.pid, signal.SIGINT)
        _, said = self.server.communicate(timeout=LONGEST_S)
        code, self.server = self.server.returncode, None
        if code not in (0, 130):
            raise Failed(f"the server ended with {code} after Ctrl-C\n{said}")

    def environment(self) -> dict[str, str]:
        """Variables of a login in a new container."""
        given = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {**given, "HOME": str(self.home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb"}

    def alone(self, command: Sequence[str]) -> list[str]:
        """The command, with an empty folder in place of the one around this checkout."""
        if self.hide is None:
            return list(command)
        hidden = ["sh", "-c", HIDING, "sh", str(self.hide), *command]
        return ["unshare", "--map-root-user", "--mount", *hidden]


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each block that a reader types, in order."""
    yield from BLOCK.findall(page.read_text())


def lines_of(text: str) -> list[str]:
    """The commands of a block, each in one line."""
    lines = (line.partition(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line]


def belongings(place: Path) -> None:
    """The files that a page says its reader has: images, labels, a CLIP, a DeiT."""
    rng = np.random.default_rng(0)
    for shade, name in ((60, "circle"), (180, "square")):
        (place / "photos" / name).mkdir(parents=True)
        for count in range(1, 41):
            height, width = rng.integers(40, 200, 2)
            pixels = rng.integers(shade, shade + 40, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / "photos" / name / f"{count:04}.png")
    with tempfile.TemporaryDirectory() as scratch:
        their_clip(Path(scratch), place / "vit_b32.pt", place / "vit_b32.json")
    (place / "labels.txt").write_text("a circle\na square\n")
    (place / "templates.txt").write_text("a photo of {}.\n")
    torch.save({"model": deit_tiny()}, place / "deit_tiny.pth")
    (place / "imagenet.txt").write_text("".join(f"class {n}\n" for n in range(1000)))


def deit_tiny() -> dict[str, torch.Tensor]:
    """Random weights by the names and in the sizes of DeiT-Ti/16."""
    width, patch, tokens = 192, 16, 1 + 14 * 14
    tensors = {"cls_token": drawn(1, 1, width), "pos_embed": drawn(1, tokens, width)}
    tensors["patch_embed.proj.weight"] = drawn(width, 3, patch, patch) / 16
    tensors["patch_embed.proj.bias"] = drawn(width)
    for index in range(12):
        made = block(f"blocks.{index}", width, 4 * width)
        tensors |= {key: value / 4 if value.ndim > 1 else value for key, value in made.items()}
    tensors |= norm("norm", width) | pair("head", 1000, width)
    return {key: value.float() for key, value in tensors.items()}


def reads(newcomer: Newcomer, page: str) -> None:
    """Type everything that a page shows."""
    try:
        for kind, text in blocks(newcomer.clone / page):
            if kind == "sh":
                for line in lines_of(text):
                    newcomer.types(page, line)
            else:
                script = newcomer.clone / "build" / "try.py"
                script.parent.mkdir(exist_ok=True)
                script.write_text(text)
                newcomer.types(page, "python build/try.py")
    finally:
        newcomer.leaves()


def installs(newcomer: Newcomer) -> None:
    """Type the README's first block, which makes the environment."""
    _, text = next(blocks(newcomer.clone / PAGES[0]))
    for line in lines_of(text):
        newcomer.types(PAGES[0], line)


def hideable(place: Path) -> Path | None:
    """The folder around this checkout, where a namespace without it can be made."""
    around = ROOT.parent
    if place.is_relative_to(around):
        return None
    tried = ["unshare", "--map-root-user", "--mount", "sh", "-c", HIDING, "sh", str(around), "true"]
    return around if subprocess.run(tried, check=False).returncode == 0 else None


def main() -> int:
    """Exit 1 at the first command that fails, with what it printed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pages", nargs="+", default=PAGES)
    parser.add_argument("--out", type=Path, help="a JSON file with the time of each command")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is stopped on the way out
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        place = Path(folder)
        hide = hideable(place)
        print(f"hidden: {hide or 'nothing, this kernel or place does not allow it'}", flush=True)
        newcomer = Newcomer(place, hide)
        clone = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(newcomer.clone)]
        subprocess.run(clone, check=True)
        belongings(newcomer.clone)
        try:
            if PAGES[0] not in options.pages:
                installs(newcomer)
            for page in options.pages:
                reads(newcomer, page)
        except Failed as failed:
            print(failed, file=sys.stderr)
            return 1
    if options.out:
        content = {
            "machine": this_machine().to_dict(),
            "hidden": bool(hide),
            "typed": newcomer.typed,
        }
        write_atomically(options.out, json_bytes(content))
    print(f"{len(newcomer.typed)} commands worked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
