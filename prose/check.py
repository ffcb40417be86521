# SPDX-License-Identifier: Apache-2.0
"""Check the English of the project: python prose/check.py [FILE ...]

Rules, limits and words are data: rules.toml, limits.toml and typos.toml beside this file.
"""

import argparse
import collections
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from english import Passage, passages_of
from rules import Rules

HERE = Path(__file__).resolve().parent
LIMITS = HERE / "limits.toml"
_MARK = re.compile(r"(?:<!--|#|//) prose: allow ([a-z-]+) \(.+?\)")


@dataclass(frozen=True, order=True)
class Hit:
    """Words that a rule does not allow, and what to write in their place."""

    file: str
    line: int
    rule: str
    words: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: '{self.words}': {self.instead}"


def check(root: Path, names: Iterable[str], rules: Rules) -> list[Hit]:
    """Return the hits in files of a clone, without those that a marker allows."""
    read = {name: passages_of(root / name) for name in names}
    read = {name: passages for name, passages in read.items() if passages}
    hits = misspelled(read)
    for name, passages in read.items():
        lines = (root / name).read_text().split("\n")
        for passage in passages:
            hits += [
                Hit(name, passage.line_of(each.start, lines), each.rule, each.words, each.instead)
                for each in rules.find(passage, name)
            ]
    return sorted(_less_marked(root, set(hits), read))


def _less_marked(root: Path, hits: set[Hit], names: Iterable[str]) -> Iterable[Hit]:
    """Drop hits with a marker on their line or the line above; a marker of no hit is one."""
    for name in names:
        left = {
            (number, found[1])
            for number, line in enumerate((root / name).read_text().split("\n"), 1)
            for found in _MARK.finditer(line)
        }
        unused = set(left)
        for hit in [hit for hit in hits if hit.file == name]:
            marks = {(hit.line, hit.rule), (hit.line - 1, hit.rule)} & left
            unused -= marks
            if not marks:
                yield hit
        for line, rule in unused:
            yield Hit(name, line, "unused-marker", f"prose: allow {rule}", "remove the marker")


def misspelled(read: dict[str, list[Passage]]) -> list[Hit]:
    """Return what typos finds: misspellings, and spelling that is not American."""
    with tempfile.TemporaryDirectory() as folder:
        for number, passages in enumerate(read.values()):
            # Words stay on their lines, so that typos reports the lines of the source.
            lines: dict[int, list[str]] = collections.defaultdict(list)
            for passage in passages:
                for offset, words in enumerate(passage.words.split("\n")):
                    lines[passage.line + offset * (passage.kind != "message")].append(words)
            written = [" | ".join(lines[line]) for line in range(1, max(lines) + 1)]
            (Path(folder) / f"{number}.txt").write_text("\n".join(written))
        command = [_typos(), "--config", str(HERE / "typos.toml"), "--format", "json", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 2):
        raise SystemExit(f"typos failed with exit code {done.returncode}: {done.stderr.strip()}")
    names = list(read)
    hits = []
    for line in done.stdout.splitlines():
        answer = json.loads(line)
        if answer["type"] == "typo":
            name = names[int(PurePath(answer["path"]).stem)]
            instead = "write " + " or ".join(answer["corrections"])
            hits.append(Hit(name, answer["line_num"], "spelling", answer["typo"], instead))
    return hits


def _typos() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "typos"
    found = str(beside) if beside.exists() else shutil.which("typos")
    if not found:
        raise SystemExit("typos is not installed. Install it with: pip install typos==1.52.0")
    return found


def over_limits(hits: list[Hit], limits: dict[str, dict[str, int]]) -> list[Hit]:
    """Return the hits of a rule in a file that has more of them than limits.toml allows."""
    over = {
        (rule, name)
        for rule, files in count(hits).items()
        for name, number in files.items()
        if number > limits.get(rule, {}).get(name, 0)
    }
    return [hit for hit in hits if (hit.rule, hit.file) in over]


def count(hits: Iterable[Hit]) -> dict[str, collections.Counter[str]]:
    """Return the number of hits by rule and file."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for hit in hits:
        counts[hit.rule][hit.file] += 1
    return counts


def write_limits(hits: Iterable[Hit], path: Path = LIMITS) -> None:
    """Allow the hits that there are, and no more."""
    lines = [LIMITS.read_text().partition("\n[")[0].rstrip()]
    for rule, files in sorted(count(hits).items()):
        lines += ["", f"[{rule}]", *(f'"{name}" = {files[name]}' for name in sorted(files))]
    path.write_text("\n".join(lines) + "\n")


def tracked(root: Path, patterns: list[str]) -> list[str]:
    """Return the names of the files that rules are for, those included that git does not know."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z", "--", *patterns]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return sorted({name for name in listed.split("\0") if name and (root / name).is_file()})


def chosen(root: Path, names: list[str], paths: list[Path]) -> list[str]:
    """Return those of the names that are one of the paths, or inside of it."""
    found = []
    for path in paths:
        wanted = path.resolve().relative_to(root)
        inside = [name for name in names if Path(name).is_relative_to(wanted)]
        if not inside:
            raise SystemExit(f"{path}: no file there that prose/rules.toml names under [files]")
        found += inside
    return sorted(set(found))


def report(hits: list[Hit], *, summary: bool) -> None:
    """Print the hits, or their numbers."""
    if not summary:
        print(*hits, sep="\n", end="\n" if hits else "")
        return
    for rule, files in sorted(count(hits).items()):
        print(f"{rule}: {files.total()}")
        for name, number in sorted(files.items()):
            print(f"    {name}: {number}")


def main(arguments: list[str] | None = None) -> int:
    """Print the hits, and return 1 if there is one."""
    parser = argparse.ArgumentParser(description="Check the English of the project.")
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; default: all")
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the clone to read")
    parser.add_argument("--no-limits", action="store_true", help="print what limits.toml allows")
    parser.add_argument("--summary", action="store_true", help="print numbers by rule and file")
    parser.add_argument("--write-limits", action="store_true", help="allow what is found")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    rules = Rules(HERE / "rules.toml")
    names = tracked(root, rules.files)
    hits = check(root, chosen(root, names, options.paths) if options.paths else names, rules)
    if options.write_limits:
        write_limits(hits)
        return 0
    if not options.no_limits:
        hits = over_limits(hits, tomllib.loads(LIMITS.read_text()))
    report(hits, summary=options.summary)
    print("prose: 1 hit" if len(hits) == 1 else f"prose: {len(hits)} hits", file=sys.stderr)
    return 1 if hits else 0


if __name__ == "__main__":
    raise SystemExit(main())
