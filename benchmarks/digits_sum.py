# SPDX-License-Identifier: Apache-2.0
"""Compare the shipped digits-sum model and four twins: the value of the graph and module dropout.

    python benchmarks/digits_sum.py train --only sparse-dropout dense-dropout   # or resume
    python benchmarks/digits_sum.py train            # all without scores
    python benchmarks/digits_sum.py score            # all that are trained

The twins are circuits of 256 modules with the same steps, seeds and rates. Their links have a mean
degree of 12 or are dense, with or without module dropout. They have fewer steps than the shipped
model, because without module dropout a step of 256 modules is expensive. The sparse twin without
dropout is the circuit of that size in nac_sizes.py. `shipped.py ship digits-sum` ships the model.
A twin with a seed other than 0 has the seed in its name.
"""

import argparse
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from budget_scores import score_budgets
from nac_curves import links_of
from nac_sizes import STEPS, Arm, options_of
from over_seeds import over_seeds, spoken
from shipped import BUILT, DIGITS_SUM_BUDGETS
from trained_once import trained_once

from saccade.core.files import json_bytes, write_atomically
from saccade.core.machine import this_machine
from saccade.models.checkpoint import load
from saccade.models.training.train import TrainOptions

SHIPPED = Path("models/shipped/digits-sum.safetensors")  # shipped.py ship writes it and its card
RESULT = Path("benchmarks/results/digits_sum.json")
WITHOUT = "module_dropout"  # if not set, the recipe's value is used
SEEDS = (0, 1, 2)
# The comparisons: first twin minus second, at these budgets.
PAIRS = (
    ("sparse-dropout", "sparse-no-dropout"),
    ("dense-dropout", "dense-no-dropout"),
    ("sparse-dropout", "dense-dropout"),
    ("sparse-no-dropout", "dense-no-dropout"),
)


def runs(folder: Path, sizes: Path) -> dict[str, TrainOptions]:
    """Return training options by name; with one thread, so that the bytes are reproducible."""
    shipped = TrainOptions(BUILT / SHIPPED.name, data="digits-sum", threads=1)
    checkpoints = {"shipped": shipped}
    for seed in SEEDS:
        checkpoints |= twins(
            folder, options_of(sizes, Arm(256, heads=True), seed=seed, steps=STEPS)
        )
    return checkpoints


def twins(folder: Path, plain: TrainOptions) -> dict[str, TrainOptions]:
    """Return the four circuits of one seed; `plain` is the sparse one without module dropout."""
    dropping = {key: value for key, value in plain.set.items() if key != WITHOUT}
    dense = {"connectivity": "dense"}
    given = {
        "sparse-dropout": dropping,
        "dense-dropout": dropping | dense,
        "dense-no-dropout": plain.set | dense,
    }
    options = {named("sparse-no-dropout", plain.seed): plain}
    for twin, settings in given.items():
        name = named(twin, plain.seed)
        options[name] = replace(plain, out=folder / f"{name}.safetensors", set=settings)
    return options


def named(twin: str, seed: int) -> str:
    """Return a twin's name in the result."""
    return f"{twin}-{seed}" if seed else twin


def differences(models: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare two twins at each budget over the seeds that have both; none for a single seed."""
    rows = []
    for pair in PAIRS:
        seeds = [seed for seed in SEEDS if all(named(twin, seed) in models for twin in pair)]
        if len(seeds) < 2:
            continue
        first, second = (
            [models[named(twin, seed)]["test"]["budgets"] for seed in seeds] for twin in pair
        )
        for budget in first[0]:
            by_seed = [
                one[budget]["top_1"] - other[budget]["top_1"]
                for one, other in zip(first, second, strict=True)
            ]
            over = over_seeds(by_seed)
            rows.append({"pair": pair, "budget": budget, "by_seed": by_seed, "over_seeds": over})
    return rows


def scores(options: dict[str, TrainOptions], known: dict[str, Any]) -> dict[str, Any]:
    """Return test scores and links of every trained checkpoint, always including the shipped one.

    `known` are earlier scores; they are kept if the file is the same or no longer exists.
    """
    by_arm = {}
    for name, run in options.items():
        path = run.out
        if not path.exists() and name == "shipped":
            path = SHIPPED
        before = known.get(name, {})
        if not path.exists() and not before:
            print(f"{name}: {path} does not exist, skipped")
            continue
        if not path.exists() or before.get("sha256") == load(path).sha256:
            by_arm[name] = before
            _print(name, before)
            continue
        checkpoint = load(path)
        result = score_budgets(checkpoint, "digits-sum", DIGITS_SUM_BUDGETS)
        by_arm[name] = {
            "sha256": checkpoint.sha256,
            "card": checkpoint.card,
            "links": links_of(checkpoint.build()),
            "test": result,
            "mean_over_budgets": statistics.fmean(
                row["top_1"] for row in result["budgets"].values()
            ),
        }
        _print(name, by_arm[name])
    return by_arm


def _print(name: str, result: dict[str, Any]) -> None:
    degree = result["links"]["mean_degree"]
    print(f"{name}: mean degree {degree:.1f}, {100 * result['mean_over_budgets']:.2f} % on average")
    for budget, row in result["test"]["budgets"].items():
        low, high = (100 * value for value in row["minus_full_interval"])
        print(
            f"  budget {budget:>8} ({row['modules']:>3} modules): {100 * row['top_1']:.2f} %, "
            f"{100 * row['minus_full']:+.2f} points ({low:+.2f} to {high:+.2f}) to full"
        )


def main() -> None:
    """Train or score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("train", "score"))
    parser.add_argument("--only", nargs="+", help="names of the runs to train")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/digits-sum"))
    parser.add_argument("--sizes", type=Path, default=Path("build/nac_sizes"))
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    options = runs(given.folder, given.sizes)
    known = json.loads(given.out.read_bytes())["models"] if given.out.exists() else {}
    if given.action == "train":
        for name in given.only or [name for name in options if name not in known]:
            trained_once("nac", options[name])
        return
    models = scores(options, known)
    over = differences(models)
    for seconds in over:
        first, second = seconds["pair"]
        print(
            f"budget {seconds['budget']}, {first} minus {second}: {spoken(seconds['over_seeds'])}"
        )
    content = {
        "machine": this_machine().to_dict(),
        "missing": sorted(set(options) - set(models)),
        "models": models,
        "differences": over,
    }
    write_atomically(given.out, json_bytes(content))


if __name__ == "__main__":
    main()
