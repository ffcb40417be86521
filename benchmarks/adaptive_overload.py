# SPDX-License-Identifier: Apache-2.0
"""The largest load alone: the adaptive choice beside the cheapest variant, in short turns.

    python benchmarks/adaptive_load.py --artefact build/nac --prepare   # needs the export extras
    python benchmarks/adaptive_overload.py --seconds 4 --turns 30       # about 20 minutes

A virtual machine gets more or less of its host from second to second, which decides how many
requests are answered in time more than any choice does. So the arms take turns of a few seconds:
the adaptive choice at --times of what budget 1 sustains, and the cheapest variant at that load, at
half and at three quarters of it. Of each turn, the ratio to the cheapest variant is counted at the
same load and at its best one.

The host says what it takes (`steal` in /proc/stat). Beside the figures of all turns are those of
the turns in which it took at most --most-stolen of the cores' time from each arm.
Writes results/adaptive_overload.json.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from adaptive_load import (
    RESULTS,
    Arm,
    Stolen,
    adaptive_arm,
    capacity,
    figures,
    head,
    load_options,
    requests_of,
    run,
    servers,
)
from result_file import write_result

from saccade.models.scores.intervals import bootstrap
from saccade.serving.client.client import Client
from saccade.serving.server.server import Server

PARTS = (1.0, 0.75, 0.5)  # of the largest load, for the cheapest variant


def main() -> None:
    """Take the turns, and write the result."""
    options = _options()
    files, labels = requests_of(options)
    with servers(options) as (plain, adaptive):
        result = overload(plain, adaptive, files, labels, options)
    for name in ("of_the_cheapest", "of_the_cheapest_undisturbed"):
        print(name, result[name])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    load_options(parser)
    parser.add_argument("--times", type=float, default=8.0, help="of the capacity")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--most-stolen", type=float, default=0.02, help="of the cores' time")
    parser.add_argument("--out", type=Path, default=RESULTS / "adaptive_overload.json")
    return parser.parse_args()


def overload(
    plain: Server,
    adaptive: Server,
    files: np.ndarray,
    labels: np.ndarray,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Take the turns; what is known is written after each."""
    with Client(plain.url, plain.model) as client:
        view = client.view()
    smallest, full = view.budget(view.variants[-1]), capacity(plain, files, "1")
    least = Arm("cheapest", plain.url, {"budget": smallest})
    arms = [(adaptive_arm(adaptive), 1.0), *((least, part) for part in PARTS)]
    result = {
        "benchmark": "load-adaptive choice beside the cheapest variant, at the largest load",
        **head(plain.model, smallest, options),
        "offered_per_s": options.times * full,
        "most_stolen": options.most_stolen,
        "turns": [],
    }
    for turn in range(options.turns):
        windows = []
        for arm, part in arms[:: -1 if turn % 2 else 1]:
            phases = ((part * result["offered_per_s"], options.seconds),)
            stolen = Stolen()
            sent = run(arm, files, plain.model, phases, options, seed=options.seed + 100 * turn)
            inside, right = sent.planned_s >= 0, sent.classes == labels[sent.message]
            one = figures(sent, right, inside, view.variants, options.slo_ms)
            windows.append({"arm": arm.name, "part": part, **one, "stolen": stolen.share()})
            print(arm.name, part, one["in_time"], one["refused"], one["late"], flush=True)
        result["turns"].append(windows)
        write_result(options.out, result | ratios(result["turns"], options))
    return result | ratios(result["turns"], options)


def ratios(turns: list[list[dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios of all turns, and of those that the host left alone."""
    alone = [turn for turn in turns if max(each["stolen"] for each in turn) <= options.most_stolen]
    found = {"of_the_cheapest": turns, "of_the_cheapest_undisturbed": alone}
    return {name: {"turns": len(some), **_of(some)} for name, some in found.items()}


def _of(turns: list[list[dict[str, Any]]]) -> dict[str, Any]:
    same, best = [], []
    for turn in turns:
        (mine,) = (one["in_time"] for one in turn if one["arm"] == "adaptive")
        least = {one["part"]: one["in_time"] for one in turn if one["arm"] != "adaptive"}
        same.append(mine / max(1, least[1.0]))
        best.append(mine / max(1, *least.values()))
    return {
        name: {
            "mean": float(np.mean(values)),
            "interval": list(bootstrap(np.array(values))),
            "ratios": values,
        }
        for name, values in (("at_the_same_load", same), ("at_its_best_load", best))
        if values
    }


if __name__ == "__main__":
    main()
