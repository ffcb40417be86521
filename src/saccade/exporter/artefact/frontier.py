# SPDX-License-Identifier: Apache-2.0
"""Measurements of each variant, in `frontier.json`: score against speed, and who dominates."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from saccade import limits
from saccade.errors import SaccadeError
from saccade.exporter.artefact.variant import known_roles
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.files import read_bounded
from saccade.json_text import parse_json
from saccade.models.scores.intervals import paired_bootstrap
from saccade.plugins.execution import Ops
from saccade.schema import AGAIN, typed

SCHEMA = "saccade.frontier"
VERSION = 1
FILE_NAME = "frontier.json"
_POINT = re.compile(r"batch_[1-9][0-9]{0,6}|(router_)?concurrency_[1-9][0-9]{0,6}")
_FIGURES = ("inferences_per_second", "p50_ms", "p95_ms", "p99_ms")


@dataclass(frozen=True)
class Score:
    """Score of a variant: a figure, its interval, and the data that it comes from."""

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
    # threads, best_batch, a point for each batch_<n>; the same under the name of another component
    in_process: dict[str, Any]
    # a point for each concurrency_<n>, router_concurrency_<n>; the same of another component
    grpc: dict[str, Any] | None
    dominated_by: str | None = None
    embedding_bytes: int | None = None  # where the budget saves these, and no time
    memory_bytes: int | None = None  # resident, of a process that holds it, where a sweep looked
    ops: Ops = None  # how its custom ops ran; none: it has none, or the file is of an older release

    @property
    def key(self) -> tuple[str, str, str, Ops]:
        """Key of the measurement; a newer one of the same key replaces it."""
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
    if isinstance(entries := content.get("entries"), list):
        content["entries"] = [_completed(entry) for entry in entries]
    try:
        frontier: Frontier = typed(Frontier, content, f"{path}: ")
        for index, entry in enumerate(frontier.entries):
            _check_entry(entry, f"{path}: entries[{index}]: ")
    except SaccadeError as error:
        # What checks values serves manifests too.
        raise SaccadeError(str(error).replace(AGAIN, _AGAIN)) from error
    if len({entry.key for entry in frontier.entries}) < len(frontier.entries):
        raise SaccadeError(f"{path}: holds the same measurement twice. {_AGAIN}")
    return frontier


def merged(old: Frontier, entries: Iterable[Entry], variants: Iterable[VariantFiles]) -> Frontier:
    """The old measurements of these variants, and the new ones in the place of the same."""
    present = {variant.sha256: variant for variant in variants}
    kept = (
        with_ops(entry, present[entry.sha256]) for entry in old.entries if entry.sha256 in present
    )
    by_key = {entry.key: entry for entry in (*kept, *entries)}

    def order(entry: Entry) -> tuple[str, str, float, str, str]:
        return entry.device, entry.runtime, -entry.budget, entry.variant, entry.ops or ""

    return Frontier(old.model, tuple(sorted(by_key.values(), key=order)))


def with_ops(entry: Entry, variant: VariantFiles) -> Entry:
    """The entry, with what older releases do not say: their custom ops ran by the bodies.

    That was the default; which of the two `--op-library` chose was not written.
    """
    if entry.ops is None and any(component.custom_ops for component in variant.components.values()):
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
    (dominators_of,) = dominators(entries, values, (saved,), seed=seed)
    return tuple(replace(entry, dominated_by=dominators_of[entry.variant]) for entry in entries)


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
    """Saving of B over A, below 0 where it costs more: bytes if a budget saves these."""
    if a.embedding_bytes is not None and b.embedding_bytes is not None:
        return a.embedding_bytes - b.embedding_bytes
    return b.speed - a.speed


def _goodness(entry: Entry) -> float:
    return entry.score.value if entry.score.higher_is_better else -entry.score.value


_AGAIN = "Measure again with: saccade bench FOLDER"


def entry_of(value: Any) -> Entry:
    """One entry from its JSON object, every key checked.

    Raises: SaccadeError that names the key.
    """
    entry: Entry = typed(Entry, _completed(value), "entry: ")
    _check_entry(entry, "entry: ")
    return entry


def _completed(value: Any) -> Any:
    """With the keys that older files lack, and the memory that a benchmark leaves out."""
    older = {"embedding_bytes": None, "memory_bytes": None, "ops": None}
    return {**older, **value} if isinstance(value, dict) else value


def _check_entry(entry: Entry, where: str) -> None:
    if len(entry.score.interval) != 2:
        raise SaccadeError(f"{where}score: interval: is {entry.score.interval}. {AGAIN}")
    _check_points(entry.in_process, f"{where}in_process: ")
    best = typed(int, entry.in_process.get("best_batch"), f"{where}best_batch: ")
    if f"batch_{best}" not in entry.in_process:
        raise SaccadeError(
            f"{where}best_batch is {best}, but batch_{best} was not measured. {AGAIN}"
        )
    _check_points(entry.grpc or {}, f"{where}grpc: ")


def _check_points(points: dict[str, Any], where: str, inside: bool = False) -> None:
    for key, point in points.items():
        if key in ("threads", "best_batch"):
            continue
        is_component = key in known_roles()[1:] and not inside
        if not is_component and not _POINT.fullmatch(key):
            raise SaccadeError(f"{where}key {key!r:.60} is not known. {AGAIN}")
        content = typed(dict[str, Any], point, f"{where}{key}: ")
        if is_component:
            _check_points(content, f"{where}{key}: ", inside=True)
            continue
        for figure in _FIGURES:
            typed(float, content.get(figure), f"{where}{key}: {figure}: ")


def _count(key: str) -> int:
    return int(key.rpartition("_")[2])
