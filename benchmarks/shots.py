# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a NAC on few samples per class, against training it from random weights.

    python benchmarks/shots.py             # runs what is missing, writes, draws
    python benchmarks/shots.py --only 4    # only with 4 samples per class, in a separate process

Runs are kept in build/shots, so several processes can share them.

This follows figure 4 of the NAC paper as far as its text goes: eight classes, 1 to 16 samples of
each, fine-tuning of all parameters. The pretrained circuit is the shipped digits-sum, which knows
sums of four small digits. The new task is to tell single digits, 0 to 7, drawn three times as
large. Their images are of the splits that the shipped circuit was not trained on. There is no
pretrained Perceiver IO here, so the baseline is the same circuit with random weights. No run looks
at more labels: each has the same number of steps, and the weights of the last step are scored.
"""

import argparse
import json
import math
import os
import statistics
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from result_file import write_result

from saccade.core.files import json_bytes, write_atomically
from saccade.core.machine import this_machine
from saccade.models.checkpoint import load
from saccade.models.data.datasets import load_data
from saccade.models.data.digits import digits
from saccade.models.nac.training import task as nac_task
from saccade.models.nac.training.circuit_task import score
from saccade.models.training.loop import fit
from saccade.models.training.options import TrainOptions
from saccade.models.training.start import load_start, started

SHOTS, SEEDS, CLASSES = (1, 2, 4, 8, 16), (0, 1, 2, 3, 4), 8
STEPS, WARM_UP = 60, 10
RATES = (3e-3, 3e-4)  # the family's own, and one for weights that are already good
TIMES = 3  # as large: 24 px, the side of the shipped circuit's images
POOL = max(SHOTS) + 4  # training samples per class to draw from
SHIPPED = "shipped:digits-sum"
ARMS = ("fine-tuned", "random weights")
# Fields that the data decides.
_OF_DATA = ("height_px", "width_px", "channels", "mean", "std", "classes", "input", "seed")
_T4 = 2.776  # 97.5 % quantile of Student's t with four degrees of freedom
_ROOT = Path(__file__).resolve().parent
BUILD = _ROOT.parent / "build" / "shots"
RESULT, PICTURE = _ROOT / "results" / "shots.json", _ROOT.parent / "docs" / "shots.png"


def write_data(path: Path) -> None:
    """Write the new task with its splits: images [n 24 24 1] uint8, labels [n]."""
    parts = [digits(split)[:2] for split in ("validation", "test")]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    images = images.repeat(TIMES, 1).repeat(TIMES, 2)
    rng = np.random.default_rng(0)
    rows: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for index in range(CLASSES):
        mine = rng.permutation(np.flatnonzero(labels == index)).tolist()
        rows["train"] += mine[:POOL]
        rows["val"] += mine[POOL : POOL + 1]  # needed by the format; chooses nothing here
        rows["test"] += mine[POOL + 1 :]
    arrays = {"images": images, "labels": labels}
    np.savez(
        path,
        **{f"{split}_{name}": a[rows[split]] for split in rows for name, a in arrays.items()},
    )


def run_of(data: Path, arm: str, rate: float, shots: int, seed: int) -> dict[str, Any]:
    """Train once; return the score of the last weights on the test split."""
    options = TrainOptions(
        data.with_name("run.safetensors"),
        data=str(data),
        shots=shots,
        seed=seed,
        steps=STEPS,
        learning_rate=rate,
    )
    if arm == "fine-tuned":
        options = replace(options, init=Path(SHIPPED))
    else:
        config = load(SHIPPED).config
        options = replace(options, set={k: v for k, v in config.items() if k not in _OF_DATA})
    begin = time.process_time()
    torch.manual_seed(seed)
    options = started("nac", options)
    task = nac_task(options)
    load_start(task, options)
    task.recipe = replace(task.recipe, validate_every=STEPS, warm_up_steps=WARM_UP)
    fitted = fit(task, options)
    model = task.model
    model.load_state_dict(fitted.last_weights)
    model.rank_modules()
    test = load_data(str(data), "test")
    top_1 = score(model, (test.images,), test.labels, (1.0,), at_once=100)["1"]
    return {
        "arm": arm, "learning_rate": rate, "shots": shots, "seed": seed, "top_1": top_1,
        "processor_s": round(time.process_time() - begin, 1),
        "loss": fitted.log.rows[-1]["loss"],
    }  # fmt: skip


def interval(values: list[float]) -> dict[str, float]:
    """Return mean and 95 % interval over the seeds, from Student's t."""
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    half = _T4 * spread / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def summary_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the intervals of each arm, rate and shot, and of paired differences.

    A difference is that from random weights at the same rate.
    """
    fields = ("arm", "learning_rate", "shots", "seed")
    scores = {tuple(run[field] for field in fields): run["top_1"] for run in runs}
    found = []
    for arm, rate, shots in product(ARMS, RATES, SHOTS):
        mine, base = (
            [scores[which, rate, shots, seed] for seed in SEEDS] for which in (arm, ARMS[1])
        )
        entry = {"arm": arm, "learning_rate": rate, "shots": shots, "top_1": interval(mine)}
        if arm != ARMS[1]:
            differences = [one - other for one, other in zip(mine, base, strict=True)]
            entry["over_random_weights"] = interval(differences)
        found.append(entry)
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw top-1 by samples per class, a line for each arm and rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles = product(("#0b6e99", "#8a8f98"), ("o-", "s--"))
    for (arm, rate), (color, style) in zip(product(ARMS, RATES), styles, strict=True):
        points = [
            entry["top_1"]
            for entry in result["summary"]
            if (entry["arm"], entry["learning_rate"]) == (arm, rate)
        ]
        label = f"{arm}, learning rate {rate:g}"
        axes.plot(SHOTS, [100 * one["mean"] for one in points], style, color=color, label=label)
        low, high = ([100 * one[end] for one in points] for end in ("low", "high"))
        axes.fill_between(SHOTS, low, high, color=color, alpha=0.12, linewidth=0)
    axes.axhline(100 / CLASSES, color="#c2571a", linestyle=":", linewidth=1, label="chance")
    axes.set_xscale("log", base=2)
    axes.set_xticks(SHOTS, [str(n) for n in SHOTS])
    axes.set_xlabel("training samples per class")
    axes.set_ylabel("top-1 on the test split (%)")
    axes.set_ylim(0, 100)
    axes.grid(color="#e3e6ea")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    figure.suptitle("A NAC on few samples of a new task", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="*", default=[], help="samples per class")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = BUILD / "digits-large.npz"
    if not data.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        write_data(data)
    for seed, shots, rate, arm in product(SEEDS, given.only or SHOTS, RATES, ARMS):
        kept = BUILD / f"{arm.replace(' ', '-')}-{rate:g}-{shots}-{seed}.json"
        if not kept.exists():
            write_atomically(kept, json_bytes(run_of(data, arm, rate, shots, seed)))
            print(kept.read_text(), flush=True)
    if given.only:
        return
    runs = [json.loads(path.read_bytes()) for path in sorted(BUILD.glob("*.json"))]
    result = {
        "command": "python benchmarks/shots.py",
        "machine": this_machine().to_dict(),
        "protocol": {
            "pretrained": SHIPPED, "data": "scikit-learn's digits 0 to 7, three times as large, of "
            "the splits that the pretrained circuit was not trained on",
            "test_samples": len(load_data(str(data), "test").labels), "classes": CLASSES,
            "steps": STEPS, "warm_up_steps": WARM_UP, "learning_rates": RATES,
            "weights": "of the last step",
        },
        "summary": summary_of(runs),
        "runs": runs,
    }  # fmt: skip
    write_result(given.out, result)
    draw(result, PICTURE)


if __name__ == "__main__":
    main()
