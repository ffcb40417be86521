# SPDX-License-Identifier: Apache-2.0
"""Measure the value of the graph alone: drop modules after training, by the size of the circuit.

    python benchmarks/nac_sizes.py             # trains what is missing, scores, writes, draws
    python benchmarks/nac_sizes.py --score     # does not train

This is figure 5 of the NAC paper with 32 to 256 modules of the same mean degree, scale-free,
without module dropout, with and without auxiliary heads on every module. Modules are dropped by
degree and, as controls, at random and in reversed order. The smallest circuits come first, so that
an interrupted run has some results. Checkpoints and scores go to build/nac_sizes, and runs are
resumed. A run of the same recipe in the results file is not trained again.
"""

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from nac_curves import ORDERS, curves_of, dropped, links_of
from nac_sizes_picture import draw
from result_file import write_result
from trained_once import trained_once

from saccade.core.files import json_bytes, write_atomically
from saccade.core.machine import this_machine
from saccade.models.checkpoint import load
from saccade.models.data.datasets import Dataset, load_data
from saccade.models.training.train import TrainOptions

SEEDS = (0, 1)
STEPS, BATCH, MEAN_DEGREE = 2_000, 32, 12.0
# A quarter of a digit per token, after convolutions: the read-in has to combine the parts.
TOKENS = {"patch_px": 6, "tokenizer": "conv"}
LOST_POINTS, LEARNED = 3.0, 0.2
TEST_CANVASES = 1_000
DATA = f"digits-sum, the first {TEST_CANVASES} canvases of the test split"
GRID, CONTROLS = 32, 8  # modules are kept in steps of U / 32 by degree, U / 8 in other orders
PAPER = {"modules": 320, "dropped": 0.8}  # "more than 80 %", on Tiny-ImageNet
_ROOT = Path(__file__).resolve().parent


class Arm(NamedTuple):
    """One size of a circuit, with or without auxiliary heads."""

    modules: int
    heads: bool

    @property
    def name(self) -> str:
        """The name in the result."""
        return f"{self.modules} modules" + ("" if self.heads else ", no auxiliary heads")


ARMS = (
    *(Arm(modules, heads=True) for modules in (32, 64, 128)),
    *(Arm(modules, heads=False) for modules in (32, 64, 128)),
    Arm(256, heads=True),
)


def options_of(folder: Path, arm: Arm, seed: int, steps: int) -> TrainOptions:
    """Return the options of one training run."""
    without = {} if arm.heads else {"counts_weight": 0}
    return TrainOptions(
        folder / f"{arm.modules}{'' if arm.heads else '-no-heads'}-{seed}.safetensors",
        data="digits-sum",
        set={
            "modules": arm.modules,
            "module_dropout": 1.0,
            "graph_degree": MEAN_DEGREE,
            **TOKENS,
            **without,
        },
        steps=steps,
        batch=BATCH,
        precision="bf16",
        seed=seed,
    )


def run_of(options: TrainOptions, test: Dataset, *, training: bool) -> dict[str, Any]:
    """Return the scores of one run, computed if missing; empty if nothing was trained."""
    if training:
        trained_once("nac", options)
    if not options.out.exists():
        return {}
    kept, checkpoint = options.out.with_suffix(".json"), load(options.out)
    if kept.exists():
        run: dict[str, Any] = json.loads(kept.read_bytes())
        if (run["sha256"], run["n"]) == (checkpoint.sha256, len(test.labels)):
            return run
    model = checkpoint.build()
    modules = model.config.modules
    run = {
        "seed": options.seed,
        "sha256": checkpoint.sha256,
        "card": checkpoint.card,
        "n": len(test.labels),
        "links": links_of(model),
        **curves_of(
            model,
            test,
            grid=[modules * index // GRID for index in range(GRID, 0, -1)],
            controls=[modules * index // CONTROLS for index in range(CONTROLS, 0, -1)],
        ),
    }
    write_atomically(kept, json_bytes(run))
    print(f"{time.strftime('%H:%M:%S')} {options.out.stem}: {run['degree']}", flush=True)
    return run


def known_runs(out: Path, steps: int) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the runs of this recipe in the results file, by arm and seed."""
    if not out.exists():
        return {}
    result = json.loads(out.read_bytes())
    if result["data"] != DATA or [result[key] for key in ("steps", "batch", "tokens")] != [
        steps,
        BATCH,
        TOKENS,
    ]:
        return {}
    return {(name, run["seed"]): run for name, runs in result["runs"].items() for run in runs}


def summary(arm: Arm, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the existing seeds: scores, links, and the modules dropped at 3 points."""
    shares = {
        order: [dropped(run[order], arm.modules, LOST_POINTS) for run in runs] for order in ORDERS
    }
    full = [run["degree"][str(arm.modules)] for run in runs]
    half = str(arm.modules // 2)
    lost = {
        order: [run[order][str(arm.modules)] - run[order][half] for run in runs] for order in ORDERS
    }
    return {
        "modules": arm.modules,
        "auxiliary_heads": arm.heads,
        "seeds": [run["seed"] for run in runs],
        "mean_degree": [run["links"]["mean_degree"] for run in runs],
        "full": full,
        "learned": min(full) > LEARNED,  # at chance level there is nothing to lose
        "dropped_at_3_points": shares,
        "lost_with_half": lost,
    }


def result_of(
    runs: dict[Arm, list[dict[str, Any]]], seeds: list[int], steps: int
) -> dict[str, Any]:
    """Return all results of the existing runs, and which runs are missing."""
    return {
        "machine": this_machine().to_dict(),
        "data": DATA,
        "steps": steps,
        "batch": BATCH,
        "tokens": TOKENS,
        "lost_points": LOST_POINTS,
        "paper": PAPER,
        "missing_seeds": {
            arm.name: absent
            for arm, known in runs.items()
            if (absent := sorted(set(seeds) - {run["seed"] for run in known}))
        },
        "arms": {arm.name: summary(arm, known) for arm, known in runs.items() if known},
        "runs": {arm.name: known for arm, known in runs.items() if known},
    }


def main() -> None:
    """Run arm by arm, the smallest circuits first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--score", action="store_true", help="do not train")
    parser.add_argument("--modules", type=int, nargs="+", help="train and score only these sizes")
    parser.add_argument("--folder", type=Path, default=Path("build/nac_sizes"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a training run")
    parser.add_argument("--out", type=Path, default=_ROOT / "results" / "nac_sizes.json")
    parser.add_argument("--picture", type=Path, default=_ROOT.parent / "docs" / "nac_sizes.png")
    given = parser.parse_args()
    torch.set_num_threads(1)
    test = load_data("digits-sum", "test")
    test = replace(test, images=test.images[:TEST_CANVASES], labels=test.labels[:TEST_CANVASES])
    kept = known_runs(given.out, given.steps)
    runs: dict[Arm, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for arm, arm_runs in runs.items():
        wanted = not given.modules or arm.modules in given.modules
        for seed in given.seeds:
            options = options_of(given.folder, arm, seed, given.steps)
            known = None if options.out.exists() else kept.get((arm.name, seed))
            if run := known or run_of(options, test, training=wanted and not given.score):
                arm_runs.append(run)
    result = result_of(runs, given.seeds, given.steps)
    write_result(given.out, result)
    draw(json.loads(given.out.read_bytes()), given.picture)
    for name, arm_runs in result["arms"].items():
        print(f"{name}: {arm_runs['full']} in full, dropped {arm_runs['dropped_at_3_points']}")


if __name__ == "__main__":
    main()
