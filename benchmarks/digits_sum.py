# SPDX-License-Identifier: Apache-2.0
"""The shipped digits-sum model, and four twins: what the graph is worth, and what module dropout.

    python benchmarks/digits_sum.py train --only sparse-dropout dense-dropout   # goes on
    python benchmarks/digits_sum.py train            # every one that is missing
    python benchmarks/digits_sum.py score            # those that are there

The twins are circuits of 256 modules, the same steps, seed and rates: links of mean degree 12 or
dense, with module dropout or without. They have fewer steps than the shipped one, because without
module dropout a step of 256 modules is dear; the sparse one without is the circuit of that size
of nac_sizes.py. `sparse-long` has the shipped recipe's steps. `train --ship` copies the shipped
one to models/shipped.
"""

import argparse
import os
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from budget_scores import score_budgets
from nac_curves import links_of
from nac_sizes import STEPS, Arm, options_of

from saccade.models.checkpoint import load
from saccade.models.train import TrainOptions, train
from saccade.plugins.files import json_bytes, write_atomically
from saccade.serving.machine import this_machine

SHIPPED = Path("models/shipped/digits-sum.safetensors")
RESULT = Path("benchmarks/results/digits_sum.json")
BUDGETS = (1.0, 0.5, 0.25, 0.2, 0.125, 0.0625, 0.03125, 0.015625)
WITHOUT = "module_dropout"  # where it is not set, the recipe's is taken


def runs(folder: Path, sizes: Path) -> dict[str, TrainOptions]:
    """Name to options; one thread, so that the bytes come out the same."""
    plain = options_of(sizes, Arm(256, heads=True), seed=0, steps=STEPS)
    dropping = {key: value for key, value in plain.set.items() if key != WITHOUT}
    dense = {"connectivity": "dense"}
    shipped = TrainOptions(folder / SHIPPED.name, data="digits-sum", threads=1)

    def twin(name: str, given: dict[str, Any]) -> TrainOptions:
        return replace(plain, out=folder / f"{name}.safetensors", set=given)

    return {
        "shipped": shipped,
        "sparse-dropout": twin("sparse-dropout", dropping),
        "sparse-no-dropout": plain,
        "dense-dropout": twin("dense-dropout", dropping | dense),
        "dense-no-dropout": twin("dense-no-dropout", plain.set | dense),
        "sparse-long": replace(
            shipped, out=folder / "sparse-long.safetensors", set=dropping, precision="bf16"
        ),
    }


def scores(options: dict[str, TrainOptions]) -> dict[str, Any]:
    """Test scores and links of every checkpoint that is there; of the shipped one always."""
    found = {}
    for name, run in options.items():
        path = run.out
        if not path.exists() and name == "shipped":
            path = SHIPPED
        if not path.exists():
            print(f"{name}: {path} is not there, left out")
            continue
        checkpoint = load(path)
        result = score_budgets(checkpoint, "digits-sum", BUDGETS)
        found[name] = {
            "sha256": checkpoint.sha256,
            "card": checkpoint.card,
            "links": links_of(checkpoint.build()),
            "test": result,
            "mean_over_budgets": statistics.fmean(
                row["top_1"] for row in result["budgets"].values()
            ),
        }
        _print(name, found[name])
    return found


def _print(name: str, found: dict[str, Any]) -> None:
    degree = found["links"]["mean_degree"]
    print(f"{name}: mean degree {degree:.1f}, {100 * found['mean_over_budgets']:.2f} % on average")
    for budget, row in found["test"]["budgets"].items():
        low, high = (100 * value for value in row["minus_full_interval"])
        print(
            f"  budget {budget:>8} ({row['modules']:>3} modules): {100 * row['top_1']:.2f} %, "
            f"{100 * row['minus_full']:+.2f} points ({low:+.2f} to {high:+.2f}) to full"
        )


def main() -> None:
    """Train or score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("train", "score"))
    parser.add_argument("--only", nargs="+", help="names of runs to train")
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/digits-sum"))
    parser.add_argument("--sizes", type=Path, default=Path("build/nac_sizes"))
    parser.add_argument("--ship", action="store_true", help=f"copy the shipped one to {SHIPPED}")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    options = runs(given.folder, given.sizes)
    if given.action == "train":
        for name in given.only or options:
            run = options[name]
            if not run.out.exists():
                train("nac", replace(run, resume=run.state_path.exists()))
        if given.ship:
            shutil.copyfile(options["shipped"].out, SHIPPED)
        return
    models = scores(options)
    content = {
        "machine": this_machine().to_dict(),
        "missing": sorted(set(options) - set(models)),
        "models": models,
    }
    write_atomically(given.out, json_bytes(content))


if __name__ == "__main__":
    main()
