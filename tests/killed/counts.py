# SPDX-License-Identifier: Apache-2.0
"""Counts of trials as JSON: how many were planned and run, and what was wrong."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """Counts for one command and one fault."""

    command: str
    fault: str
    planned: int
    run: int = 0
    took_effect: int = 0  # the others finished before their moment, or had enough space
    faults: list[dict[str, Any]] = field(default_factory=list)

    def take(self, before: dict[str, Any], seed: int) -> None:
        """Take over the counts of the same trials from an earlier result, if it has them."""
        for each in before.get("results", ()):
            same = (each["command"], each["fault"], each["planned"])
            if same != (self.command, self.fault, self.planned):
                continue
            if before["runs"][self.command]["seed"] == seed:
                self.run, self.took_effect = each["run"], each["took_effect"]
                self.faults = list(each["faults"])


def result_of(tallies: list[Tally], run: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one run; `run` describes it."""
    return _result([vars(tally) for tally in tallies], {tally.command: run for tally in tallies})


def merged(before: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Replace the counts of commands that have new ones and keep the others."""
    kept = [result for result in before["results"] if result["command"] not in new["runs"]]
    runs = {name: before["runs"][name] for name in {each["command"] for each in kept}}
    return _result([*kept, *new["results"]], {**runs, **new["runs"]})


def with_missing(result: dict[str, Any], commands: Iterable[str]) -> dict[str, Any]:
    """Add the list of commands that are missing from the result."""
    missing = [name for name in commands if name not in result["runs"]]
    return {**result, "not_run": missing, "complete": result["complete"] and not missing}


def _result(results: list[dict[str, Any]], runs: dict[str, Any]) -> dict[str, Any]:
    return {
        "benchmark": "commands ended at seeded moments, and on full disks",
        "complete": all(result["run"] == result["planned"] for result in results),
        "faults": sum(len(result["faults"]) for result in results),
        "runs": runs,
        "results": results,
    }
