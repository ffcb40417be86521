# SPDX-License-Identifier: Apache-2.0
"""Which of several measurements counts, and which one a smaller measurement may not replace."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.frontier import Frontier, FrontierEntry, point_size
from saccade.plugins.contract import Ops

_MUCH_SHORTER = 0.5
Place = tuple[str, str]  # a device and a runtime


class NarrowerMeasurement(SaccadeError):
    """New measurements are smaller than those that they would replace; `less` lists how."""

    def __init__(self, path: Path, less: tuple[str, ...]) -> None:
        super().__init__(
            f"{path}: contains a larger measurement: {'; '.join(less)}. Measure at least as much, "
            "or allow the smaller measurement to replace it."
        )
        self.less = less


def narrower(old: Frontier, entries: Iterable[FrontierEntry]) -> tuple[str, ...]:
    """Describe what new measurements lack compared with those they would replace, per variant.

    Those of other versions of the runtime stay, but the installed version decides.
    """
    there: dict[Any, list[FrontierEntry]] = {}
    for entry in old.entries:
        there.setdefault(_any_version(entry), []).append(entry)
    less = (
        f"{new.variant}: {words}" + f" of {before.runtime}" * (before.runtime != new.runtime)
        for new in entries
        for before in there.get(_any_version(new), ())
        if (words := _narrower(new, before))
    )
    return tuple(dict.fromkeys(less))


def _any_version(entry: FrontierEntry) -> tuple[str, str, str, Ops]:
    return entry.sha256, runtime_name(entry.runtime), entry.device, entry.ops


def runtime_name(runtime: str) -> str:
    """Return the name in the description of a runtime: its version and device follow it."""
    return runtime.split()[0]


def chosen_place(places: Collection[Place], device: str | None, here: Place) -> Place | None:
    """Return the device and the version of a runtime whose figures count; None if unclear.

    It is the named device, the only one, or this machine, with the version that is installed, or
    else the newest.
    """
    named = [place for place in places if device in (None, place[0])]
    if len({own for own, _ in named}) > 1:
        named = [place for place in named if place == here]
    if here in named:
        return here
    return max(named, key=lambda place: [*map(int, re.findall("[0-9]+", place[1]))], default=None)


def _narrower(new: FrontierEntry, old: FrontierEntry) -> str | None:
    # Where a measurement stops by itself, another one may stop a little earlier.
    if new.score.n < _MUCH_SHORTER * old.score.n:
        return f"{new.score.n:,} instead of {old.score.n:,} test samples"
    if missing := sorted(set(old.grpc or ()) - set(new.grpc or ()), key=point_size):
        return f"no server measurement at {missing[0]}" if new.grpc else "no server measurement"
    if len(new.speed_rounds) < _MUCH_SHORTER * len(old.speed_rounds):
        return f"{len(new.speed_rounds)} instead of {len(old.speed_rounds)} rounds"
    if new.speed_seconds < _MUCH_SHORTER * old.speed_seconds:
        return f"{new.speed_seconds:.2g} instead of {old.speed_seconds:.2g} s per point"
    return None
