# SPDX-License-Identifier: Apache-2.0
"""Mixed load: do cheap requests wait for expensive ones? 8 clients at budget 0.125, 8 at budget 1.

Both send PNG files through the router, alone and together in alternation, from a separate process.
Writes benchmarks/results/mixed_load.json.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from bench_folder import bench_folder, random_images
from result_file import write_result

from saccade.core.machine import this_machine
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.serving.bench.load import LoadGenerator, LoadResult, Stream, refuse_errors
from saccade.serving.bench.served import encoded_request
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import Server

HERE = Path(__file__).parent
CLIENTS = 8
MOST_TIMES = 3.0


def main() -> None:
    options = _options()
    budgets = (1.0, 0.125)
    folder = options.folder or bench_folder(options.build, modules=options.modules, budgets=budgets)
    variant = ArtefactFolder(folder).manifests[0].variant
    router = variant.model
    images = random_images(folder, 32)
    dear, cheap = (
        Stream(f"budget {budget:g}", router, CLIENTS, _requests(router, images, budget))
        for budget in budgets
    )
    turns = {"cheap alone": [cheap], "dear alone": [dear], "together": [cheap, dear]}
    rounds = []
    quiet = ServeOptions(
        grpc_port=0, http_port=0, metrics_port=0, ready_port=0, probe_interval_s=600, restart=False
    )
    with tempfile.TemporaryDirectory() as place:
        repository = Path(place) / "repository"
        deploy(folder, RepositoryOptions(out=repository))
        with (
            Server(repository, quiet) as server,
            LoadGenerator(server.url, server_pid=server.pid) as load,
        ):
            for turn in range(options.rounds):
                rounds.append(_round(load, turns, turn, options.seconds))
                print(f"round {turn + 1}: {_line(rounds[-1], cheap.name)}", flush=True)
    times = [_times(one, cheap.name) for one in rounds]
    result = {
        "benchmark": "cheap requests beside dear ones, through the router",
        "configuration": {"model": router, "modules": variant.total},
        "machine": this_machine().to_dict(),
        "clients_each": CLIENTS,
        "seconds": options.seconds,
        "times_of_alone": {
            "median": statistics.median(times), "least": min(times), "most": max(times),
        },
        "target": {"most": MOST_TIMES, "met": statistics.median(times) <= MOST_TIMES},
        "rounds": rounds,
    }  # fmt: skip
    write_result(options.out, result)
    print(f"p50 of cheap requests: {statistics.median(times):.2f} times their p50 alone (median)")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="artefact folder with budgets 1 and 0.125")
    parser.add_argument(
        "--modules", type=int, default=256, help="modules of the configuration bench"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement")
    parser.add_argument("--build", type=Path, default=HERE.parent / "build" / "benchmarks")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "mixed_load.json")
    return parser.parse_args()


def _requests(router: str, images: np.ndarray, budget: float) -> tuple[bytes, ...]:
    return tuple(encoded_request(router, images[at : at + 1], budget) for at in range(len(images)))


def _round(
    load: LoadGenerator, turns: dict[str, list[Stream]], turn: int, seconds: float
) -> dict[str, Any]:
    """Run every turn once; each round starts with another one."""
    names = list(turns)
    results = {}
    for name in names[turn % len(names) :] + names[: turn % len(names)]:
        result = load.run(turns[name], seconds=seconds, warmup_s=0.5)
        results[name] = _plain(refuse_errors(result, load.url))
    return {"load_average": os.getloadavg()[0], **results}


def _plain(result: LoadResult) -> dict[str, Any]:
    return {
        name: {
            "requests": len(stream.latencies_ms),
            "inferences_per_second": len(stream.latencies_ms) / result.seconds,
            **{f"p{q}_ms": float(np.percentile(stream.latencies_ms, q)) for q in (50, 95, 99)},
        }
        for name, stream in result.streams.items()
    }


def _times(one: dict[str, Any], cheap: str) -> float:
    return float(one["together"][cheap]["p50_ms"] / one["cheap alone"][cheap]["p50_ms"])


def _line(one: dict[str, Any], cheap: str) -> str:
    alone, together = one["cheap alone"][cheap], one["together"][cheap]
    return (
        f"p50 alone {alone['p50_ms']:.1f} ms, with expensive ones {together['p50_ms']:.1f} ms: "
        f"{_times(one, cheap):.2f} times"
    )


if __name__ == "__main__":
    main()
