# SPDX-License-Identifier: Apache-2.0
"""Run the README's tour and write what it prints into its `text` blocks.

    python docs_site/tour.py    # five minutes; ports 8000 to 8003 have to be free

A `text` block after an `sh` block with saccade commands is filled with the output of the last of
these commands that print something. Nothing in it is written by hand.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"```sh\n(.*?)```\n(?:(\n```text\n)(.*?)(```\n))?", re.S)
# The output of these is not of interest here, or too long.
SILENT = ("train", "bench", "doctor", "repository", "preflight", "convert")
COLUMNS = 100


def main() -> int:
    """Run the tour in a temporary folder, then write the page."""
    page = README.read_text()
    section = page[page.index("## Five minutes") : page.index("## Families")]
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "docs").symlink_to(ROOT / "docs")
        with_answers = "".join(tried(section, Path(place)))
    README.write_text(page.replace(section, with_answers))
    return 0


def tried(section: str, place: Path) -> Iterator[str]:
    """Yield the section piece by piece, with the output of its commands."""
    at, server = 0, None
    try:
        for block in BLOCK.finditer(section):
            answers = []
            for line in block[1].splitlines():
                if " serve " in line:
                    server = started(line, place)
                elif (printed := answer(line, place)) and line.split()[1] not in SILENT:
                    answers.append(printed)
            yield section[at : block.start()]
            yield block[0] if block[2] is None else filled(block, "\n".join(answers))
            at = block.end()
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)
            server.wait()
    yield section[at:]


def filled(block: re.Match[str], text: str) -> str:
    """Return the block with its output."""
    return f"```sh\n{block[1]}```\n{block[2]}{text}\n{block[4]}"


def program(line: str) -> list[str]:
    """Return the arguments of a command, with the saccade of this environment."""
    return [str(Path(sys.executable).with_name("saccade")), *line.split()[1:]]


def answer(line: str, place: Path) -> str:
    """Return what the command prints on standard output, without trailing spaces."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        program(line), cwd=place, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    print(f"$ {line}\n{done.stdout}", flush=True)
    text = "\n".join(row.rstrip() for row in done.stdout.splitlines()).strip("\n")
    return re.sub(r"\n{3,}", "\n\n", text)


def started(line: str, place: Path) -> subprocess.Popen[str]:
    """Start the server and return it when it is ready."""
    server = subprocess.Popen(program(line), cwd=place, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for said in server.stderr:
        if "ready: http" in said:
            return server
    raise SystemExit(f"{line} exited with {server.wait()}")


if __name__ == "__main__":
    sys.exit(main())
