# SPDX-License-Identifier: Apache-2.0
"""What was measured of each variant, in `frontier.json`: score against speed, and who dominates."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade import limits
from saccade.errors import SaccadeError
from saccade.export.artefact.variant import known_roles
from saccade.export.artefact.variant_files import VariantParts
from saccade.files import read_bounded
from saccade.json_text import parse_json
from saccade.models.scores.intervals import paired_bootstrap
from saccade.plugins.execution import OPS, Ops

SCHEMA = "saccade.frontier"
VERSION = 1
FILE_NAME = "frontier.json"
_POINT = re.compile(r"batch_[1-9][0-9]{0,6}|(router_)?concurrency_[1-9][0-9]{0,6}")
_FIGURES = ("inferences_per_second", "p50_ms", "p95_ms", "p99_ms")


@dataclass(frozen=True)
class Score:
    """What the variant is good at: a figure, its interval, and the data that it comes from."""

    name: str
    value: float
    higher_is_better: bool
    unit: str
    n: int
    interval: tuple[float, float]
    data: str
    data_sha256: str


@dataclass(frozen=True)
class Entry:
    """One variant on one runtime and device; the hash says which bytes were measured."""

    variant: str
    sha256: str
    budget: float
    precision: str
    runtime: str
    device: str
    score: Score
    top5: float | None
    # threads, best_batch, a point for each batch_<n>; the same under the name of another part
    in_process: dict[str, Any]
    # a point for each concurrency_<n>, router_concurrency_<n>; the same of another part
    grpc: dict[str, Any] | None
    dominated_by: str | None = None
    embedding_bytes: int | None = None  # where the budget saves these, and no time
    memory_bytes: int | None = None  # resident, of a process that holds it, where a sweep looked
    ops: Ops = None  # how its custom ops ran; none: it has none, or the file is of an older release

    @property
    def key(self) -> tuple[str, str, str, Ops]:
        """What the measurement is of; a newer one of the same key replaces it."""
        return self.sha256, self.runtime, self.device, self.ops

    @property
    def speed(self) -> float:
        """Inferences per second: through gRPC at the highest concurrency, else in process.

        Through the router, where no single model answers.
        """
        for kind in ("concurrency_", "router_concurrency_"):
            points = [key for key in self.grpc or () if key.startswith(kind)]
            if self.grpc and points:
                return float(self.grpc[max(points, key=_count)]["inferences_per_second"])
        return float(self.in_process[f"batch_{self.best_batch}"]["inferences_per_second"])

    @property
    def best_batch(self) -> int:
        """The number of images that run fastest in one call."""
        return int(self.in_process["best_batch"])

    @property
    def p95_ms(self) -> float | None:
        """The latency of one image at concurrency 1, through the router where that was measured."""
        for key in ("router_concurrency_1", "concurrency_1"):
            if self.grpc and key in self.grpc:
                return float(self.grpc[key]["p95_ms"])
        return None


@dataclass(frozen=True)
class Frontier:
    """All measurements of one model's variants."""

    model: str
    entries: tuple[Entry, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON object, schema and version included."""
        return {"schema": SCHEMA, "version": VERSION, **asdict(self)}


def read_frontier(path: Path) -> Frontier:
    """A frontier file, every key checked.

    Raises: SaccadeError for a missing or foreign file, an unknown version, an unknown, missing
        or wrong key, and the same measurement twice.
    """
    try:
        content = parse_json(read_bounded(path, limits.JSON_BYTES))
        schema, version = content.pop("schema"), content.pop("version")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SaccadeError(f"{path}: is not a frontier file ({error!r:.200}). {_AGAIN}") from error
    if (schema, version) != (SCHEMA, VERSION):
        raise SaccadeError(
            f"{path}: is {schema!r} version {version!r}, expected {SCHEMA!r} version {VERSION}. "
            f"{_AGAIN}"
        )
    try:
        _require_keys(content, Frontier, "frontier")
        entries = tuple(entry_of(each) for each in _of_type(content["entries"], list, "entries"))
        model = _of_type(content["model"], str, "model")
    except (ValueError, TypeError) as error:
        raise SaccadeError(f"{path}: {error}. {_AGAIN}") from error
    if len({entry.key for entry in entries}) < len(entries):
        raise SaccadeError(f"{path}: holds the same measurement twice. {_AGAIN}")
    return Frontier(model, entries)


def merged(old: Frontier, entries: Iterable[Entry], variants: Iterable[VariantParts]) -> Frontier:
    """The old measurements of these variants, and the new ones in the place of the same."""
    present = {variant.sha256: variant for variant in variants}
    kept = (
        with_ops(entry, present[entry.sha256]) for entry in old.entries if entry.sha256 in present
    )
    found = {entry.key: entry for entry in (*kept, *entries)}

    def order(entry: Entry) -> tuple[str, str, float, str, str]:
        return entry.device, entry.runtime, -entry.budget, entry.variant, entry.ops or ""

    return Frontier(old.model, tuple(sorted(found.values(), key=order)))


def with_ops(entry: Entry, variant: VariantParts) -> Entry:
    """The entry, with what older releases do not say: their custom ops ran by the bodies.

    That was the default; which of the two `--op-library` chose was not written.
    """
    if entry.ops is None and any(part.custom_ops for part in variant.parts.values()):
        return replace(entry, ops="bodies")
    return entry


def mark_dominated(
    entries: Iterable[Entry], values: Mapping[str, np.ndarray], *, seed: int = 0
) -> tuple[Entry, ...]:
    """The entries with `dominated_by` set.

    What costs is time, or where the budget saves no time the bytes of an embedding.
    Shapes: values[variant] [n], of each test sample in the same order; their mean is the score.
    """
    entries = tuple(entries)
    (found,) = dominators(entries, values, (saved,), seed=seed)
    return tuple(replace(each, dominated_by=found[each.variant]) for each in entries)


def dominators(
    entries: Sequence[Entry],
    values: Mapping[str, np.ndarray],
    savings: Sequence[Callable[[Entry, Entry], float]],
    *,
    seed: int = 0,
) -> list[dict[str, str | None]]:
    """For each way to save (what B costs less than A): by variant, the one that dominates it.

    A is dominated by B, both on the same runtime and device, if B costs no more and the paired
    bootstrap's 95 % interval of how much better B scores lies above 0; or if both have the same
    value on each sample and B costs less. A difference that the data cannot tell from chance
    dominates nobody. Of several such B the best-scoring one is named, then the cheaper.
    Shapes: values[variant] [n], of each test sample in the same order; their mean is the score.
    """
    surely: dict[tuple[str, str], bool] = {}

    def is_better(b: Entry, a: Entry) -> bool:
        if (b.variant, a.variant) not in surely:
            better, worse = values[b.variant], values[a.variant]
            if not b.score.higher_is_better:
                better, worse = worse, better
            # The bootstrap takes its time: not where the answer is known without it.
            surely[b.variant, a.variant] = bool(
                better.mean() > worse.mean() and paired_bootstrap(better, worse, seed)[0] > 0
            )
        return surely[b.variant, a.variant]

    def dominates(b: Entry, a: Entry, less: float) -> bool:
        if (b.runtime, b.device) != (a.runtime, a.device) or b is a or less < 0:
            return False
        if np.array_equal(values[b.variant], values[a.variant]):
            return less > 0
        return is_better(b, a)

    def strongest(a: Entry, saving: Callable[[Entry, Entry], float]) -> str | None:
        above = [b for b in entries if dominates(b, a, saving(b, a))]
        if not above:
            return None
        return max(above, key=lambda b: (_goodness(b), saving(b, a))).variant

    return [{a.variant: strongest(a, saving) for a in entries} for saving in savings]


def saved(b: Entry, a: Entry) -> float:
    """What B costs less than A, below 0 where it costs more: bytes if a budget saves these."""
    if a.embedding_bytes is not None and b.embedding_bytes is not None:
        return a.embedding_bytes - b.embedding_bytes
    return b.speed - a.speed


def _goodness(entry: Entry) -> float:
    return entry.score.value if entry.score.higher_is_better else -entry.score.value


_AGAIN = "Measure again with: saccade bench FOLDER"


def entry_of(value: Any) -> Entry:
    """One entry from its JSON object, every key checked.

    Raises: ValueError that names the key.
    """
    # As older files are, and as a benchmark leaves the memory.
    value = {"embedding_bytes": None, "memory_bytes": None, "ops": None, **value}
    _require_keys(value, Entry, "entry")
    where = f"entry {value['variant']!r}: "
    score = value["score"]
    _require_keys(score, Score, where + "score")
    for holder, keys, kind in (
        (value, ("variant", "sha256", "precision", "runtime", "device"), str),
        (value, ("budget",), float),
        (score, ("name", "unit", "data", "data_sha256"), str),
        (score, ("higher_is_better",), bool),
        (score, ("n",), int),
        (score, ("value",), float),
    ):
        for key in keys:
            _of_type(holder[key], kind, where + key)
    optional = {"embedding_bytes": int, "memory_bytes": int, "top5": float, "dominated_by": str}
    for key, expected in optional.items():
        if value[key] is not None:
            _of_type(value[key], expected, where + key)
    if value["ops"] not in (None, *OPS):
        raise ValueError(f"{where}ops is {value['ops']!r:.60}, expected {' or '.join(OPS)}")
    low, high = (float(_of_type(each, float, where + "interval")) for each in score["interval"])
    _check_points(value["in_process"], where + "in_process")
    best = _of_type(value["in_process"].get("best_batch"), int, where + "best_batch")
    if f"batch_{best}" not in value["in_process"]:
        raise ValueError(f"{where}best_batch is {best}, but batch_{best} was not measured")
    if value["grpc"] is not None:
        _check_points(value["grpc"], where + "grpc")
    return Entry(**{**value, "score": Score(**{**score, "interval": (low, high)})})


def _check_points(points: Any, where: str, inside: bool = False) -> None:
    for key, point in _of_type(points, dict, where).items():
        if _POINT.fullmatch(key):
            for figure in _FIGURES:
                _of_type(
                    _of_type(point, dict, f"{where} {key}").get(figure),
                    float,
                    f"{where} {key} {figure}",
                )
        elif key in known_roles()[1:] and not inside:
            _check_points(point, f"{where} {key}", inside=True)
        elif key not in ("threads", "best_batch"):
            raise ValueError(f"{where}: key {key!r} is not known")


def _require_keys(value: Any, kind: type, where: str) -> None:
    expected = {field.name for field in fields(kind)}
    if found := set(_of_type(value, dict, where)) ^ expected:
        raise ValueError(f"{where}: keys {sorted(found)} are unknown or missing")


def _of_type(value: Any, kind: type, where: str) -> Any:
    fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not fits or (kind is not bool and isinstance(value, bool)):
        raise ValueError(f"{where} is {value!r:.60}, expected {kind.__name__}")
    if kind is float and not abs(value) <= sys.float_info.max:
        raise ValueError(f"{where} is {value!r:.60}, expected a finite number")
    return value


def _count(key: str) -> int:
    return int(key.rpartition("_")[2])
