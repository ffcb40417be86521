# SPDX-License-Identifier: Apache-2.0
"""After an overload: how soon does the full model answer again, in many trials?

    python benchmarks/adaptive_load.py --artefact build/nac --prepare   # needs the export extras
    python benchmarks/adaptive_recovery.py                              # about 8 minutes

A trial is a load of half of what budget 1 sustains, then the largest of --times, then half again.
Trials of the adaptive choice and of budget 1 take turns: what the full model answers in time
without adaptation tells what the machine allowed, because its host takes more or less of it.

The recovery is the time since which the full model answers most requests of every half second. A
level that falls again later, such as because the host took the cores, counts against it.
Writes results/adaptive_recovery.json.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from adaptive_load import (
    MOST_RECOVERY_S,
    REST_S,
    RESULTS,
    Arm,
    Stolen,
    adaptive_arm,
    capacity,
    full_share,
    head,
    load_options,
    recovery_s,
    requests_of,
    run,
    servers,
)
from result_file import write_result

from saccade.serving.client.client import Client
from saccade.serving.server.server import Server


def main() -> None:
    """Run all trials, and write the result."""
    options = _options()
    files, _ = requests_of(options)
    with servers(options) as (plain, adaptive):
        result = recoveries(plain, adaptive, files, options)
    write_result(options.out, result)
    print(result["recovered_within"])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    load_options(parser)
    parser.set_defaults(seconds=4.0)
    parser.add_argument("--times", type=float, default=8.0, help="of the capacity")
    parser.add_argument("--after", type=float, default=8.0, help="seconds after the overload")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS / "adaptive_recovery.json")
    return parser.parse_args()


def recoveries(
    plain: Server, adaptive: Server, files: np.ndarray, options: argparse.Namespace
) -> dict[str, Any]:
    """Run the trials of both arms in turn."""
    with Client(plain.url, plain.model) as client:
        view = client.view()
    full = capacity(plain, files, "1")
    arms = [adaptive_arm(adaptive), Arm("budget 1", plain.url, {"budget": "1"})]
    phases = (
        (0.5 * full, options.seconds),
        (options.times * full, options.seconds),
        (0.5 * full, options.after),
    )
    trials: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for trial in range(options.trials):
        for arm in arms[:: -1 if trial % 2 else 1]:
            trials[arm.name].append(_trial(arm, files, plain.model, phases, trial, options))
            print(arm.name, trials[arm.name][-1], flush=True)
            time.sleep(REST_S)
    found = [one["recovery_s"] for one in trials["adaptive"]]
    soon = [one for one in found if one is not None and one <= MOST_RECOVERY_S]
    return {
        "benchmark": "recovery of the load-adaptive choice after an overload",
        **head(plain.model, view.budget(view.variants[-1]), options),
        "times": options.times,
        "after_s": options.after,
        "sustained_by_budget_1_per_s": full,
        "recovered_within": {"seconds": MOST_RECOVERY_S, "trials": len(soon), "of": len(found)},
        "median_recovery_s": float(np.median([np.inf if one is None else one for one in found])),
        "arms": dict(trials),
    }


def _trial(
    arm: Arm,
    files: np.ndarray,
    model: str,
    phases: tuple[tuple[float, float], ...],
    trial: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    stolen = Stolen()
    sent = run(arm, files, model, phases, options, seed=options.seed + 100 * trial)
    edges = np.cumsum([seconds for _, seconds in phases])
    return {
        "recovery_s": recovery_s(sent, edges, options.slo_ms),
        "full_before": full_share(sent, options.slo_ms, 0.0, edges[0]),
        "full_after": full_share(sent, options.slo_ms, edges[1], edges[2]),
        "stolen": stolen.share(),
    }


if __name__ == "__main__":
    main()
