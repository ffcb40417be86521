# SPDX-License-Identifier: Apache-2.0
"""A plan's arithmetic by hand and against simulated queues, and what it refuses."""

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.serving.frontiers import frontier_entry, point

from saccade.core.errors import GateFailed, SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.serving.bench.plan import CapacityPlan, Mix, PlanCandidate, PlanOptions, plan
from saccade.serving.commands.cli import run

# score, requests per second through the router with 16 clients, p95 ms with one
FIGURES = {
    "nac-b1000-fp32": (0.90, 100.0, 12.0),
    "nac-b0500-fp32": (0.89, 200.0, 6.0),
    "nac-b0250-fp32": (0.84, 400.0, 3.0),
    "nac-b0125-fp32": (0.92, 50.0, 30.0),  # small, good and slow: nothing of this sort is assumed
}
FULL, HALF, QUARTER, SLOW = FIGURES


def measured(place: Path, **changes: Any) -> Path:
    """The folder with a frontier of these figures; `changes` are fields of each entry."""
    folder = ArtefactFolder(place)
    entries = []
    for variant in folder.variants:
        score, rate, p95 = FIGURES[variant.name]
        cpu = {"core_ms_per_request": 5.0, "client_cpu_share": 0.2}
        grpc = {
            # Raw tensors past the router: nobody's load, however fast.
            "concurrency_16": point(100 * rate, p95),
            "router_concurrency_1": point(rate / 2, p95),
            "router_concurrency_4": point(0.9 * rate, 5 * p95),
            "router_concurrency_16": point(rate, 20 * p95, **cpu),
        }
        known = {"budget": variant.main.variant.budget, "grpc": grpc, "memory_bytes": 1, **changes}
        entries.append(
            frontier_entry(variant.name, variant.sha256, score, inside=point(rate, p95), **known)
        )
    folder.merge(entries)
    return place


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measured(Path(shutil.copytree(tiny_folder, tmp_path_factory.mktemp("plan") / "nac")))


def planned(folder: Path, **options: Any) -> CapacityPlan:
    return plan(folder, PlanOptions(**{"rps": 1000.0, "slo_ms": 1000.0, **options}))


def mix_of(made: CapacityPlan) -> dict[str, float]:
    return {part.variant: share for part, share in made.mix.parts}


def test_one_variant_by_hand(folder: Path) -> None:
    # 1000 / (100 x 0.8) = 12.5 of the full one; nothing may be lost, and the slow one is slower.
    made = planned(folder)
    assert (made.replicas, mix_of(made)) == (13, {FULL: 1.0})
    assert made.cores == 26 and made.to_dict()["gpus"] is None
    assert made.utilisation == pytest.approx(1000 / 1300)
    # ln(u / 0.05) / (C - rate), by M/M/1.
    wait_ms = 1e3 * math.log(made.utilisation / 0.05) / (100 - 1000 / 13)
    assert made.time_ms == pytest.approx(12.0 + wait_ms)
    assert made.to_dict()["busy_cores"] == pytest.approx(1000 * 0.005 * 0.8)
    assert planned(folder, spare=2).replicas == 15
    assert planned(folder, rps=1e-3).replicas == 1


def test_the_latency_bounds_the_utilisation(folder: Path) -> None:
    made = planned(folder, slo_ms=30.0)
    # 12 + 1e3 ln(u / 0.05) / (100 (1 - u)) = 30
    u = made.allowed
    assert 12 + 10 * math.log(u / 0.05) / (1 - u) == pytest.approx(30.0)
    assert made.replicas == math.ceil(1000 / (100 * u)) > 13
    assert made.time_ms <= 30.0
    later = planned(folder, slo_ms=30.0, percentile=99)
    assert later.replicas > made.replicas and later.mix.idle_ms == 24.0
    assert later.time_ms <= 30.0 + 1e-6


def test_what_may_be_lost_is_spent_on_the_fewest_replicas(folder: Path) -> None:
    # Half loses 0.01 / 0.9, a quarter 0.06 / 0.9. Of half alone 7 replicas carry 1120.
    alone = planned(folder, rps=1120.0, max_risk=0.0112)
    assert (alone.replicas, mix_of(alone)) == (7, {HALF: 1.0})
    assert alone.mix.lost == pytest.approx(0.01 / 0.9)
    # Where 7 carry more than is asked for, the rest goes to the full one: 1/100 - s/200 a request.
    less = planned(folder, rps=1000.0, max_risk=0.0112)
    assert less.replicas == 7
    assert mix_of(less) == {HALF: 0.88, FULL: pytest.approx(0.12)}
    assert less.mix.lost == pytest.approx(0.88 * 0.01 / 0.9)
    # At most s of a quarter: 0.01 + s 0.05 <= 0.03 x 0.9, so 34 %, and a replica less than with 33.
    both = planned(folder, rps=10_000.0, max_risk=0.03)
    assert mix_of(both) == {HALF: 0.66, QUARTER: 0.34}
    needed = [math.ceil(10_000 * ((1 - s) / 200 + s / 400) / 0.8) for s in (0.34, 0.33)]
    assert needed == [both.replicas, both.replicas + 1] == [52, 53]
    assert planned(folder, rps=10_000.0, max_risk=0.99).replicas == math.ceil(25 / 0.8)


def test_more_requests_never_need_fewer_replicas_nor_a_longer_slo_more(folder: Path) -> None:
    rates, slos = (1.0, 399.0, 5000.0), (13.0, 50.0, 500.0)
    needed = {
        (rate, slo): planned(folder, rps=rate, slo_ms=slo, max_risk=0.05).replicas
        for rate, slo in itertools.product(rates, slos)
    }
    for slo in slos:
        assert sorted(needed[rate, slo] for rate in rates) == [needed[rate, slo] for rate in rates]
    for rate in rates:
        counts = [needed[rate, slo] for slo in slos]
        assert sorted(counts, reverse=True) == counts


def candidate(capacity: float, idle_ms: float = 0.0) -> PlanCandidate:
    return PlanCandidate("v", 1.0, "90 %", 0.0, capacity, 16, (capacity, capacity), idle_ms, None)


def simulated_waits(utilisation: float, service_s: np.ndarray, seed: int) -> np.ndarray:
    """Waits of one server, by Lindley's recursion."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(service_s.mean() / utilisation, len(service_s))
    steps = np.concatenate([[0.0], service_s[:-1] - gaps[1:]])
    walk = np.cumsum(steps)
    return np.asarray(walk - np.minimum.accumulate(walk))


@pytest.mark.parametrize("utilisation", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("percentile", [95, 99])
def test_the_wait_is_that_of_simulated_queues(utilisation: float, percentile: int) -> None:
    n, rng = 400_000, np.random.default_rng(0)
    one = Mix(((candidate(100.0), 1.0),))
    estimate = one.wait_ms(utilisation, percentile)
    exponential = simulated_waits(utilisation, rng.exponential(0.01, n), 1)
    assert 1e3 * np.percentile(exponential, percentile) == pytest.approx(estimate, rel=0.1)
    # What takes the same time each run waits less: the estimate lies above.
    fixed = simulated_waits(utilisation, np.full(n, 0.01), 2)
    assert 1e3 * np.percentile(fixed, percentile) < 0.7 * estimate
    two = Mix(((candidate(50.0), 0.2), (candidate(400.0), 0.8)))
    service = np.where(rng.random(n) < 0.2, 1 / 50, 1 / 400)
    assert 1e3 * np.percentile(simulated_waits(utilisation, service, 3), percentile) < two.wait_ms(
        utilisation, percentile
    )


def test_an_idle_replica_does_not_wait() -> None:
    one = Mix(((candidate(100.0, idle_ms=7.0), 1.0),))
    assert one.time_ms(0.05, 95) == one.time_ms(0.0, 95) == 7.0 < one.time_ms(0.06, 95)
    assert one.utilisation_within(6.9, 95) == 0.0
    assert one.utilisation_within(7.0, 95) == pytest.approx(0.05)


def test_the_command_prints_the_arithmetic(folder: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["plan", str(folder), "--rps", "10000", "--slo-ms", "50", "--max-risk", "0.03"]
    assert run(words) == 0
    text = capsys.readouterr().out
    assert "68 % of the requests with --budget 0.5." in text
    assert "Measured on a CPU, 2 cores, onnxruntime 1.31.1 CPU, one thread." in text
    assert run([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert f"{content['replicas']} replicas: {2 * content['replicas']} cores, 2 each." in text
    assert all(line in " ".join(text.split()) for line in content["arithmetic"])
    assert content["utilisation"] * content["capacity"] == pytest.approx(10_000)


def test_variants_on_gpus_are_counted_in_gpus(tiny_folder: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(tiny_folder, tmp_path / "nac"))
    measured(place, runtime="onnxruntime 1.31.1 NVIDIA L4", device="a CPU")
    made = planned(place, device="a CPU")
    content = made.to_dict()
    assert (content["replicas"], content["gpus"], content["cores"]) == (13, 13, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rps": 0.0}, "--rps: found 0.0, expected above 0"),
        ({"rps": math.nan}, "--rps: found nan"),
        ({"slo_ms": math.inf}, "--slo-ms: found inf"),
        ({"max_risk": 1.0}, "--max-risk: found 1.0, expected"),
        ({"max_utilization": 1.0}, "--max-utilization: found 1.0, expected"),
        ({"spare": -1}, "--spare: found -1, expected .* 0"),
        ({"device": "another"}, "'another'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_numbers_are_refused(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SaccadeError, match=words):
        planned(folder, **options)


def test_a_plan_needs_figures_under_load(tiny_folder: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(tiny_folder, tmp_path / "nac"))
    with pytest.raises(SaccadeError, match=r"has no frontier\.json, expected .* saccade bench"):
        planned(place)
    alone = {"router_concurrency_1": point(10.0, 1.0), "concurrency_16": point(1e3, 1.0)}
    measured(place, grpc=alone)
    with pytest.raises(SaccadeError, match="expected figures with several clients"):
        planned(place)
    measured(place, grpc=None)
    with pytest.raises(SaccadeError, match="without a server"):
        planned(place)


def test_what_nothing_can_meet_is_said(folder: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(GateFailed, match=f"fastest of 2, {FULL}, takes 12.00 ms") as said:
        planned(folder, slo_ms=5.0)
    assert said.value.exit_code == 1
    assert planned(folder, slo_ms=5.0, max_risk=0.1).mix.parts[0][0].variant == QUARTER
    assert run(["plan", str(folder), "--rps", "10", "--slo-ms", "5"]) == 1
    assert "more replicas do not help" in capsys.readouterr().err
