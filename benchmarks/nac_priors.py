# SPDX-License-Identifier: Apache-2.0
"""Reproduce figure 5 of the NAC paper on digits-sum: scores with modules dropped after training.

    python benchmarks/nac_priors.py            # trains what is missing, scores, writes, draws
    python benchmarks/nac_priors.py --score    # does not train

There is one arm per graph prior, all with the same mean degree, and a dense circuit without
modulation (a Perceiver IO). As in the paper, no module is dropped in training. A NAC loses its
least connected modules first. The dense circuit has no degrees and loses modules in five random
orders. Checkpoints and scores go to build/nac_priors; an interrupted run is resumed.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from nac_priors_picture import draw
from result_file import write_result
from trained_once import trained_once

from saccade.core.files import json_bytes, write_atomically
from saccade.core.machine import this_machine
from saccade.models.checkpoint import load
from saccade.models.data.datasets import Dataset, load_data
from saccade.models.nac.model import NAC
from saccade.models.scores.intervals import wilson
from saccade.models.training.train import TrainOptions

SEEDS = (0, 1, 2)
MODULES, STEPS, MEAN_DEGREE = 32, 3_000, 12.0
TOKENS = {"patch_px": 12, "tokenizer": "patch"}  # one digit each
KEPT = (32, 30, 28, 26, 24, 20, 16, 12, 8, 6, 4, 2, 1)
ORDERS = 5  # number of random orders
LOST_POINTS = 3.0
DENSE = "dense"
# Seven neighbors at 0.9 and twenty-four others at 0.2375: a mean degree of 12.
_GROUPS = {"graph_group": 8, "graph_inside": 0.9, "graph_outside": 0.2375}
ARMS: dict[str, dict[str, Any]] = {
    "scale-free": {"graph_degree": MEAN_DEGREE},
    "planted-partition": _GROUPS,
    "ring-of-cliques": _GROUPS,
    "erdos-renyi": {"graph_degree": MEAN_DEGREE},
    DENSE: {"connectivity": "dense", "modulation": False},
}
_BATCH, _ROUNDS, _MOMENT_S = 64, 11, 0.05  # for the throughput
_ROOT = Path(__file__).resolve().parent


def options_of(folder: Path, arm: str, seed: int, steps: int) -> TrainOptions:
    """Return the options of one training run."""
    prior = {} if arm == DENSE else {"graph_prior": arm}
    return TrainOptions(
        folder / f"{arm}-{seed}.safetensors",
        data="digits-sum",
        set={"modules": MODULES, "module_dropout": 1.0, **TOKENS, **prior, **ARMS[arm]},
        steps=steps,
        seed=seed,
    )


def run_of(folder: Path, arm: str, seed: int, *, steps: int, training: bool) -> dict[str, Any]:
    """Return the scores of one run, computed if missing; empty if nothing was trained."""
    options = options_of(folder, arm, seed, steps)
    if training:
        trained_once("nac", options)
    if not options.out.exists():
        return {}
    kept, checkpoint = options.out.with_suffix(".json"), load(options.out)
    if kept.exists():
        run: dict[str, Any] = json.loads(kept.read_bytes())
        if run["sha256"] == checkpoint.sha256 and set(run["curve"]) == set(map(str, KEPT)):
            return run
    run = {"arm": arm, "seed": seed, "sha256": checkpoint.sha256, "card": checkpoint.card}
    run |= scores(checkpoint.build(), load_data("digits-sum", "test"), dense=arm == DENSE)
    write_atomically(kept, json_bytes(run))
    print(f"{time.strftime('%H:%M:%S')} {arm} seed {seed}: {run['curve']}", flush=True)
    return run


def scores(model: NAC, test: Dataset, *, dense: bool) -> dict[str, Any]:
    """Return the share of right answers by modules kept: by degree, or mean of random orders."""
    if not dense:
        return {"n": len(test.labels), "curve": _curve(model, test)}
    curves = []
    for seed in range(ORDERS):
        order = np.random.default_rng(seed).permutation(model.config.modules)
        model.module_order.copy_(torch.from_numpy(order))
        curves.append(_curve(model, test))
    mean = {kept: statistics.fmean(one[kept] for one in curves) for kept in curves[0]}
    return {"n": len(test.labels), "curve": mean, "random_orders": curves}


def _curve(model: NAC, test: Dataset) -> dict[str, float]:
    images, labels = torch.from_numpy(test.images), torch.from_numpy(test.labels)
    curve = {}
    for kept in KEPT:
        small = model.prune(kept / model.config.modules).eval().fold()
        with torch.inference_mode():
            answers = [small(images[i : i + 100]).argmax(1) for i in range(0, len(labels), 100)]
        curve[str(kept)] = float((torch.cat(answers) == labels).double().mean())
    return curve


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean curve over seeds with its spread, and the modules dropped at 3 points."""
    curves, n = [run["curve"] for run in runs], runs[0]["n"]
    mean = {kept: statistics.fmean(one[kept] for one in curves) for kept in curves[0]}
    full = mean[str(MODULES)]
    return {
        "seeds": [run["seed"] for run in runs],
        "n": n,
        "mean": mean,
        "least": {kept: min(one[kept] for one in curves) for kept in mean},
        "most": {kept: max(one[kept] for one in curves) for kept in mean},
        "full_interval_of_a_seed": wilson(round(full * n), n),
        "dropped_at_3_points": dropped(mean, full - LOST_POINTS / 100),
        "dropped_at_3_points_by_seed": [
            dropped(one, one[str(MODULES)] - LOST_POINTS / 100) for one in curves
        ],
    }


def dropped(curve: dict[str, float], least: float) -> float | None:
    """Return the largest share of modules up to which dropping keeps at least this score."""
    share = None
    for kept in KEPT:
        if curve[str(kept)] < least:
            break
        share = 1 - kept / MODULES
    return share


def throughput(folder: Path, arms: list[str], seed: int) -> dict[str, Any]:
    """Time folded torch models in turn on one thread: rates, and ratios to the full model's rate.

    Units: inferences per second of CPU time.
    """
    images = torch.from_numpy(load_data("digits-sum", "test").images[:_BATCH])
    models = {}
    for arm in arms:
        model = load(options_of(folder, arm, seed, STEPS).out).build()
        for kept in KEPT:
            models[arm, kept] = model.prune(kept / MODULES).eval().fold()
    rates: dict[tuple[str, int], list[float]] = {key: [] for key in models}
    with torch.inference_mode():
        for _ in range(_ROUNDS):
            for key, model in models.items():
                rates[key].append(_rate(model, images))
    by_arm: dict[str, Any] = {}
    for (arm, kept), rate in rates.items():
        times = [own / full for own, full in zip(rate, rates[arm, MODULES], strict=True)]
        low, middle, high = statistics.quantiles(times, n=4)
        by_arm.setdefault(arm, {})[str(kept)] = {
            "inferences_per_second": statistics.median(rate),
            "times_full": middle,
            "quartiles": [low, high],
        }
    return {"batch": _BATCH, "rounds": _ROUNDS, "threads": 1, "seed": seed, "arms": by_arm}


def _rate(model: torch.nn.Module, images: torch.Tensor) -> float:
    model(images)
    # CPU time is not affected by other programs, and on one thread it is complete.
    calls, begin, taken = 0, time.process_time(), 0.0
    while taken < _MOMENT_S:
        model(images)
        calls += 1
        taken = time.process_time() - begin
    return calls * len(images) / taken


def result_of(folder: Path, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return all results of the existing runs."""
    seed = min(run["seed"] for known in runs.values() for run in known)
    timed = [arm for arm, known in runs.items() if any(run["seed"] == seed for run in known)]
    missing = {
        arm: absent
        for arm in ARMS
        if (absent := sorted(set(SEEDS) - {run["seed"] for run in runs.get(arm, [])}))
    }
    arms = {arm: summary(known) for arm, known in runs.items()}
    if DENSE in arms:
        least = arms[DENSE]["mean"][str(MODULES)]
        for arm in arms.values():
            arm["dropped_until_below_dense"] = dropped(arm["mean"], least)
    return {
        "machine": this_machine().to_dict(),
        "data": "digits-sum, test split",
        "modules": MODULES,
        "lost_points": LOST_POINTS,
        "missing_seeds": missing,
        "arms": arms,
        "throughput": throughput(folder, timed, seed),
        "runs": [run for known in runs.values() for run in known],
    }


def main() -> None:
    """Run seed by seed, so that an interrupted run has all arms of its first seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--score", action="store_true", help="do not train")
    parser.add_argument("--folder", type=Path, default=Path("build/nac_priors"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a training run")
    parser.add_argument("--out", type=Path, default=_ROOT / "results" / "nac_priors.json")
    parser.add_argument("--picture", type=Path, default=_ROOT.parent / "docs" / "nac_priors.png")
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for seed in given.seeds:
        for arm, known in runs.items():
            if run := run_of(given.folder, arm, seed, steps=given.steps, training=not given.score):
                known.append(run)
    result = result_of(given.folder, {arm: known for arm, known in runs.items() if known})
    write_result(given.out, result)
    draw(json.loads(given.out.read_bytes()), given.picture)
    for arm, arm_runs in result["arms"].items():
        print(f"{arm}: {arm_runs['dropped_at_3_points']} at {LOST_POINTS:g} points", flush=True)


if __name__ == "__main__":
    main()
