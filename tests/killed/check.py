# SPDX-License-Identifier: Apache-2.0
"""Kill commands at seeded moments and on full disks: `make check-killed`, and a short form.

    python tests/killed/check.py --moments 50 --full 20 --out benchmarks/results/killed.json
    python tests/killed/check.py --commands export --minutes 10 --go-on --out ...

A process that has imported everything forks a child for every run, so that a run costs only what
the command itself does. The JSON records what was actually run and is written after each command.
With --go-on, counts of other commands are kept, and trials that it contains are not run again.
"""

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from counts import Tally, merged, result_of, with_missing

_ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}  # fmt: skip
Try = Callable[[], None]
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")


def main() -> int:
    """Run the trials that fit into the time; return 1 if one found a fault."""
    from commands import COMMANDS

    options = _options()
    root = Path(tempfile.mkdtemp(prefix="killed-"))
    result: dict[str, Any] = {}
    if options.go_on and options.out and options.out.exists():
        result = json.loads(options.out.read_bytes())
    try:
        for one in _each(options, root, result):
            result = with_missing(merged(result, one) if result else one, COMMANDS)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if options.json:
        print(json.dumps(result, indent=1))
    return 1 if result["faults"] else 0


def _each(
    options: argparse.Namespace, root: Path, before: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the result of every command; unused time goes to the remaining commands."""
    from commands import COMMANDS, inputs
    from forks import threads

    from saccade.core.machine import this_machine

    chosen = [COMMANDS[name] for name in options.commands or COMMANDS]
    inputs(root / "given", {need for each in chosen for need in each.requirements})
    if any("exported" in each.changes for each in chosen):
        _exported(root)
    disk = _disk() if options.full else "none"
    end = time.monotonic() + options.minutes * 60
    for index, command in enumerate(chosen):
        begun = time.monotonic()
        bench = _Bench(command, options, root, begun + (end - begun) / (len(chosen) - index))
        if threads() > 1:
            raise SystemExit(f"this process has {threads()} threads, which a fork would lose")
        tallies = bench.all(before)
        run = {
            "command": "python tests/killed/check.py " + " ".join(sys.argv[1:]),
            "seed": options.seed, "seconds": round(time.monotonic() - begun), "full_disk": disk,
            "machine": this_machine().to_dict(),
        }  # fmt: skip
        yield result_of(tallies, run)


def _exported(root: Path) -> None:
    from commands import COMMANDS
    from forks import Place, run

    place = Place(root / "exporting")
    place.make()
    words = ("export", "{given}/nac.safetensors", "--out", "{given}/exported", "--budget", "0.5")
    ended = run(replace(COMMANDS["export"], words=words), root / "given", place)
    if ended.code:
        raise SystemExit(ended.said)


class _Bench:
    """The trials of one command."""

    def __init__(self, command: Any, options: argparse.Namespace, root: Path, end: float) -> None:
        from forks import Place, imported, modules
        from trial import lay_out, reference

        self.command, self.options, self.end = command, options, end
        self.root, self.given = root / command.name.replace(", ", "-"), root / "given"
        place = Place(self.root / "imports")
        lay_out(command, self.given, place, old=False)
        imported(modules(command, self.given, place))
        self.expected = reference(command, self.given, self.root)
        self.number = 0

    def all(self, before: dict[str, Any]) -> list[Tally]:
        """Alternate signals and full disks, so that an interrupted run has some of each.

        Trials with counts in `before` are not run again.
        """
        found = [self._signals(fault) for fault in SIGNALS]
        if self.options.full and self.command.results:
            found.append(self._full())
        for tally, tries in found:
            tally.take(before, self.options.seed)
            del tries[: tally.run]
        for turn in zip_longest(*(tries for _, tries in found)):
            for one in filter(None, turn):
                one()
        tallies = [tally for tally, _ in found]
        for each in tallies:
            print(
                f"{each.command}, {each.fault}: {each.run} of {each.planned} run, "
                f"{each.took_effect} took effect, {len(each.faults)} faults",
                file=sys.stderr,
                flush=True,
            )
        return tallies

    def _signals(self, fault: str) -> tuple[Tally, list[Try]]:
        from trial import Trial, moments

        rng = random.Random(f"{self.options.seed} {self.command.name} {fault}")
        tally = Tally(self.command.name, fault, self._share_of(self.options.moments))
        chosen = moments(self.expected, fault, tally.planned, rng)
        rng.shuffle(chosen)
        tries = []
        for index, moment in enumerate(chosen):
            # Every other trial replaces an older result, unless the command resumes by itself.
            old = index % 2 == 1 and self.command.replaces
            tries.append(partial(self._try, tally, Trial(self.command, moment, old)))
        return tally, tries

    def _full(self) -> tuple[Tally, list[Try]]:
        import full

        tally = Tally(self.command.name, "ENOSPC", self._share_of(self.options.full))
        trials = [
            full.trial(self.command, self.expected, index, tally.planned)
            for index in range(tally.planned)
        ]
        return tally, [partial(self._try, tally, *trial) for trial in trials]

    def _share_of(self, trials: int) -> int:
        return math.ceil(self.command.share * trials)

    def _try(self, tally: Tally, trial: Any, disk: Any = None) -> None:
        from forks import Place

        if time.monotonic() > self.end:
            return
        self.number += 1
        place = Place(self.root / str(self.number))
        if disk is None:
            ended, wrong = trial.run(self.given, place, self.expected)
        else:
            ended, wrong = disk.run(trial, self.given, place, self.expected)
        tally.run += 1
        tally.took_effect += ended.code != 0
        if wrong:
            fault = {**vars(trial.moment), "over an older result": trial.old, "wrong": wrong}
            tally.faults.append(fault)
            print(tally.command, json.dumps(fault), file=sys.stderr, flush=True)
        shutil.rmtree(place.root, ignore_errors=True)


def _disk() -> str:
    import full

    return full.kind()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--moments", type=int, default=50, help="moments for each command and signal"
    )
    parser.add_argument("--full", type=int, default=20, help="full disks for each command")
    parser.add_argument("--commands", nargs="*", help="only these commands")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="stop after this time and report it"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--go-on", action="store_true", help="continue with the counts in --out")
    parser.add_argument("--json", action="store_true", help="print every result to standard output")
    return parser.parse_args()


if __name__ == "__main__":
    if _ONE_THREAD.items() <= os.environ.items():
        sys.exit(main())
    # A fork would lose the threads of a library's pool.
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_ONE_THREAD})
