# SPDX-License-Identifier: Apache-2.0
"""Run rows one after the other and write the result file."""

import argparse
import json
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.driver import run_row, untried
from chaos.judge import Check, judge, plain, summary
from chaos.service import ServiceFailed
from chaos.table import Row, rows
from saccade.core.files import json_bytes, write_atomically
from saccade.core.machine import this_machine
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "saccade"
BUDGETS = (1.0, 0.25)


def run_rows(given: argparse.Namespace) -> bool:
    """Run every row as often as requested and write each result immediately."""
    repository = given.repository or repository_of(given.build)
    passed = True
    for row in rows(tuple(given.rows)):
        tries = [one_try(row, repository, given.seed + turn) for turn in range(given.times)]
        held = all(attempt["passed"] for attempt in tries if "untried" not in attempt)
        passed &= held
        entry = {"what": row.what, "passed": held, "tries": tries}
        if all("untried" in attempt for attempt in tries):
            entry = {"what": row.what, "untried": tries[0]["untried"]}
        add(given.out, ("rows", row.name), entry | {"machine": this_machine().to_dict()})
    return passed


def one_try(row: Row, repository: Path, seed: int) -> dict[str, Any]:
    """Run one row once; print its checks and return them as plain values."""
    began = time.monotonic()
    if reason := untried(row):
        print(f"-- {row.name}: not tried, {reason}", flush=True)
        return {"seed": seed, "untried": reason}
    try:
        seen = run_row(row, repository, seed=seed)
    except (ServiceFailed, OSError, IndexError) as error:
        traceback.print_exc()
        checks: Sequence[Check] = [Check("the row can be run", "yes", repr(error)[:300], False)]
        attempt: dict[str, Any] = {}
    else:
        checks, attempt = judge(row, seen), summary(seen)
    passed = all(check.passed for check in checks)
    took_s = time.monotonic() - began
    print(f"{'ok' if passed else 'NO'} {row.name} ({took_s:.0f} s)", flush=True)
    for check in checks:
        if not check.passed:
            print(f"   {check.what}: {check.found}; wanted {check.wanted}", flush=True)
    return {"seed": seed, "passed": passed, "took_s": took_s, "checks": plain(checks), **attempt}


def repository_of(build: Path) -> Path:
    """Export the shipped digits-sum at two budgets, once, and return its repository."""
    return _deployed(build, "digits-sum", PACKAGE / "models/shipped/digits-sum.safetensors")


def tiny_repository_of(build: Path) -> Path:
    """Return the repository of a very cheap model, so that a soak tests the service itself."""
    from tiny import tiny_nac

    checkpoint = build / "tiny.safetensors"
    if not checkpoint.exists():
        build.mkdir(parents=True, exist_ok=True)
        tiny_nac(checkpoint)
    return _deployed(build, "tiny", checkpoint)


def _deployed(build: Path, name: str, checkpoint: Path) -> Path:
    from saccade.exporter.export import ExportOptions, export

    folder, repository = build / name, build / f"{name}-repository"
    if not folder.exists():
        build.mkdir(parents=True, exist_ok=True)
        export(checkpoint, ExportOptions(folder, name="nac", budget=BUDGETS))
    # Again each time, because the router's code may have changed.
    deploy(folder, RepositoryOptions(out=repository, force=True))
    return repository


def add(path: Path, keys: tuple[str, ...], value: Any) -> None:
    """Put one value into the file and keep the others."""
    content = json.loads(path.read_bytes()) if path.exists() else {"benchmark": "faults on purpose"}
    place = content
    for key in keys[:-1]:
        place = place.setdefault(key, {})
    place[keys[-1]] = _rounded(value)
    write_atomically(path, json_bytes(content))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
