# SPDX-License-Identifier: Apache-2.0
"""`saccade plan`: replicas, cores and budgets for a load, from the figures of a benchmark.

A replica is modeled as one queue. Its capacity is the best rate that was measured through its
router. A request's time is its time on an idle replica plus the wait in the queue. The wait is that
of a single server with exponential service times (M/M/1; for several budgets: M/G/1 by Pollaczek
and Khinchine, with an exponential tail). Real service times vary less, so the estimate is meant to
be an upper one.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from saccade.core.errors import GateFailed, SaccadeError
from saccade.core.options import Options
from saccade.core.schema import BelowOne, Positive, Probability, Range
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FILE_NAME as FRONTIER
from saccade.exporter.artefact.frontier import FrontierEntry
from saccade.serving.bench.figures import clients_of, points, score_text
from saccade.serving.bench.report_tables import table_of
from saccade.serving.bench.sweep.choice import measured_folder, measured_on
from saccade.serving.repository.checks import measurements

_ALONE = "router_concurrency_1"
_SHARES = 100  # the shares of a mix are whole percentages of the requests
_CORES = re.compile(r", (\d+) cores?$")


@dataclass(frozen=True)
class PlanOptions(Options):
    """Options of a plan: the load, and the required time and score of its answers."""

    rps: Positive  # requests per second, with one image each
    slo_ms: Positive  # longest time of an answer at the percentile, in milliseconds
    # share of the full budget's score that may be lost: 0.01 of a score of 0.93 is 0.0093
    max_risk: BelowOne = 0.0
    percentile: Literal[95, 99] = 95  # percentile of the answers' times
    # highest utilization of a replica, however long the SLO is; at 1, requests would wait forever
    max_utilization: Probability = 0.8
    # replicas to add to those that the load needs
    spare: Annotated[int, Range(0, 1000)] = 0
    device: str | None = None  # device whose figures to use, if the frontier has several


@dataclass(frozen=True)
class PlanCandidate:
    """The figures of one variant that a plan uses.

    Units: capacity is requests per second of one replica; idle_ms is the percentile of a request's
        time with one request at a time; cpu_s is core seconds of the server per request, if
        measured.
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
    """Variants, and the share of the requests that each one answers."""

    parts: tuple[tuple[PlanCandidate, float], ...]

    @property
    def service_s(self) -> float:
        """Mean time for which a request occupies a replica. Units: seconds."""
        return sum(share / part.capacity for part, share in self.parts)

    @property
    def lost(self) -> float:
        """Share of the full score that is lost; a variant that scores more offsets nothing."""
        return sum(share * part.lost for part, share in self.parts)

    @property
    def idle_ms(self) -> float:
        """Percentile of a request's time on an idle replica, for the slowest variant."""
        return max(part.idle_ms for part, _ in self.parts)

    @property
    def cpu_s(self) -> float | None:
        """Core seconds of the server per request; None if not measured."""
        used = [(part.cpu_s, share) for part, share in self.parts]
        return None if any(s is None for s, _ in used) else sum((s or 0) * p for s, p in used)

    def wait_ms(self, utilisation: float, percentile: int) -> float:
        """Return a percentile of the wait before service.

        Source: Pollaczek and Khinchine's mean; P(wait > t) = u exp(-t u / mean), exact for M/M/1.
        """
        beyond = 1 - percentile / 100
        if utilisation <= beyond:
            return 0.0
        moment = sum(share / part.capacity**2 for part, share in self.parts)
        mean_if_any = moment / (self.service_s * (1 - utilisation))
        return 1e3 * mean_if_any * math.log(utilisation / beyond)

    def time_ms(self, utilisation: float, percentile: int) -> float:
        """Return an estimate of a percentile of a request's time; it can be too low."""
        return self.idle_ms + self.wait_ms(utilisation, percentile)

    def utilisation_within(self, slo_ms: float, percentile: int) -> float:
        """Return the highest utilization whose time is within the SLO; 0 if there is none."""
        if self.idle_ms > slo_ms:
            return 0.0
        low, high = 0.0, 1.0
        for _ in range(40):  # bisection: the time only grows with utilization
            middle = (low + high) / 2
            within = middle < 1 and self.time_ms(middle, percentile) <= slo_ms
            low, high = (middle, high) if within else (low, middle)
        return low


@dataclass(frozen=True)
class CapacityPlan:
    """What a load needs, and how that was computed.

    Units: cores is the number of cores of the measured machine times the replicas; gpus is one per
        replica if the variants run on GPUs.
    """

    options: PlanOptions
    mix: Mix
    entries: tuple[FrontierEntry, ...]
    candidates: tuple[PlanCandidate, ...]
    left_out: tuple[str, ...]

    @property
    def load(self) -> float:
        """Number of replicas that would carry the load at full utilization."""
        return self.options.rps * self.mix.service_s

    @cached_property
    def within_slo(self) -> float:
        """Highest utilization whose answers are within the SLO."""
        return self.mix.utilisation_within(self.options.slo_ms, self.options.percentile)

    @property
    def allowed(self) -> float:
        """Highest utilization of a replica; 0 if none is within the SLO."""
        return min(self.within_slo, self.options.max_utilization)

    @property
    def needed(self) -> int:
        """Number of replicas that the load needs."""
        return max(1, math.ceil(self.load / self.allowed - 1e-9))

    @property
    def replicas(self) -> int:
        """Number of replicas, including the spare ones."""
        return self.needed + self.options.spare

    @property
    def utilisation(self) -> float:
        """Utilization of each replica."""
        return self.load / self.replicas

    @property
    def time_ms(self) -> float:
        """Percentile of a request's time at that utilization."""
        return self.mix.time_ms(self.utilisation, self.options.percentile)

    @property
    def cores(self) -> int | None:
        """Cores of all replicas, if the device's name has its number of cores."""
        found = _CORES.search(self.entries[0].device)
        return self.replicas * int(found[1]) if found else None

    @property
    def gpus(self) -> int | None:
        """GPUs of all replicas, if the variants run on GPUs."""
        return None if self.entries[0].runtime.endswith("CPU") else self.replicas

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        cpu_s = self.mix.cpu_s
        return {
            "load": asdict(self.options),
            "replicas": self.replicas,
            "cores": self.cores,
            "gpus": self.gpus,
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
            "measured_on": measured_on(self.entries),
            "variants": [asdict(candidate) for candidate in self.candidates],
            "left_out": list(self.left_out),
        }

    def to_text(self) -> Any:
        """Return the answer, the calculation, and every variant's figures."""
        from rich.console import Group
        from rich.text import Text

        size = []
        if self.cores is not None:
            size.append(f"{_many(self.cores, 'core')}, {self.cores // self.replicas} each")
        if self.gpus is not None:
            size.append(f"{_many(self.gpus, 'GPU')}, one each")
        lines = [f"{_many(self.replicas, 'replica')}{': ' if size else ''}{', '.join(size)}."]
        for part, share in self.mix.parts:
            lines.append(f"{100 * share:.0f} % of the requests with --budget {part.budget:g}.")
        steps = (f"- {line}" for line in _arithmetic(self))
        lines += ["", *steps, "", f"Measured on {measured_on(self.entries)}."]
        if self.left_out:
            lines.append(f"Left out (no figures under load): {', '.join(self.left_out)}.")
        shares = {part.variant: f"{100 * share:.0f} %" for part, share in self.mix.parts}
        rows = [
            {
                "variant": one.variant,
                "budget": f"{one.budget:g}",
                "score": one.score,
                "lost": f"{100 * one.lost:.2f} %",
                "per second per replica": f"{one.capacity:,.1f}",
                "idle": f"{one.idle_ms:.2f} ms",
                "": shares.get(one.variant, ""),
            }
            for one in self.candidates
        ]
        return Group(Text("\n".join(lines)), "", table_of("", rows).to_text())


def plan(folder: ArtefactFolder | Path | str, options: PlanOptions) -> CapacityPlan:
    """Return the fewest replicas that carry the load, and the best-scoring mix that needs so few.

    Raises: SaccadeError for a folder that was not measured through a router under load, GateFailed
        if no measured variant answers within the SLO.
    """
    folder = measured_folder(ArtefactFolder.open(folder))
    folder.check()
    entries = list(measurements(folder, options.device).values())
    if not entries:
        raise SaccadeError(
            f"{folder}: has no {FRONTIER}, expected measurements from the kind of machine that you "
            f"plan for. Run there: saccade bench {folder} --out REPORT (with --data if saccade did "
            "not train the model)"
        )
    candidates, left_out = _candidates(folder, entries, options.percentile)
    plans = [
        CapacityPlan(options, mix, tuple(entries), tuple(candidates), tuple(left_out))
        for mix in _mixes(candidates, options.max_risk)
    ]
    within_slo = [one for one in plans if one.allowed > 0]
    if not within_slo:
        raise GateFailed(_why_none(candidates, options))
    # Fewest replicas, then smallest loss, then a single variant over a mix, then least busy.
    return min(within_slo, key=lambda one: (one.needed, one.mix.lost, len(one.mix.parts), one.load))


def _candidates(
    folder: ArtefactFolder, entries: Sequence[FrontierEntry], percentile: int
) -> tuple[list[PlanCandidate], list[str]]:
    """Return the variants measured through the router under load, and the names of the others."""
    full = max(entries, key=lambda entry: (entry.budget, _goodness(entry)))
    if full.score.value <= 0:
        raise SaccadeError(
            f"{folder}: {full.variant} has a {full.score.name} of {full.score.value:g}, expected a "
            "score above 0, so that a share of it can be lost. Choose another score with: saccade "
            "bench --task"
        )
    figures = {entry.variant: _candidate(entry, full, percentile) for entry in entries}
    candidates = [one for one in figures.values() if one is not None]
    if not candidates:
        raise SaccadeError(
            f"{folder}: was measured without a server, or through its router with only one client "
            "at a time, expected figures with several clients. Measure them with: "
            f"saccade bench {folder} --out REPORT"
        )
    return candidates, [name for name, one in figures.items() if one is None]


def _candidate(entry: FrontierEntry, full: FrontierEntry, percentile: int) -> PlanCandidate | None:
    grpc = entry.grpc or {}
    under_load = [name for name in points(grpc, "router_concurrency_") if name != _ALONE]
    if _ALONE not in grpc or not under_load:
        return None
    best = max(under_load, key=lambda name: grpc[name]["inferences_per_second"])
    point, rate = grpc[best], float(grpc[best]["inferences_per_second"])
    cpu_ms, share = point.get("core_ms_per_request"), point.get("client_cpu_share")
    lost = (_goodness(full) - _goodness(entry)) / full.score.value
    return PlanCandidate(
        variant=entry.variant,
        budget=entry.budget,
        score=score_text(asdict(entry.score)),
        lost=max(0.0, lost),
        capacity=rate,
        clients=clients_of(best),
        rounds=(
            float(point.get("inferences_per_second_min", rate)),
            float(point.get("inferences_per_second_max", rate)),
        ),
        idle_ms=float(grpc[_ALONE][f"p{percentile}_ms"]),
        cpu_s=None if cpu_ms is None or share is None else cpu_ms * (1 - share) / 1e3,
    )


def _goodness(entry: FrontierEntry) -> float:
    return entry.score.value if entry.score.higher_is_better else -entry.score.value


def _mixes(candidates: Sequence[PlanCandidate], max_risk: float) -> Iterator[Mix]:
    """Yield each variant alone and each mix of two variants that lose no more than `max_risk`.

    A mix of more than two is never needed: there is one condition on shares that add up to one.
    """
    alone = [Mix(((one, 1.0),)) for one in candidates]
    pairs = (
        Mix(((one, (_SHARES - step) / _SHARES), (other, step / _SHARES)))
        for one, other in combinations(candidates, 2)
        for step in range(1, _SHARES)
    )
    yield from (mix for mix in (*alone, *pairs) if mix.lost <= max_risk + 1e-12)


def _why_none(candidates: Sequence[PlanCandidate], options: PlanOptions) -> str:
    allowed = [each for each in candidates if each.lost <= options.max_risk]
    if not allowed:
        least = min(candidates, key=lambda each: each.lost)
        return (
            f"--max-risk is {options.max_risk:g}, but no variant with figures under load loses so "
            f"little of the score. The best one, {least.variant}, loses {least.lost:.4f}. Pass a "
            "larger --max-risk, or measure the full budget under load too."
        )
    fastest = min(allowed, key=lambda each: each.idle_ms)
    return (
        f"--slo-ms is {options.slo_ms:g}, but no variant that loses at most "
        f"{options.max_risk:g} of the score has a p{options.percentile} within it. The fastest of "
        f"{len(allowed)}, {fastest.variant}, takes {fastest.idle_ms:.2f} ms on an idle replica, so "
        "more replicas do not help. Pass a larger --slo-ms or --max-risk, or measure a smaller "
        "budget too."
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _arithmetic(made: CapacityPlan) -> list[str]:
    """Return each step of the calculation with its numbers."""
    options, mix = made.options, made.mix
    lines = [
        f"{part.variant}: a replica answers at most {part.capacity:,.1f} requests/s (router, "
        f"{part.clients} clients; rounds {part.rounds[0]:,.1f} to {part.rounds[1]:,.1f})"
        for part, _ in mix.parts
    ]
    shares = " + ".join(f"{share:.2f} / {part.capacity:,.1f}" for part, share in mix.parts)
    lines.append(
        f"load: {options.rps:,g} x ({shares}) = {made.load:.3f} replicas at full utilization"
    )
    lines.append(
        f"p{options.percentile} within {options.slo_ms:g} ms: {mix.idle_ms:.2f} ms on an idle "
        f"replica plus the wait, up to a utilization of {made.within_slo:.3f} (queue with "
        "exponential service times; add a margin)"
    )
    lines.append(
        f"replicas: {made.load:.3f} / {made.allowed:.3f} (the smaller of this utilization and "
        f"--max-utilization {options.max_utilization:g}) = {made.load / made.allowed:.3f}, so "
        f"{made.needed}" + (f", plus {options.spare} spare" if options.spare else "")
    )
    lines.append(
        f"with {made.replicas}: utilization {made.utilisation:.3f}, p{options.percentile} "
        f"{made.time_ms:.2f} ms by the same estimate"
    )
    lines.append(
        f"score: {100 * mix.lost:.3f} % of the full score is lost, {100 * options.max_risk:g} % "
        f"is allowed, by the scores of {made.entries[0].score.n} samples"
    )
    if mix.cpu_s is not None:
        lines.append(
            f"CPU: {options.rps:,g} x {1e3 * mix.cpu_s:.3f} ms of the server per request = "
            f"{options.rps * mix.cpu_s:.2f} busy cores"
        )
    return lines
