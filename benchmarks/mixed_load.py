# SPDX-License-Identifier: Apache-2.0
"""Mixed load: do cheap requests wait for expensive ones? 8 clients at budget 0.125, 8 at budget 1.

Both send PNG files through the router, alone and together in alternation, from a separate process.
Writes benchmarks/results/mixed_load.json.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from result_file import options_of, spread, write_result
from served_models import bench_folder, random_images, under_load

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.serving.bench.load import LoadGenerator, LoadResult, Stream, refuse_errors
from saccade.serving.bench.load_requests import encoded_request

CLIENTS = 8
MOST_TIMES = 3.0


def main() -> None:
    parser = options_of(__doc__, "mixed_load", rounds=7, seconds=3.0)
    parser.add_argument("--folder", type=Path, help="artefact folder with budgets 1 and 0.125")
    parser.add_argument("--modules", type=int, default=256, help="of the configuration bench")
    options = parser.parse_args()
    budgets = (1.0, 0.125)
    folder = options.folder or bench_folder(modules=options.modules, budgets=budgets)
    variant = ArtefactFolder(folder).manifests[0].variant
    router = variant.model
    images = random_images(folder, 32)
    dear, cheap = (
        Stream(f"budget {budget:g}", router, CLIENTS, _requests(router, images, budget))
        for budget in budgets
    )
    turns = {"cheap alone": [cheap], "dear alone": [dear], "together": [cheap, dear]}
    rounds = []
    with under_load(folder) as load:
        for turn in range(options.rounds):
            rounds.append(_round(load, turns, turn, options.seconds))
            print(f"round {turn + 1}: {_line(rounds[-1], cheap.name)}", flush=True)
    times = spread([_times(one, cheap.name) for one in rounds])
    result = {
        "benchmark": "cheap requests beside dear ones, through the router",
        "configuration": {"model": router, "modules": variant.total},
        "clients_each": CLIENTS,
        "seconds": options.seconds,
        "times_of_alone": times,
        "target": {"most": MOST_TIMES, "met": times["median"] <= MOST_TIMES},
        "rounds": rounds,
    }
    write_result(options.out, result)
    print(f"p50 of cheap requests: {times['median']:.2f} times their p50 alone (median)")


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
