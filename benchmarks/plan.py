# SPDX-License-Identifier: Apache-2.0
"""Compare what `saccade plan` predicts for two replicas with two real replicas.

    python benchmarks/plan.py                 # five rounds, some minutes

`saccade bench` measures one replica on one core, including the load generator. `saccade plan`
predicts what two replicas carry within an SLO, and the rate at which they are full. Then two
servers run, one per core, with one client channel that alternates between them (gRPC's round_robin)
and the generator on both cores. Each round measures each replica alone on its core and both
together, in a closed loop, so that drift of the machine affects both. Then requests arrive randomly
(Poisson) at the planned rate. If other programs use the cores, rates mean little, so requests per
core second of servers and generator are recorded too. Writes results/plan.json.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from digits_folder import digits_folder
from result_file import write_result

from saccade.core.machine import this_machine
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.evaluation.tasks import inputs_of
from saccade.serving.bench.bench import BenchOptions, bench
from saccade.serving.bench.load import LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.open_load import Arrivals, OpenLoad, quantiles
from saccade.serving.bench.plan import CapacityPlan, PlanOptions, plan
from saccade.serving.bench.served import encoded_request
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import Server

HERE = Path(__file__).parent
BUDGETS = (1.0, 0.25)
DATA = "digits-sum"
REPLICAS = 2
QUIET = ServeOptions(
    grpc_port=0, http_port=0, metrics_port=0, ready_port=0, probe_interval_s=600, restart=False
)


def main() -> None:
    """Measure one replica, plan two, and measure two."""
    options = _options()
    cores = sorted(os.sched_getaffinity(0))[:REPLICAS]
    if len(cores) < REPLICAS:
        raise SystemExit(f"found {len(cores)} core, expected {REPLICAS}: one per replica.")
    with tempfile.TemporaryDirectory() as place:
        folder, asked = digits_folder(options.build / "plan", BUDGETS), {}
        with _on(cores[:1]):
            report = bench(
                folder,
                BenchOptions(
                    Path(place) / "report",
                    data=DATA,
                    limit=2000,
                    rounds=options.rounds,
                ),
            )
        measured = ArtefactFolder(folder)
        for variant in measured.variants:
            entries = [each for each in measured.frontier.entries if each.variant == variant.name]
            asked[variant.name] = _plan_of_two(measured.only([variant], entries), options.slo_ms)
        results = _measured(folder, Path(place) / "repository", asked, cores, options)
    for name, result in results.items():
        print(f"{name}: {_line(result)}")
    write_result(
        options.out,
        {
            "benchmark": "plan of two replicas",
            "machine": this_machine().to_dict(),
            "options": {
                key: value for key, value in vars(options).items() if key not in ("build", "out")
            },
            "one_replica": report.full["machine"]["device"],
            "plans": results,
        },
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slo-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each window")
    parser.add_argument("--build", type=Path, default=HERE.parent / "build" / "benchmarks")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "plan.json")
    return parser.parse_args()


@contextmanager
def _on(cores: Sequence[int]) -> Iterator[None]:
    """Pin processes that are started in this block to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _plan_of_two(folder: ArtefactFolder, slo_ms: float) -> CapacityPlan:
    """Plan for the highest rate that two replicas can carry."""
    one = plan(folder, PlanOptions(rps=1.0, slo_ms=slo_ms))
    rate = REPLICAS * one.allowed / one.mix.service_s
    made = plan(folder, PlanOptions(rps=rate, slo_ms=slo_ms))
    assert made.replicas == REPLICAS, made.to_dict()
    return made


def _measured(
    folder: Path,
    repository: Path,
    plans: dict[str, CapacityPlan],
    cores: Sequence[int],
    options: argparse.Namespace,
) -> dict[str, dict[str, Any]]:
    deploy(folder, RepositoryOptions(repository))
    requests = {name: _requests(folder, made) for name, made in plans.items()}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    with ExitStack() as stack:
        servers, alone = [], []
        for core in cores:
            with _on([core]):
                servers.append(stack.enter_context(Server(repository, QUIET)))
                alone.append(stack.enter_context(_generator(servers[-1].url)))
        both = "ipv4:" + ",".join(server.url for server in servers)
        together = stack.enter_context(_generator(both))
        arriving = stack.enter_context(OpenLoad(both))
        for turn in range(options.rounds):
            for name, made in plans.items():
                one = _round(alone, together, arriving, made, requests[name], options.seconds, turn)
                rounds[name].append(one)
                print(f"round {turn + 1}, {name}: {one}", flush=True)
    return {
        name: _summary(made, rounds[name], _benched(folder, made)) for name, made in plans.items()
    }


def _benched(folder: Path, made: CapacityPlan) -> float:
    """Return requests per core second of server and generator in the benchmark of one replica."""
    ((part, _),) = made.mix.parts
    entries = ArtefactFolder(folder).frontier.entries
    (grpc,) = (entry.grpc for entry in entries if entry.variant == part.variant)
    return 1e3 / grpc[f"router_concurrency_{part.clients}"]["core_ms_per_request"]


def _generator(url: str) -> LoadGenerator:
    # Everything that this program started: servers and generators, including idle ones.
    return LoadGenerator(url, server_pid=os.getpid())


def _requests(folder: Path, made: CapacityPlan) -> tuple[bytes, ...]:
    ((part, _),) = made.mix.parts
    (variant,) = (each for each in ArtefactFolder(folder).variants if each.name == part.variant)
    ((role, inputs),) = inputs_of(variant, DATA, 64).items()
    images = inputs["image"]
    model = variant.components[role].variant.model
    return tuple(encoded_request(model, images[at : at + 1], part.budget) for at in range(64))


def _round(
    alone: Sequence[LoadGenerator],
    together: LoadGenerator,
    arriving: OpenLoad,
    made: CapacityPlan,
    requests: tuple[bytes, ...],
    seconds: float,
    turn: int,
) -> dict[str, Any]:
    ((part, _),) = made.mix.parts
    each = [_window(load, requests, part.clients, seconds) for load in alone]
    whole = _window(together, requests, REPLICAS * part.clients, seconds)
    arrivals = Arrivals(requests, made.options.rps, seconds, deadline_s=10.0, seed=turn)
    seen = arriving.run(arrivals)
    return {
        "load_average": os.getloadavg()[0],
        "each_alone": each,
        "together": whole,
        "arrivals": {
            "rate": seen.sent / seen.seconds,
            "statuses": dict(seen.statuses()),
            "answered_ms": quantiles(seen.answered_ms),
            "lag_ms": quantiles(seen.lag_ms),
            "within_slo": sum(ms <= made.options.slo_ms for ms in seen.answered_ms) / seen.sent,
        },
    }


def _window(
    load: LoadGenerator, requests: tuple[bytes, ...], clients: int, seconds: float
) -> dict[str, float]:
    """Return requests per second and per core second, and the cores used."""
    stream = Stream("all", "nac", clients, requests)
    result = refuse_errors(load.run([stream], seconds=seconds, warmup_s=0.5), load.url)
    answered, core_s = len(result.streams["all"].latencies_ms), sum(result.server_cpu_s.values())
    return {
        "per_s": answered / result.seconds,
        "per_core_s": answered / core_s,
        "cores": core_s / result.seconds,
    }


def _summary(made: CapacityPlan, rounds: Sequence[Any], benched: float) -> dict[str, Any]:
    predicted = made.to_dict()
    together = [one["together"]["per_s"] for one in rounds]
    of_alone = {
        key: [
            one["together"][key] / statistics.fmean(each[key] for each in one["each_alone"])
            for one in rounds
        ]
        for key in ("per_s", "per_core_s")
    }
    by_core = [one["together"]["per_core_s"] for one in rounds]
    p95 = [one["arrivals"]["answered_ms"]["p95"] for one in rounds]
    return {
        "predicted": {
            key: predicted[key]
            for key in ("replicas", "capacity", "utilisation", "utilisation_within_slo", "time_ms")
        },
        "planned": asdict(made.options),
        "arithmetic": predicted["arithmetic"],
        "capacity": _spread(together),
        "capacity_of_predicted": _spread([rate / predicted["capacity"] for rate in together]),
        "rate_of_one_alone": _spread(of_alone["per_s"]),
        "requests_per_core_second": _spread(by_core),
        "requests_per_core_second_of_bench": _spread([rate / benched for rate in by_core]),
        "requests_per_core_second_of_one_alone": _spread(of_alone["per_core_s"]),
        "cores_had_together": _spread([one["together"]["cores"] for one in rounds]),
        "p95_ms_at_planned_rate": _spread(p95),
        "p95_of_estimate": _spread([ms / predicted["time_ms"] for ms in p95]),
        "within_slo": _spread([one["arrivals"]["within_slo"] for one in rounds]),
        "rounds": list(rounds),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _line(result: dict[str, Any]) -> str:
    said = {
        name: "{median:.3g} ({least:.3g} to {most:.3g})".format(**result[name])
        for name in ("capacity", "capacity_of_predicted", "p95_ms_at_planned_rate", "within_slo")
    }
    return f"predicted {result['predicted']}, measured {said}"


if __name__ == "__main__":
    main()
