# SPDX-License-Identifier: Apache-2.0
"""When requests arrive and what each asks for: read from a log, or generated."""

import math
import re
from array import array
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from saccade.core import limits
from saccade.core.errors import SaccadeError
from saccade.models.data.samples.tables import TEXT_TABLES, lines

MOST = 2_000_000  # arrivals of one replay, each of which takes about 500 bytes
MOST_SIZES = 64  # for each, an image is made
# A time is in seconds; a larger number counts milliseconds, microseconds or nanoseconds since 1970.
_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3), (0.0, 1.0))
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
_GENERATED = re.compile(r"(poisson|gamma|step):([0-9.e+-]+)(x?)(?:,([0-9.e+-]+))?")
_COLUMNS = ("time", "size", "budget", "caller")


class Source(NamedTuple):
    """What a request says apart from its time; empty where the log says nothing."""

    size: tuple[int, int] | None = None  # width and height of the image in pixels
    budget: str = ""
    caller: str = ""


class Arrivals(NamedTuple):
    """The requests of a replay.

    Shapes: at_s float64 [n], ascending, from 0; source [n], indices of `sources`; edges [phases+1].
    Units: at_s and edges are seconds; `unsorted` counts lines of a log earlier than the one before.
    """

    at_s: np.ndarray
    source: np.ndarray
    sources: tuple[Source, ...]
    edges: np.ndarray
    unsorted: int = 0


def read_log(path: Path, seconds: float | None = None) -> Arrivals:
    """Return the arrivals of a log, or of its first seconds, sorted: services log at the end.

    Raises: SaccadeError for a file, a line or a value that cannot be read; for too many of them.
    """
    if path.suffix.lower() not in TEXT_TABLES or not path.is_file():
        raise SaccadeError(
            f"{path}: found no such log, expected a file {', '.join(TEXT_TABLES)} with a column or "
            "key 'time', and optionally 'size', 'budget' and 'caller'."
        )
    times, places, sources = array("d"), array("l"), dict[Source, int]()
    unit, end_s = 0.0, math.inf
    for row, values in enumerate(lines(path), 1):
        try:
            source, time = _source(values), _time(values.get("time"))
        except ValueError as error:
            raise SaccadeError(f"{path}: row {row:,}: {error}.") from None
        if not unit:
            unit = next(per_s for least, per_s in _UNITS if time >= least)
            end_s = time / unit + (seconds or math.inf)
        if time / unit >= end_s:
            break
        times.append(time / unit)
        places.append(sources.setdefault(source, len(sources)))
        if row > MOST:
            raise SaccadeError(
                f"{path}: found more than {MOST:,} rows, expected at most that many. To replay the "
                "beginning, pass --seconds."
            )
    if not times or len({source.size for source in sources}) > MOST_SIZES:
        found = f"more than {MOST_SIZES} sizes of images" if times else "no arrival"
        raise SaccadeError(f"{path}: found {found}, expected one in each row. Correct the log.")
    at_s, source_at = np.array(times), np.array(places)
    order, unsorted = np.argsort(at_s, kind="stable"), int((np.diff(at_s) < 0).sum())
    at_s = at_s[order] - at_s.min()
    return Arrivals(at_s, source_at[order], (*sources,), np.array([0.0, at_s[-1]]), unsorted)


def _time(value: Any) -> float:
    number = math.nan
    try:
        number = float(value)
    except (TypeError, ValueError):
        try:
            stamp = datetime.fromisoformat(str(value).strip())
            number = (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()
        except ValueError:
            pass
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise ValueError(
            f"time is {value!r:.60}, expected seconds of at least 0, milliseconds since 1970, or a "
            "timestamp such as 2026-03-01T12:00:00.25Z"
        )
    return number


def _source(values: Mapping[str, Any]) -> Source:
    if unknown := [name for name in values if name not in _COLUMNS]:
        raise ValueError(f"found {unknown[0]!r:.60}, expected only {', '.join(_COLUMNS)}")
    words = ("" if values.get(name) is None else str(values[name]) for name in _COLUMNS[1:])
    size, budget, caller = (word.strip() for word in words)
    found = _SIZE.fullmatch(size)
    pixels = (int(found[1]), int(found[2])) if found else None
    if size and (pixels is None or math.prod(pixels) > limits.IMAGE_PIXELS):
        most = f"width and height of at most {limits.IMAGE_PIXELS:,} pixels"
        raise ValueError(f"size is {size!r:.60}, expected {most}, such as 640x480")
    return Source(pixels, budget, caller)


class Generated(NamedTuple):
    """Random arrivals.

    `value` is the squared coefficient of variation of the gaps (gamma; 1 is Poisson), or how many
    times larger the rate is in the middle third (step).
    """

    kind: str
    rate: float
    of_capacity: bool  # whether the rate is times the capacity, instead of requests per second
    value: float

    @classmethod
    def read(cls, text: str) -> "Generated":
        """Return what --arrivals says.

        Raises: SaccadeError if it is none of the forms.
        """
        try:
            kind, rate, times, value = _GENERATED.fullmatch(text.strip()).groups()  # type: ignore[union-attr]
            found = cls(kind, float(rate), bool(times), float(value or 1))
            valid = 0 < found.rate < math.inf and 0 < found.value <= 1000
        except (AttributeError, ValueError):
            valid = False
        if not valid or (value is None) != (kind == "poisson"):
            raise SaccadeError(
                f"--arrivals: found {text!r:.60}, expected poisson:RATE, gamma:RATE,CV2 or "
                "step:RATE,TIMES. RATE is requests per second, or times the capacity: 0.7x. CV2 "
                "and TIMES are at most 1000."
            )
        return found

    def arrivals(self, rate: float, seconds: float, seed: int) -> Arrivals:
        """Return arrivals for some seconds; the rate is the one outside of a step.

        Raises: SaccadeError if there are too many, or none.
        """
        step = self.kind == "step"
        edges = np.linspace(0.0, seconds, 4 if step else 2)
        rates = rate * np.array([1.0, self.value, 1.0] if step else [1.0])
        # Gaps of mean 1 on a clock that runs as fast as the rate.
        clock = np.concatenate([[0.0], np.cumsum(rates * np.diff(edges))])
        if clock[-1] > MOST:
            raise SaccadeError(
                f"--arrivals: found {clock[-1]:,.0f} requests, expected at most {MOST:,}. Pass "
                "fewer --seconds, or a lower rate."
            )
        rng, shape = np.random.default_rng(seed), 1 / self.value if self.kind == "gamma" else 1.0
        at = np.zeros(1)
        while at[-1] < clock[-1]:
            gaps = rng.gamma(shape, 1 / shape, int(clock[-1]) + 100)
            at = np.concatenate([at, at[-1] + np.cumsum(gaps)])
        at_s = np.interp(at[(at > 0) & (at < clock[-1])], clock, edges)
        if not len(at_s):
            raise SaccadeError("--arrivals: found no request in this time. Pass more --seconds.")
        return Arrivals(at_s, np.zeros(len(at_s), int), (Source(),), edges)
