# SPDX-License-Identifier: Apache-2.0
"""The shipped digits-sum model, made again, and what module dropout is worth.

`train` writes the three checkpoints into --folder: the shipped one of 256 modules, and a pair of
32 modules, the same but for module dropout. `score` reads them from there and scores each budget
on the test split. A pair of 256 modules is not trained: without dropout a step of all 256 costs
ten to thirty times a step of the recipe.
"""

import argparse
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from budget_scores import score_budgets

from saccade.models.checkpoint import load
from saccade.models.train import TrainOptions, train
from saccade.plugins.files import json_bytes, write_atomically
from saccade.serving.machine import this_machine

SHIPPED = Path("models/shipped/digits-sum.safetensors")
BUDGETS = (1.0, 0.5, 0.25, 0.2, 0.125, 0.0625, 0.03125, 0.015625)


def runs(folder: Path) -> dict[str, TrainOptions]:
    """Name to options; one thread, so that the bytes come out the same."""
    shipped = TrainOptions(folder / SHIPPED.name, data="digits-sum", threads=1, force=True)
    pair = replace(shipped, set={"modules": 32}, steps=4_000)
    return {
        "shipped": shipped,
        "pair with module dropout": replace(pair, out=folder / "pair-dropout.safetensors"),
        "pair without module dropout": replace(
            pair,
            out=folder / "pair-plain.safetensors",
            set={"modules": 32, "module_dropout": 1.0},
        ),
    }


def scores(folder: Path) -> dict[str, Any]:
    """Test scores of every checkpoint that is there."""
    found = {}
    for name, options in runs(folder).items():
        if not options.out.exists():
            print(f"{name}: {options.out} is not there, left out")
            continue
        checkpoint = load(options.out)
        result = score_budgets(checkpoint, "digits-sum", BUDGETS)
        found[name] = {"sha256": checkpoint.sha256, "card": checkpoint.card, "test": result}
        print(name)
        for budget, row in result["budgets"].items():
            low, high = (100 * value for value in row["minus_full_interval"])
            print(
                f"  budget {budget:>8} ({row['modules']:>3} modules): {100 * row['top_1']:.2f} %, "
                f"{100 * row['minus_full']:+.2f} points ({low:+.2f} to {high:+.2f}) to full"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("train", "score"))
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/digits-sum"))
    parser.add_argument("--ship", action="store_true", help=f"copy the shipped one to {SHIPPED}")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/digits_sum.json"))
    options = parser.parse_args()
    if options.action == "train":
        for run in runs(options.folder).values():
            train("nac", run)
        if options.ship:
            shutil.copyfile(options.folder / SHIPPED.name, SHIPPED)
        return
    content = {"machine": this_machine().to_dict(), "models": scores(options.folder)}
    write_atomically(options.out, json_bytes(content))


if __name__ == "__main__":
    main()
