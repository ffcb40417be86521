# SPDX-License-Identifier: Apache-2.0
"""`saccade plan`: replicas, cores and budgets for a load, from what a benchmark measured.

A replica is taken for one queue. What it answers at most is the best rate that was measured through
its router; a request's time is that on an idle replica and the wait before it. The wait is that of
a single server with exponential service times (M/M/1; several budgets: M/G/1 by Pollaczek and
Khinchine, with an exponential tail). Real ones vary less, so that it is meant to lie above.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from saccade.errors import GateFailed, SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FILE_NAME as FRONTIER
from saccade.exporter.artefact.frontier import Entry
from saccade.path_fields import PathFields
from saccade.serving.bench.figures import score_text
from saccade.serving.bench.sweep.choice import measured_folder
from saccade.serving.repository.checks import measurements

_UNDER_LOAD = "router_concurrency_"
_ALONE = "router_concurrency_1"
_SHARES = 100  # a mix is told in whole per cent of the requests
_CORES = re.compile(r", (\d+) cores?$")
_COLUMNS = ("variant", "budget", "score", "lost", "a replica, per second", "idle", "")


@dataclass(frozen=True)
class PlanOptions(PathFields):
    """Options of a plan: the load, and what its answers have to be.

    Raises: SaccadeError for a number out of range.
    """

    rps: float  # requests per second, of one image each
    slo_ms: float  # milliseconds within which the percentile of the answers has to come
    # share of the full budget's score that may be lost: 0.01 of a score of 0.93 is 0.0093
    max_risk: float = 0.0
    percentile: Literal[95, 99] = 95  # of the answers' times
    max_utilisation: float = 0.8  # of a replica, however long the SLO is
    spare: int = 0  # replicas beyond those that the load needs
    device: str | None = None  # whose figures count, if the frontier has those of several

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rps", "slo_ms"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise SaccadeError(f"{_flag(name)} is {value}, expected a number above 0.")
        if not 0 <= self.max_risk < 1:
            raise SaccadeError(f"--max-risk is {self.max_risk}, expected a share: 0 to below 1.")
        if not 0 < self.max_utilisation < 1:
            raise SaccadeError(
                f"--max-utilisation is {self.max_utilisation}, expected a share between 0 and 1: "
                "at 1 requests wait without end."
            )
        if not 0 <= self.spare <= 1000:
            raise SaccadeError(f"--spare is {self.spare}, expected 0 to 1000.")


@dataclass(frozen=True)
class Candidate:
    """One variant as a plan sees it.

    Units: capacity is requests per second of one replica; idle_ms is the percentile of the time of
    one request at a time; cpu_s is core seconds of the server a request, where that was measured.
    """

    variant: str
    budget: float
    score: str
    lost: float
    capacity: float
    clients: int
    rounds: tuple[float, float]
    idle_ms: float
    cpu_s: float | None


@dataclass(frozen=True)
class Mix:
    """Variants, and the shares of the requests that they answer."""

    parts: tuple[tuple[Candidate, float], ...]

    @property
    def service_s(self) -> float:
        """Mean time that a request occupies a replica."""
        return sum(share / part.capacity for part, share in self.parts)

    @property
    def lost(self) -> float:
        """Share of the full score that is lost; what scores more makes up for nothing."""
        return sum(share * part.lost for part, share in self.parts)

    @property
    def idle_ms(self) -> float:
        """Percentile of a request's time without others, of the slowest variant."""
        return max(part.idle_ms for part, _ in self.parts)

    @property
    def cpu_s(self) -> float | None:
        """Core seconds of the server a request."""
        used = [(part.cpu_s, share) for part, share in self.parts]
        return None if any(s is None for s, _ in used) else sum((s or 0) * p for s, p in used)

    def wait_ms(self, utilisation: float, percentile: int) -> float:
        """Percentile of the wait before service.

        Source: Pollaczek and Khinchine's mean; P(wait > t) = u exp(-t u / mean), exact for M/M/1.
        """
        beyond = 1 - percentile / 100
        if utilisation <= beyond:
            return 0.0
        moment = sum(share / part.capacity**2 for part, share in self.parts)
        mean_if_any = moment / (self.service_s * (1 - utilisation))
        return 1e3 * mean_if_any * math.log(utilisation / beyond)

    def time_ms(self, utilisation: float, percentile: int) -> float:
        """Percentile of a request's time, an estimate meant to lie above."""
        return self.idle_ms + self.wait_ms(utilisation, percentile)

    def utilisation_within(self, slo_ms: float, percentile: int) -> float:
        """The highest utilisation whose time is within the SLO; 0 where none is."""
        if self.idle_ms > slo_ms:
            return 0.0
        low, high = 0.0, 1.0
        for _ in range(40):  # the time only grows with it
            middle = (low + high) / 2
            within = middle < 1 and self.time_ms(middle, percentile) <= slo_ms
            low, high = (middle, high) if within else (low, middle)
        return low


@dataclass(frozen=True)
class Plan:
    """What a load needs, and how that was worked out.

    Units: cores is those of the machine that a replica was measured on, times the replicas; gpus is
    one a replica, where the variants run on them.
    """

    options: PlanOptions
    mix: Mix
    needed: int
    allowed: float
    within_slo: float
    cores_each: int | None
    on_gpu: bool
    measured_on: str
    samples: int
    candidates: tuple[Candidate, ...]
    left_out: tuple[str, ...]

    @property
    def replicas(self) -> int:
        """Replicas, the spare ones among them."""
        return self.needed + self.options.spare

    @property
    def utilisation(self) -> float:
        """Utilisation of each replica."""
        return self.options.rps * self.mix.service_s / self.replicas

    @property
    def time_ms(self) -> float:
        """Percentile of a request's time at that utilisation."""
        return self.mix.time_ms(self.utilisation, self.options.percentile)

    @property
    def cores(self) -> int | None:
        """Cores of all replicas, if the device says how many it has."""
        return None if self.cores_each is None else self.replicas * self.cores_each

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        cpu_s = self.mix.cpu_s
        return {
            "load": asdict(self.options),
            "replicas": self.replicas,
            "cores": self.cores,
            "gpus": self.replicas if self.on_gpu else None,
            "busy_cores": None if cpu_s is None else self.options.rps * cpu_s,
            "mix": [
                {"variant": part.variant, "budget": part.budget, "share": share}
                for part, share in self.mix.parts
            ],
            "lost": self.mix.lost,
            "utilisation": self.utilisation,
            "utilisation_allowed": self.allowed,
            "utilisation_within_slo": self.within_slo,
            "time_ms": self.time_ms,
            "capacity": self.replicas / self.mix.service_s,
            "arithmetic": _arithmetic(self),
            "measured_on": self.measured_on,
            "variants": [asdict(candidate) for candidate in self.candidates],
            "left_out": list(self.left_out),
        }

    def to_text(self) -> Any:
        """For a reader."""
        return _rendered(self)


def plan(folder: ArtefactFolder | Path | str, options: PlanOptions) -> Plan:
    """The fewest replicas that carry the load, and of the mixes that need so few the best-scoring.

    Raises: SaccadeError for a folder that was not measured through a router under load, GateFailed
        if nothing that was measured answers within the SLO.
    """
    folder = measured_folder(ArtefactFolder.open(folder))
    entries = list(measurements(folder, options.device).values())
    if not entries:
        raise SaccadeError(
            f"{folder}: has no {FRONTIER}, expected what a benchmark measured on the machine that "
            f"is planned with. Measure it there: saccade bench {folder} --out REPORT"
        )
    candidates, left_out = _candidates(folder, entries, options.percentile)
    mix, needed = _best(candidates, options)
    first = entries[0]
    within_slo = mix.utilisation_within(options.slo_ms, options.percentile)
    found = _CORES.search(first.device)
    ops = sorted({entry.ops for entry in entries if entry.ops})
    by = f", custom ops by {' and '.join(ops)}" if ops else ""
    return Plan(
        options=options,
        mix=mix,
        needed=needed,
        allowed=min(within_slo, options.max_utilisation),
        within_slo=within_slo,
        cores_each=int(found[1]) if found else None,
        on_gpu=not first.runtime.endswith("CPU"),
        measured_on=f"{first.device}, {first.runtime}{by}",
        samples=first.score.n,
        candidates=tuple(candidates),
        left_out=tuple(left_out),
    )


def _candidates(
    folder: ArtefactFolder, entries: Sequence[Entry], percentile: int
) -> tuple[list[Candidate], list[str]]:
    """Variants that were measured through the router under load, and the names of the others."""
    full = max(entries, key=lambda entry: (entry.budget, _goodness(entry)))
    if full.score.value <= 0:
        raise SaccadeError(
            f"{folder}: {full.variant} has a {full.score.name} of {full.score.value:g}, expected "
            "one above 0, of which a share could be lost. Score it otherwise: saccade bench --task"
        )
    candidates, left_out = [], []
    for entry in entries:
        if (candidate := _candidate(entry, full, percentile)) is None:
            left_out.append(entry.variant)
        else:
            candidates.append(candidate)
    if not candidates:
        raise SaccadeError(
            f"{folder}: its figures are of no server, or of its router with one client at a time "
            "only, expected those with several clients. Measure them with: "
            f"saccade bench {folder} --out REPORT"
        )
    return candidates, left_out


def _candidate(entry: Entry, full: Entry, percentile: int) -> Candidate | None:
    points = entry.grpc or {}
    counts = [
        int(name.removeprefix(_UNDER_LOAD)) for name in points if name.startswith(_UNDER_LOAD)
    ]
    if _ALONE not in points or max(counts) == 1:
        return None
    clients = max(
        (count for count in counts if count > 1),
        key=lambda count: points[f"{_UNDER_LOAD}{count}"]["inferences_per_second"],
    )
    point = points[f"{_UNDER_LOAD}{clients}"]
    rate = float(point["inferences_per_second"])
    cpu_ms, share = point.get("core_ms_per_request"), point.get("client_cpu_share")
    lost = (_goodness(full) - _goodness(entry)) / full.score.value
    return Candidate(
        variant=entry.variant,
        budget=entry.budget,
        score=score_text(asdict(entry.score)),
        lost=max(0.0, lost),
        capacity=rate,
        clients=clients,
        rounds=(
            float(point.get("inferences_per_second_min", rate)),
            float(point.get("inferences_per_second_max", rate)),
        ),
        idle_ms=float(points[_ALONE][f"p{percentile}_ms"]),
        cpu_s=None if cpu_ms is None or share is None else cpu_ms * (1 - share) / 1e3,
    )


def _goodness(entry: Entry) -> float:
    return entry.score.value if entry.score.higher_is_better else -entry.score.value


def _best(candidates: Sequence[Candidate], options: PlanOptions) -> tuple[Mix, int]:
    found = []
    for mix in _mixes(candidates, options.max_risk):
        allowed = min(
            mix.utilisation_within(options.slo_ms, options.percentile), options.max_utilisation
        )
        if allowed > 0:
            load = options.rps * mix.service_s
            found.append((max(1, math.ceil(load / allowed - 1e-9)), mix.lost, load, mix))
    if not found:
        raise GateFailed(_why_none(candidates, options))
    # Fewest replicas, then least lost, then no mix where one variant does, then least busy.
    best = min(found, key=lambda each: (each[0], each[1], len(each[3].parts), each[2]))
    return best[3], best[0]


def _mixes(candidates: Sequence[Candidate], max_risk: float) -> Iterator[Mix]:
    """Each variant alone and each two of them, as far as they lose no more.

    More than two are never needed: one condition on shares that add up to one.
    """
    alone = [Mix(((one, 1.0),)) for one in candidates]
    pairs = (
        Mix(((one, (_SHARES - step) / _SHARES), (other, step / _SHARES)))
        for one, other in combinations(candidates, 2)
        for step in range(1, _SHARES)
    )
    yield from (mix for mix in (*alone, *pairs) if mix.lost <= max_risk + 1e-12)


def _why_none(candidates: Sequence[Candidate], options: PlanOptions) -> str:
    said = f"loses at most {options.max_risk:g} of the score"
    allowed = [each for each in candidates if each.lost <= options.max_risk]
    if not allowed:
        least = min(candidates, key=lambda each: each.lost)
        return (
            f"--max-risk {options.max_risk:g}: found no variant that {said} and has figures under "
            f"load: the best that has, {least.variant}, loses {least.lost:.4f}. Expected one: "
            "allow as much, or measure the full budget too."
        )
    fastest = min(allowed, key=lambda each: each.idle_ms)
    return (
        f"--slo-ms {options.slo_ms:g}: found no variant that {said} with a p{options.percentile} "
        f"of at most that: the fastest of {len(allowed)}, {fastest.variant}, takes "
        f"{fastest.idle_ms:.2f} ms on an idle replica, however many there are. Expected one "
        "within it: allow more time, a larger --max-risk, or measure a smaller budget too."
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _arithmetic(made: Plan) -> list[str]:
    """Each step with its numbers."""
    options, mix = made.options, made.mix
    lines = [
        f"{part.variant}: a replica answers {part.capacity:,.1f} requests/s at most (router, "
        f"{part.clients} clients; rounds {part.rounds[0]:,.1f} to {part.rounds[1]:,.1f})"
        for part, _ in mix.parts
    ]
    shares = " + ".join(f"{share:.2f} / {part.capacity:,.1f}" for part, share in mix.parts)
    load = options.rps * mix.service_s
    lines.append(f"load: {options.rps:,g} x ({shares}) = {load:.3f} replicas at full use")
    lines.append(
        f"p{options.percentile} within {options.slo_ms:g} ms: {mix.idle_ms:.2f} ms idle, and the "
        f"wait before it up to a utilisation of {made.within_slo:.3f} (queue with exponential "
        "service, an upper estimate)"
    )
    lines.append(
        f"replicas: {load:.3f} / {made.allowed:.3f} (the smaller of that and --max-utilisation "
        f"{options.max_utilisation:g}) = {load / made.allowed:.3f}, so {made.needed}"
        + (f", and {options.spare} spare" if options.spare else "")
    )
    lines.append(
        f"at {made.replicas}: utilisation {made.utilisation:.3f}, p{options.percentile} "
        f"{made.time_ms:.2f} ms by the same estimate"
    )
    lines.append(
        f"score: {100 * mix.lost:.3f} % of the full one is lost, of {100 * options.max_risk:g} % "
        f"allowed, by the scores of {made.samples} samples"
    )
    if mix.cpu_s is not None:
        lines.append(
            f"CPU: {options.rps:,g} x {1e3 * mix.cpu_s:.3f} ms of the server a request = "
            f"{options.rps * mix.cpu_s:.2f} cores busy"
        )
    return lines


def _rendered(made: Plan) -> Any:
    """Answer, arithmetic and every variant's figures."""
    import rich.box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    replicas = f"{made.replicas} replica{'s' if made.replicas != 1 else ''}"
    size = []
    if made.cores is not None:
        size.append(f"{made.cores} cores, {made.cores_each} each")
    if made.on_gpu:
        size.append(f"{made.replicas} GPUs, one each")
    lines = [f"{replicas}{': ' if size else ''}{', '.join(size)}."]
    for part, share in made.mix.parts:
        lines.append(f"{100 * share:.0f} % of the requests with --budget {part.budget:g}.")
    lines += [
        "",
        *(f"- {line}" for line in _arithmetic(made)),
        "",
        f"Measured on {made.measured_on}.",
    ]
    if made.left_out:
        lines.append(f"Without figures under load: {', '.join(made.left_out)}.")
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="")
    for index, name in enumerate(_COLUMNS):
        words = index in (0, len(_COLUMNS) - 1)
        table.add_column(name, justify="left" if words else "right", no_wrap=index == 0)
    shares = {part.variant: share for part, share in made.mix.parts}
    for each in made.candidates:
        used = shares.get(each.variant)
        table.add_row(
            each.variant,
            f"{each.budget:g}",
            each.score,
            f"{100 * each.lost:.2f} %",
            f"{each.capacity:,.1f}",
            f"{each.idle_ms:.2f} ms",
            "" if used is None else f"{100 * used:.0f} %",
        )
    return Group(Text("\n".join(lines)), "", table)
