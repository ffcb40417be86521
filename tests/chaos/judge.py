# SPDX-License-Identifier: Apache-2.0
"""Judge a row's observation by what the row allows, with one check per requirement."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from chaos.callers import Call
from chaos.table import Notice, Row

QUIET_START_S = 6.0  # start of the service on a quiet machine with 2 cores
FLOOR_MS = 20.0  # shorter waits have no meaningful ratio
FEWEST = 30  # calls needed on each side of a ratio of 99th percentiles


@dataclass
class Observation:
    """What the driver observed in one row.

    Units: times by time.monotonic() in seconds, memory in MiB; start_s the time of the start.
    """

    start_s: float
    began: float
    ended: float
    calls: dict[str, list[Call]]
    heard: Counter[str] = field(default_factory=Counter)
    checks: list[tuple[str, bool]] = field(default_factory=list)
    servers: int = 0
    recovered_s: float | None = None
    leftovers: list[str] = field(default_factory=list)
    memory_mib: tuple[float, float, float] = (0.0, 0.0, 0.0)  # before, maximum, after
    words: dict[str, str] = field(default_factory=dict)  # the first message per status


@dataclass(frozen=True)
class Check:
    """One requirement, what was found, and whether it is met."""

    what: str
    wanted: str
    found: str
    passed: bool


def judge(row: Row, seen: Observation, *, strict: bool = True) -> list[Check]:
    """Return all checks of a row; times and memory are checked only if `strict`."""
    pace = max(1.0, seen.start_s / QUIET_START_S)
    checks = []
    for name, notice in (("callers", row.callers), ("others", row.others)):
        calls = seen.calls.get(name, [])
        if calls:
            checks += _noticed(name, notice, calls, seen, pace if strict else None)
    if seen.heard or row.hears:
        extra = set(seen.heard) - row.hears
        checks.append(Check("the fault's own requests hear", _names(row.hears), _counts(seen.heard),
                            not extra))  # fmt: skip
    checks += [Check(text, "yes", "yes" if held else "no", held) for text, held in seen.checks]
    checks.append(Check("further processes of the server", f"at most {row.servers}",
                        str(seen.servers), seen.servers <= row.servers))  # fmt: skip
    if row.survives:
        took = "never" if seen.recovered_s is None else f"{seen.recovered_s:.1f} s after it"
        checks.append(Check("full service again", "yes", took, seen.recovered_s is not None))
    left = ", ".join(seen.leftovers) or "nothing"
    checks.append(Check("left at the end", "nothing", left, not seen.leftovers))
    if strict and row.memory_mib is not None:
        before, _, after = seen.memory_mib
        grown = after - before
        checks.append(Check("memory more than before", f"at most {row.memory_mib:g} MiB",
                            f"{grown:.0f} MiB", grown <= row.memory_mib))  # fmt: skip
    return checks


def outage_s(calls: Sequence[Call], seen: Observation) -> float:
    """Return how long after the fault's end calls failed."""
    failed = [call.ended for call in calls if call.status != "OK" and call.ended >= seen.began]
    return max(0.0, max(failed, default=seen.ended) - seen.ended)


def p99_times(calls: Sequence[Call], seen: Observation) -> float | None:
    """Return the 99th percentile of waits since the fault over that before; None if too few."""
    before = [1e3 * (one.ended - one.began) for one in calls if one.ended < seen.began]
    after = [1e3 * (one.ended - one.began) for one in calls if one.ended >= seen.began]
    if min(len(before), len(after)) < FEWEST:
        return None
    return float(np.percentile(after, 99) / max(FLOOR_MS, np.percentile(before, 99)))


def summary(seen: Observation) -> dict[str, Any]:
    """Return what callers experienced as plain values, without individual calls."""
    groups: dict[str, Any] = {}
    for name, calls in seen.calls.items():
        since = [call for call in calls if call.ended >= seen.began]
        groups[name] = {
            "calls_before": len(calls) - len(since),
            "statuses_since": dict(Counter(call.status for call in since)),
            "outage_s": outage_s(calls, seen),
            "p99_times": p99_times(calls, seen),
        }
    before, most, after = seen.memory_mib
    return {
        "start_s": seen.start_s, "fault_s": seen.ended - seen.began,
        "recovered_s": seen.recovered_s, "servers": seen.servers, "callers": groups,
        "heard": dict(seen.heard), "words": seen.words,
        "memory_mib": {"before": before, "most": most, "after": after},
    }  # fmt: skip


def plain(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Return checks as plain values."""
    return [asdict(check) for check in checks]


def _noticed(
    name: str, notice: Notice, calls: Sequence[Call], seen: Observation, pace: float | None
) -> list[Check]:
    failed = Counter(
        call.status for call in calls if call.status != "OK" and call.ended >= seen.began
    )
    extra = set(failed) - notice.statuses
    checks = [Check(f"{name} hear", _names(notice.statuses), _counts(failed), not extra)]
    if pace is None:
        return checks
    if notice.for_s:
        allowed, outage = notice.for_s * pace, outage_s(calls, seen)
        checks.append(Check(f"{name} notice it for", f"at most {allowed:.0f} s",
                            f"{outage:.1f} s", outage <= allowed))  # fmt: skip
    times = p99_times(calls, seen)
    if notice.p99_times is not None and times is not None:
        checks.append(Check(f"{name} wait (p99)", f"at most {notice.p99_times:g} times",
                            f"{times:.2f} times", times <= notice.p99_times))  # fmt: skip
    return checks


def _names(statuses: frozenset[str]) -> str:
    return ", ".join(sorted(statuses)) or "answers only"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "answers only"
