# SPDX-License-Identifier: Apache-2.0
"""The result of a benchmark: its file, without meaningless digits, and its common options."""

import argparse
import math
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.files import json_bytes, write_atomically
from saccade.core.machine import this_machine
from saccade.models.scores.results import t975

RESULTS = Path(__file__).parent / "results"
BUILD = Path(__file__).parents[1] / "build" / "benchmarks"
_BEFORE = this_machine()


def options_of(
    doc: str, name: str, *, rounds: int | None = None, seconds: float | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the result file, and with rounds and their length if given."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="of each window")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    return parser


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write the result with every number rounded to five significant digits.

    Unless it has them: the commit, the date, and the machine, with its load before the benchmark.
    """
    write_atomically(path, json_bytes(_rounded({**facts(), **result})))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join((next(lines), "|" + "---|" * len(head), *lines))


def facts() -> dict[str, Any]:
    """Return the commit, the date, and the machine, with its load before the benchmark."""
    return {**commit_and_date(), "machine": _BEFORE.to_dict()}


def commit_and_date() -> dict[str, str]:
    """Return the commit of the sources, and today's date."""
    words = ["git", "-C", str(RESULTS), "rev-parse", "HEAD"]
    commit = subprocess.run(words, capture_output=True, text=True).stdout
    return {"commit": commit.strip(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % t interval of the mean of one value per seed, two at least.

    Source: Student 1908.
    """
    mean = float(np.mean(values))
    half = t975(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median of the rounds, the least and the most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}
