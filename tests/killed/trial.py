# SPDX-License-Identifier: Apache-2.0
"""Kill one command once: check what is visible then, and how the next run ends."""

import hashlib
import json
import random
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clock import Moment
from commands import Command
from forks import Place, ProcessExit, run, survivors

Tree = dict[str, str]
FULL = "ENOSPC"
CODES = {"SIGKILL": -signal.SIGKILL, "SIGINT": 130, "SIGTERM": 143, FULL: 2}
_OLD = {"old": b'"an older result"\n'}
_SECONDS = re.compile(rb'("(?:\w+_)?seconds": )[0-9.e+-]+')
_TRACES = ("Traceback", "Exception ignored", "bug in saccade", "Fatal Python error")


def tree(folder: Path) -> Tree:
    """Return every visible file below a folder with its hash, including empty folders."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        if path.is_file():
            files[str(name)] = hashlib.sha256(_without_times(path)).hexdigest()
        elif not any(path.iterdir()):
            files[str(name)] = "empty folder"
    return files


def _without_times(path: Path) -> bytes:
    """Return the bytes without measured times, which two runs may share by chance."""
    data = path.read_bytes()
    if path.suffix == ".json":
        return _SECONDS.sub(rb"\1", data)
    if path.suffix == ".csv":
        header, *rows = (line.split(b",") for line in data.splitlines())
        kept = [at for at, name in enumerate(header) if name != b"seconds"]
        return b"\n".join(b",".join(row[at] for at in kept) for row in (header, *rows))
    return data


def hidden(place: Place) -> list[str]:
    """Return leftovers of unfinished files, in the results and among temporary files."""
    paths = [path for path in place.out.rglob("*") if path.name.startswith(".")]
    paths = [path for path in paths if path.name != ".lock"] + list(place.temporary.iterdir())
    return sorted(str(path.relative_to(place.root)) for path in paths)


@dataclass(frozen=True)
class Reference:
    """The reference of an undisturbed run: its files and number of moments."""

    tree: Tree
    stable: frozenset[str]  # files with the same bytes in every run
    calls: int
    events: int
    pages: int  # memory pages that the result needs
    largest: int  # size of its largest file in bytes

    def fits(self, files: Tree) -> bool:
        """True if the files are the same, and the bytes of those without measured times."""
        return files.keys() == self.tree.keys() and all(
            files[name] == self.tree[name] for name in self.stable
        )


def reference(command: Command, given: Path, root: Path) -> Reference:
    """Run twice undisturbed: once counting calls, once at full speed."""
    runs, ends = [], []
    for clock in ("none", "call"):
        place = Place(root / f"reference-{clock}")
        lay_out(command, given, place, old=False)
        ends.append(run(command, given, place, moment=Moment(clock, 0, "none")))
        if ends[-1].code:
            raise SystemExit(f"{command.name} does not run at all:\n{ends[-1].said}")
        if left := hidden(place):
            raise SystemExit(f"{command.name} leaves {left} after a successful run")
        runs.append(tree(place.out))
    one, other = runs
    stable = frozenset(name for name in one if one[name] == other.get(name))
    sizes = [path.stat().st_size for path in place.out.rglob("*")]
    pages = sum(1 + size // 4096 for size in sizes)
    return Reference(one, stable, ends[1].calls, ends[0].events, pages, max(sizes, default=0))


def lay_out(command: Command, given: Path, place: Place, *, old: bool) -> None:
    """Create the folders, inputs that are written to, and an older result."""
    place.make()
    for name in command.changes:
        shutil.copytree(given / name, place.out / name)
    for name in command.results if old else ():
        path = place.out / name
        if name in command.changes:
            continue
        if "." in name:
            path.write_bytes(_OLD["old"])
        else:
            path.mkdir()
            for inside, data in _OLD.items():
                (path / inside).write_bytes(data)


@dataclass(frozen=True)
class Trial:
    """One moment of one command, with or without an older result."""

    command: Command
    moment: Moment
    old: bool
    limit: Callable[[], None] = lambda: None

    def run(self, given: Path, place: Place, expected: Reference) -> tuple[ProcessExit, list[str]]:
        """Run the trial; return how it exited and what is wrong."""
        lay_out(self.command, given, place, old=self.old)
        return self.run_laid_out(given, place, expected)

    def run_laid_out(
        self,
        given: Path,
        place: Place,
        expected: Reference,
        make_room: Callable[[], None] = lambda: None,
    ) -> tuple[ProcessExit, list[str]]:
        """Run the trial in folders that exist already."""
        before = tree(place.out)
        first = ("--force",) if self.old else ()
        ended = run(self.command, given, place, *first, moment=self.moment, limit=self.limit)
        wrong = self._ending(ended)
        if left := survivors(place):
            wrong.append(f"processes {left} are left")
        now = tree(place.out)
        wrong += self._visible(before, now, expected)
        if self.moment.fault == FULL and (left := hidden(place)):
            wrong.append(f"left {left}")
        make_room()
        wrong += broken_json(place)
        again = run(self.command, given, place, *self._next_words(now, expected))
        if again.code:
            wrong.append(f"the next run ended with {again.code}: {again.said[-600:]}")
        elif not expected.fits(after := tree(place.out)):
            differing = sorted(set(after.items()) ^ set(expected.tree.items()))
            wrong.append(f"the next run left something else: {differing[:6]}")
        if left := hidden(place):
            wrong.append(f"after the next run there still is {left}")
        return ended, wrong

    def _ending(self, ended: ProcessExit) -> list[str]:
        wrong = [f"says {word}: {ended.said[-900:]}" for word in _TRACES if word in ended.said]
        # This run did not reach the moment, or the space was enough.
        if ended.code not in (CODES[self.moment.fault], 0):
            wrong.append(f"exit code {ended.code}: {ended.said[-600:]}")
        return wrong

    def _visible(self, before: Tree, now: Tree, expected: Reference) -> list[str]:
        known = (*self.command.results, *self.command.keeps)
        wrong = [f"{name} is visible" for name in now if not _below(name, known)]
        for name in self.command.results:
            actual, old, new = (
                {each: digest for each, digest in one.items() if _below(each, (name,))}
                for one in (now, before, expected.tree)
            )
            ending = self.command.spare
            spare = {each for each in actual if ending and each.endswith(ending)} - old.keys()
            without = {each: digest for each, digest in actual.items() if each not in spare}
            whole = actual.keys() == new.keys() and all(
                actual[each] == new[each] for each in actual if each in expected.stable
            )
            kept = name in self.command.keeps or self.command.resumes_alone
            if not (without == old or whole or kept):
                wrong.append(f"half of {name} is visible: {sorted(actual)}")
        return wrong

    def _next_words(self, now: Tree, expected: Reference) -> tuple[str, ...]:
        command = self.command
        if command.resumes_alone:
            return ()
        main = [name for name in command.results if name not in command.changes][:1]
        there = any(_below(each, tuple(main)) for each in now)
        words = ("--force",) if self.old or there else ()
        unfinished = any(name in now for name in command.keeps[:1]) and not (there and not self.old)
        return (*words, *(command.resume if unfinished else ()))


def _below(name: str, folders: tuple[str, ...]) -> bool:
    return any(name == folder or name.startswith(folder + "/") for folder in folders)


def broken_json(place: Place) -> list[str]:
    """Return the visible JSON files that cannot be read."""
    wrong = []
    for path in place.out.rglob("*.json"):
        if path.name.startswith("."):
            continue
        with suppress(FileNotFoundError):
            try:
                json.loads(path.read_bytes())
            except ValueError:
                wrong.append(f"{path.relative_to(place.out)} is half written")
    return wrong


def moments(expected: Reference, fault: str, count: int, rng: random.Random) -> list[Moment]:
    """Choose moments: half of them file events, if there are enough, the others anywhere."""
    most = min(expected.events, count // 2)
    events = sorted(rng.sample(range(1, expected.events + 1), most))
    calls = sorted(rng.randint(1, max(1, expected.calls)) for _ in range(count - most))
    return [Moment("file", event, fault) for event in events] + [
        Moment("call", call, fault) for call in calls
    ]
