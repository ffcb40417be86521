# SPDX-License-Identifier: Apache-2.0
"""Overload alone: the adaptive choice beside the cheapest variant, in short turns.

    python benchmarks/adaptive_load.py --artefact build/nac --prepare   # needs the export extras
    python benchmarks/adaptive_overload.py                              # about 9 minutes

A virtual machine gets more or less of its host from second to second, which decides how many
requests are answered in time more than any choice does. So all arms are parts of one run and take
turns of --seconds, in the opposite order every other time: the adaptive choice and the cheapest
variant, each at every one of --times what budget 1 sustains. The first second of a turn is not
counted: the arm before is still being answered, and the level falls.

The ratios are those of what was answered in time in all turns, with an interval over the turns: to
the cheapest variant at the same load, and to the most that it answers at any of the loads.
Writes results/adaptive_overload.json.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from adaptive_load import (
    RESULTS,
    WARM_S,
    Arm,
    Stolen,
    adaptive_arm,
    capacity,
    figures,
    head,
    load_options,
    order_of,
    requests_of,
    servers,
)
from poisson_load import Sent, send_together
from result_file import write_result

from saccade.serving.client.client import Client
from saccade.serving.server.server import Server

WARM_RATE = 5.0  # requests per second of each arm, before the first turn
SKIP_S = 1.0  # of each turn, not counted
RESAMPLES = 5000


def main() -> None:
    """Take the turns, and write the result."""
    options = _options()
    files, labels = requests_of(options)
    with servers(options) as (plain, adaptive):
        result = overload(plain, adaptive, files, labels, options)
    write_result(options.out, result)
    for times, ratios in result["of_the_cheapest"].items():
        print(times, ratios)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    load_options(parser)
    parser.set_defaults(seconds=3.0)
    parser.add_argument("--times", type=float, nargs="+", default=(4.0, 6.0, 8.0))
    parser.add_argument("--turns", type=int, default=28)
    parser.add_argument("--out", type=Path, default=RESULTS / "adaptive_overload.json")
    return parser.parse_args()


def overload(
    plain: Server,
    adaptive: Server,
    files: np.ndarray,
    labels: np.ndarray,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Take all turns."""
    with Client(plain.url, plain.model) as client:
        view = client.view()
    smallest, full = view.budget(view.variants[-1]), capacity(plain, files, "1")
    kinds = {
        "adaptive": adaptive_arm(adaptive),
        "cheapest": Arm("cheapest", plain.url, {"budget": smallest}),
    }
    arms = [(name, times) for times in options.times for name in kinds]
    orders = [
        order_of(
            kinds[name],
            files,
            plain.model,
            ((WARM_RATE, WARM_S), *phases_of(at, len(arms), times * full, options)),
            options,
            options.seed + 1000 * at,
        )
        for at, (name, times) in enumerate(arms)
    ]
    stolen = Stolen()
    sent = send_together(orders, options.generators)
    stolen_share = stolen.share()
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for at, arm in enumerate(arms):
        right = sent[at].classes == labels[sent[at].message]
        masks = turns_of(sent[at], at, len(arms), options)
        whole = figures(sent[at], right, masks.any(0), view.variants, options.slo_ms)
        in_time = [
            figures(sent[at], right, mask, view.variants, options.slo_ms)["in_time"]
            for mask in masks
        ]
        found[arm] = whole | {"in_time_by_turn": in_time}
        print(*arm, {name: whole[name] for name in ("sent", "in_time", "late", "refused")})
    return {
        "benchmark": "load-adaptive choice beside the cheapest variant, beyond the capacity",
        **head(plain.model, smallest, options),
        "turns": options.turns,
        "skipped_s": SKIP_S,
        "sustained_by_budget_1_per_s": full,
        "stolen": stolen_share,
        "arms": [{"arm": name, "times": times, **found[name, times]} for name, times in arms],
        "of_the_cheapest": ratios(found, options),
    }


def position(at: int, arms: int, turn: int) -> int:
    """Return when an arm's turn comes; the order is turned around every other time."""
    return arms - 1 - at if turn % 2 else at


def phases_of(
    at: int, arms: int, rate: float, options: argparse.Namespace
) -> list[tuple[float, float]]:
    """Return the rates of one arm: its own turns, and pauses during those of the others."""
    phases = []
    for turn in range(options.turns):
        before = position(at, arms, turn)
        phases += [
            (0.0, before * options.seconds),
            (rate, options.seconds),
            (0.0, (arms - 1 - before) * options.seconds),
        ]
    return phases


def turns_of(sent: Sent, at: int, arms: int, options: argparse.Namespace) -> np.ndarray:
    """Return which requests count for each turn of an arm.

    Shapes: -> bool [turns n].
    """
    slots = [turn * arms + position(at, arms, turn) for turn in range(options.turns)]
    begins = np.array(slots)[:, None] * options.seconds
    planned_s = sent.planned_s[None]
    return (planned_s >= begins + SKIP_S) & (planned_s < begins + options.seconds)


def ratios(
    found: dict[tuple[str, float], dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    """Return what the adaptive choice answers in time, of what the cheapest variant does."""

    def in_time(name: str, times: float) -> np.ndarray:
        return np.array(found[name, times]["in_time_by_turn"])

    best = max(options.times, key=lambda times: in_time("cheapest", times).sum())
    return {
        f"{times:g} times": {
            "at_the_same_load": ratio(in_time("adaptive", times), in_time("cheapest", times)),
            "at_its_best_load": ratio(in_time("adaptive", times), in_time("cheapest", best)),
        }
        for times in options.times
    }


def ratio(over: Sequence[int], under: Sequence[int]) -> dict[str, Any]:
    """Return the ratio of two totals, with a 95 % interval of turns drawn together."""
    over, under = np.array(over), np.array(under)
    drawn = np.random.default_rng(0).integers(0, len(over), (RESAMPLES, len(over)))
    resampled = over[drawn].sum(1) / np.maximum(1, under[drawn].sum(1))
    return {
        "ratio": float(over.sum() / max(1, under.sum())),
        "interval": np.quantile(resampled, [0.025, 0.975]).tolist(),
    }


if __name__ == "__main__":
    main()
