# SPDX-License-Identifier: Apache-2.0
"""How much of the code that a figure measured is newer than the figure?

    python benchmarks/fresh.py

Lists the results files of measured.toml with the share of the measured lines that are newer than
the commit that wrote the file. The exit code is 1 if that is most of the lines for a file of which
README has figures: measure it again, by the command that is shown.
"""

import functools
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = (".py", ".cpp", ".cu", ".cuh", ".h")
MOST = 0.5


def git(*words: str) -> str:
    """Return what git prints."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def has_history() -> bool:
    """Return False in a source archive, and in a shallow clone."""
    try:
        return git("rev-parse", "--is-shallow-repository").strip() == "false"
    except (OSError, subprocess.CalledProcessError):
        return False


def newer(name: str, code: Iterable[str]) -> tuple[str, float]:
    """Return the date of a results file, and the share of the measured lines that are newer."""
    commit, date = git("log", "-1", "--format=%H %cs", "--", f"benchmarks/results/{name}").split()
    measured = [path for path in git("ls-files", "--", *code).splitlines() if path.endswith(CODE)]
    lines = sum(len((ROOT / path).read_text().splitlines()) for path in measured)
    new = added_since(commit)
    return date, sum(new.get(path, 0) for path in measured) / lines


@functools.cache
def added_since(commit: str) -> dict[str, int]:
    """Return the lines added to each file since a commit; a file that was only moved has none."""
    words = iter(git("diff", "--numstat", "-M", "-l0", "-z", commit).split("\0")[:-1])
    added = {}
    for word in words:
        count, _, path = word.split("\t")
        if not path:  # moved: two names follow, the old one first
            next(words)
            path = next(words)
        added[path] = 0 if count == "-" else int(count)
    return added


def main() -> int:
    """List all files; return 1 if one of README's is too old."""
    if not has_history():
        print("The age of figures is not known: this clone lacks its history.")
        return 0
    old = False
    files = tomllib.loads((ROOT / "benchmarks" / "measured.toml").read_text())["files"]
    width = max(map(len, files))
    for name, file in files.items():
        date, share = newer(name, file["code"])
        stale = share > MOST
        old |= stale and file.get("readme", False)
        where = "README" if file.get("readme") else ""
        print(f"{name:{width}} {date} {share:4.0%} of its code is newer  {where}")
        if stale:
            print(f"{'':{width}} measure again: {file['again']}")
    return int(old)


if __name__ == "__main__":
    sys.exit(main())
