# SPDX-License-Identifier: Apache-2.0
"""The score and speed of each variant in `frontier.json`, and which variants are dominated."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.schema import AGAIN, Positive, Probability, Range, Share, typed
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.artefact.manifest_checks import read_stored
from saccade.exporter.artefact.variant import known_roles
from saccade.models.scores.results import Interval, paired_bootstrap, paired_log_ratio
from saccade.plugins.contract import Ops

SCHEMA = "saccade.frontier"
VERSION = 1
FILE_NAME = "frontier.json"
POLICIES, POLICIES_VERSION = "policies", 1  # key of the policies, and the version of its content
_POINT = re.compile(r"batch_[1-9][0-9]{0,6}|(router_)?concurrency_[1-9][0-9]{0,6}")
_COUNT = re.compile(r"[1-9][0-9]{0,3}")
_FIGURES = ("inferences_per_second", "p50_ms", "p95_ms", "p99_ms")
ROUNDS = "inferences_per_second_rounds"  # of a point: the rate of each round
SECONDS = "seconds"  # of a point: measured time over all rounds
BY_THREADS = "by_threads"  # in process: inferences per second by number of threads
NEARLY = 0.95  # share of the highest throughput; below it, the difference is not just noise


@dataclass(frozen=True)
class MeasuredScore:
    """The score of a variant: value, interval, and the data that it was computed on."""

    name: str
    value: float
    higher_is_better: bool
    unit: str
    n: int
    interval: tuple[float, float]
    data: str
    data_sha256: str


@dataclass(frozen=True)
class FrontierEntry:
    """The measurements of one variant on one runtime and device; the hash identifies the file."""

    variant: str
    sha256: str
    budget: float
    precision: str
    runtime: str
    device: str
    score: MeasuredScore
    top5: float | None
    # threads, by_threads, best_batch, a point per batch_<n>; for other components the same under
    # their role
    in_process: dict[str, Any]
    # a point per concurrency_<n> and router_concurrency_<n>; other components: the same
    grpc: dict[str, Any] | None
    dominated_by: str | None = None
    embedding_bytes: int | None = None  # if the budget saves these instead of time
    memory_bytes: int | None = None  # resident set of a process that loaded it; only from sweeps
    ops: Ops = None  # how its custom ops ran; None: it has none

    @property
    def key(self) -> tuple[str, str, str, Ops]:
        """The key of the measurement: a newer one with the same key replaces it."""
        return self.sha256, self.runtime, self.device, self.ops

    @property
    def speed(self) -> float:
        """Inferences per second: through gRPC at the highest concurrency, otherwise in process.

        If no single model answers a request, it was measured through the router.
        """
        return float(self._speed_point["inferences_per_second"])

    @property
    def speed_rounds(self) -> tuple[float, ...]:
        """The speed in each round; empty in files of older releases."""
        return tuple(float(rate) for rate in self._speed_point.get(ROUNDS, ()))

    @property
    def speed_seconds(self) -> float:
        """How long the speed was measured, in seconds; 0 in files of older releases."""
        return float(self._speed_point.get(SECONDS, 0))

    @property
    def _speed_point(self) -> dict[str, Any]:
        for kind in ("concurrency_", "router_concurrency_"):
            points = [key for key in self.grpc or () if key.startswith(kind)]
            if self.grpc and points:
                return dict(self.grpc[max(points, key=point_size)])
        return dict(self.in_process[f"batch_{self.best_batch}"])

    @property
    def seconds(self) -> float:
        """Time per sample in process, in the batch that is fastest."""
        point = self.in_process[f"batch_{self.best_batch}"]
        return 1 / float(point["inferences_per_second"])

    @property
    def best_batch(self) -> int:
        """The batch size with the highest throughput."""
        return int(self.in_process["best_batch"])

    @property
    def threads(self) -> int:
        """The threads of one run, in process and in the server that was measured."""
        return int(self.in_process["threads"])

    def enough_threads(self, role: str = "") -> int | None:
        """Return how many threads of a component are enough; see the function of that name."""
        inside = self.in_process.get(role, self.in_process)
        return enough_threads({int(n): rate for n, rate in inside.get(BY_THREADS, {}).items()})

    @property
    def p95_ms(self) -> float | None:
        """95th percentile latency of one image at concurrency 1, through the router if measured."""
        return self.latency_ms(1, 95)

    def latency_ms(self, concurrency: int, percentile: int) -> float | None:
        """Return a latency of single images, through the router if measured; None if it was not."""
        for key in (f"router_concurrency_{concurrency}", f"concurrency_{concurrency}"):
            if self.grpc and key in self.grpc:
                return float(self.grpc[key][f"p{percentile}_ms"])
        return None

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """The numbers of callers whose latencies were measured."""
        return tuple(sorted({int(key.rpartition("_")[2]) for key in self.grpc or ()}))


def enough_threads(rates: Mapping[int, float]) -> int | None:
    """Return the fewest threads whose rate is nearly the highest.

    None if these are the most that were measured: more may be faster still.
    Units: rates in inferences per second, by number of threads.
    """
    near = (count for count, rate in rates.items() if rate >= NEARLY * max(rates.values()))
    fewest = min(near, default=None)
    return None if fewest == max(rates, default=None) else fewest


@dataclass(frozen=True)
class PolicyStep:
    """One variant of a policy, and the share of the test samples that it answered."""

    variant: str
    sha256: str
    threshold: float | None  # None: the last step, which always answers
    share: Share


@dataclass(frozen=True)
class Ratio:
    """How many times one throughput is another one, with the 95 % interval over the rounds."""

    times: Positive
    interval: tuple[float, float] | None  # None: too few rounds for a useful one


@dataclass(frozen=True)
class PolicyEntry:
    """The measurements of one policy, made in turn with those of the variants.

    No variant is chosen by these figures. A policy may have been certified again since.
    Units:  risk, bound, agreement and gain are shares of samples.
    """

    policy: str
    steps: tuple[PolicyStep, ...]
    full: str  # the variant with which the policy is compared
    full_sha256: str
    against: Literal["full", "labels"]
    confidence: Probability  # of the certificate
    risk: Annotated[float, Range(0, 1, below=True)]
    bound: Annotated[float, Range(-1, 1)]
    runtime: str
    device: str
    ops: Ops
    score: MeasuredScore
    gain: float  # score minus the full model's on the same samples, with its paired interval
    gain_interval: tuple[float, float]
    agreement: Share  # share of the samples with the full model's answer, with its interval
    agreement_interval: tuple[float, float]
    calibrated: bool  # whether the policy was calibrated on these samples
    in_process: dict[str, Any]  # as of an `FrontierEntry`
    grpc: dict[str, Any] | None  # a point per router_concurrency_<n>
    times_full: Ratio  # throughput over the full model's, each in process at its best batch
    times_full_served: Ratio | None  # the same through the router, at the most clients
    min_ari: Share | None = None  # of segmentations: from this agreement on, answers are the same

    @property
    def place(self) -> tuple[str, str, Ops]:
        """Where it was measured; a newer measurement there replaces all policies."""
        return self.runtime, self.device, self.ops

    @property
    def hashes(self) -> set[str]:
        """The files that it depends on."""
        return {self.full_sha256, *(step.sha256 for step in self.steps)}


@dataclass(frozen=True)
class Frontier:
    """All measurements of the variants of one model, and of its policies."""

    model: str
    entries: tuple[FrontierEntry, ...]
    policies: tuple[PolicyEntry, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object, including schema and version.

        Without policies, the object has no such key.
        """
        content = {"schema": SCHEMA, "version": VERSION, **asdict(self)}
        policies = content.pop(POLICIES)
        if policies:
            content[POLICIES] = {"version": POLICIES_VERSION, "entries": policies}
        return content


def read_frontier(path: Path) -> Frontier:
    """Read a frontier file and check every key.

    Raises: SaccadeError for a missing or foreign file, an unknown version, an unknown, missing
        or wrong key, and the same measurement twice.
    """
    where = f"{path}: "
    return read_stored(
        path,
        Frontier,
        SCHEMA,
        VERSION,
        complete=lambda content: _complete(content, where),
        problems=lambda frontier: _problems(frontier, where),
        command="saccade bench FOLDER",
    )


def _complete(content: dict[str, Any], where: str) -> dict[str, Any]:
    if isinstance(entries := content.get("entries"), list):
        content["entries"] = [_completed(entry) for entry in entries]
    return {**content, POLICIES: _policies(content.get(POLICIES), f"{where}{POLICIES}: ")}


def _problems(frontier: Frontier, where: str) -> Iterator[str]:
    for index, entry in enumerate(frontier.entries):
        _check_measured(entry, f"{where}entries[{index}]: ")
    if len({entry.key for entry in frontier.entries}) < len(frontier.entries):
        yield "contains the same measurement twice"


def _policies(value: Any, where: str) -> list[Any]:
    """Return the policies in a file as JSON values; those of another version are left out.

    No variant is chosen by them, so a file of a later release remains usable.
    """
    if value is None:
        return []
    content = typed(dict[str, Any], value, where)
    if typed(int, content.get("version"), f"{where}version: ") != POLICIES_VERSION:
        return []
    entries = content.get("entries")
    for entry in typed(tuple[PolicyEntry, ...], entries, f"{where}entries"):
        _check_measured(entry, f"{where}{entry.policy:.60}: ")
    return list(entries or ())


def merged(
    old: Frontier,
    entries: Iterable[FrontierEntry],
    variants: Iterable[VariantFiles],
    policies: Iterable[PolicyEntry] | None = None,
) -> Frontier:
    """Combine old and new measurements of these variants; the new one of the same key wins.

    New policies replace all that were measured in the same place as the entries; None keeps them.
    """
    entries, variants = tuple(entries), tuple(variants)
    present = {variant.sha256 for variant in variants}
    kept = (entry for entry in old.entries if entry.sha256 in present)
    by_key = {entry.key: entry for entry in (*kept, *entries)}

    def order(entry: FrontierEntry) -> tuple[str, str, float, str, str]:
        return entry.device, entry.runtime, -entry.budget, entry.variant, entry.ops or ""

    policies = None if policies is None else tuple(policies)
    places = {(entry.runtime, entry.device, entry.ops) for entry in entries}
    places |= {policy.place for policy in policies or ()}
    still = (
        policy
        for policy in old.policies
        if policy.hashes <= present and (policies is None or policy.place not in places)
    )
    both = sorted((*still, *(policies or ())), key=lambda one: (one.device, one.runtime, one.risk))
    budgeted = with_cost_shares(by_key.values(), variants)
    return Frontier(old.model, tuple(sorted(budgeted, key=order)), tuple(both))


def with_cost_shares(
    entries: Iterable[FrontierEntry], variants: Sequence[VariantFiles]
) -> list[FrontierEntry]:
    """Return the entries with the budgets that follow from the measurements of each machine."""
    entries = tuple(entries)
    here: dict[tuple[str, str], dict[str, FrontierEntry]] = {}
    for entry in entries:
        here.setdefault((entry.runtime, entry.device), {})[entry.variant] = entry
    budgets = {place: cost_shares(variants, measured) for place, measured in here.items()}
    return [
        replace(entry, budget=budgets[entry.runtime, entry.device][entry.variant])
        for entry in entries
    ]


def cost_shares(
    variants: Sequence[VariantFiles], measured: Mapping[str, FrontierEntry]
) -> dict[str, float]:
    """Return the budget of each variant by name; `measured` is by name, too.

    It is that of the manifest. Once every variant of a group was measured, it is its time per
    sample as a share of the longest, with four digits: sizes of different models say little.
    """
    if any(not variant.in_group or variant.name not in measured for variant in variants):
        return {variant.name: float(variant.main.variant.budget) for variant in variants}
    seconds = {variant.name: measured[variant.name].seconds for variant in variants}
    return {name: float(f"{own / max(seconds.values()):.4g}") for name, own in seconds.items()}


@dataclass(frozen=True)
class CostFigure:
    """One cost of a variant; lower is better."""

    value: float
    rounds: tuple[float, ...] | None = None  # the value in each round; None: known exactly

    def over(self, other: "CostFigure") -> Interval:
        """Return the 95 % interval of how much more this costs; above 0 means surely more.

        For costs measured in rounds, it is the interval of the logarithm of their ratio.
        """
        if self.rounds is None or other.rounds is None:
            return self.value - other.value, self.value - other.value
        return paired_log_ratio(self.rounds, other.rounds)


def mark_dominated(
    entries: Iterable[FrontierEntry], values: Mapping[str, np.ndarray], *, seed: int = 0
) -> tuple[FrontierEntry, ...]:
    """Return the entries with `dominated_by` set.

    The cost is time per inference, or the bytes of an embedding if the budget saves no time.
    Shapes: values[variant] [n], one per test sample in the same order; their mean is the score.
    """
    entries = tuple(entries)
    (dominators_of,) = dominators(entries, values, (own_cost,), seed=seed)
    return tuple(replace(entry, dominated_by=dominators_of[entry.variant]) for entry in entries)


def dominators(
    entries: Sequence[FrontierEntry],
    values: Mapping[str, np.ndarray],
    costs: Sequence[Callable[[FrontierEntry], CostFigure]],
    *,
    seed: int = 0,
) -> list[dict[str, str | None]]:
    """Return, for each kind of cost, the dominating variant by variant name.

    B dominates A on the same runtime and device in two cases. Either B surely costs no more, and
    the paired bootstrap's 95 % interval of how much better B scores is above 0. Or both have the
    same value on every sample, and B surely costs less. For a measured cost, "surely" refers to
    the paired 95 % interval over the rounds. A difference in score or cost that could be chance
    never makes a variant dominated. Of several dominating variants the one with the best score is
    returned, and of equal scores the cheaper one.
    Shapes: values[variant] [n], one per test sample in the same order; their mean is the score.
    """
    surely: dict[tuple[str, str], bool] = {}

    def is_better(b: FrontierEntry, a: FrontierEntry) -> bool:
        if (b.variant, a.variant) not in surely:
            better, worse = values[b.variant], values[a.variant]
            if not b.score.higher_is_better:
                better, worse = worse, better
            # The bootstrap is slow: skip it if the means already decide.
            surely[b.variant, a.variant] = bool(
                better.mean() > worse.mean() and paired_bootstrap(better, worse, seed)[0] > 0
            )
        return surely[b.variant, a.variant]

    def dominates(b: FrontierEntry, a: FrontierEntry, saving: Interval) -> bool:
        if (b.runtime, b.device) != (a.runtime, a.device) or b is a or saving[0] < 0:
            return False
        if np.array_equal(values[b.variant], values[a.variant]):
            return saving[0] > 0
        return is_better(b, a)

    def strongest(a: FrontierEntry, cost: Callable[[FrontierEntry], CostFigure]) -> str | None:
        above = [b for b in entries if dominates(b, a, cost(a).over(cost(b)))]
        if not above:
            return None
        return max(above, key=lambda b: (_goodness(b), -cost(b).value)).variant

    return [{a.variant: strongest(a, cost) for a in entries} for cost in costs]


def own_cost(entry: FrontierEntry) -> CostFigure:
    """Return the bytes of an embedding if the budget saves these, else seconds per inference."""
    if entry.embedding_bytes is not None:
        return CostFigure(entry.embedding_bytes)
    return CostFigure(1 / entry.speed, tuple(1 / rate for rate in entry.speed_rounds))


def _goodness(entry: FrontierEntry) -> float:
    return entry.score.value if entry.score.higher_is_better else -entry.score.value


def entry_of(value: Any) -> FrontierEntry:
    """Read one entry from its JSON object and check every key.

    Raises: SaccadeError that names the key.
    """
    entry: FrontierEntry = typed(FrontierEntry, _completed(value), "entry: ")
    _check_measured(entry, "entry: ")
    return entry


def _completed(value: Any) -> Any:
    """Add the keys that older files lack, and the memory, which a benchmark does not write."""
    older = {"embedding_bytes": None, "memory_bytes": None, "ops": None}
    return {**older, **value} if isinstance(value, dict) else value


def _check_measured(entry: FrontierEntry | PolicyEntry, where: str) -> None:
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
        if key == BY_THREADS:
            rates = typed(dict[str, float], point, f"{where}{key}: ")
            if not all(_COUNT.fullmatch(count) and rate > 0 for count, rate in rates.items()):
                raise SaccadeError(f"{where}{key}: is {rates!s:.60}. {AGAIN}")
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


def point_size(key: str) -> int:
    """Return the number in the name of a point: its batch, or its clients."""
    return int(key.rpartition("_")[2])
