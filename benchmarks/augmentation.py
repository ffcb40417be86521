# SPDX-License-Identifier: Apache-2.0
"""Measure what augmentation and other regularization do on few labeled digits.

    OMP_NUM_THREADS=1 python benchmarks/augmentation.py [--seeds 5 --shots 10 --steps 200]

For each seed, a few digits of each class are drawn from the training split. A small ViT is trained
on them once per row of RUNS, with the same initial weights, and scored on the test split of
digits. A row's result is its difference from training without any of it, per seed, with the 95 % t
interval over the seeds. It goes to results/augmentation.json.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from over_seeds import over_seeds, spoken
from result_file import write_result

from saccade.core.machine import this_machine
from saccade.models.data.datasets import load_data
from saccade.models.sot.training import score
from saccade.models.training.train import TrainOptions, train

# The class token's head alone: the decomposition in exact svPN would take most of the time.
SIZES = {"dim": 32, "layers": 2, "heads": 2, "mlp_dim": 64, "fusion": "class"}
PLAIN: dict[str, Any] = {"augment": ("none",)}
# The last row is the recipe of SoT's table S-2, with the family's small shifts instead of crops
# and flips, which change what a digit is.
RUNS: dict[str, dict[str, Any]] = {
    "none": PLAIN,
    "affine (default)": {},
    "erasing": {"augment": ("erasing",)},
    "mixup": PLAIN | {"mixup": 0.8},
    "cutmix": PLAIN | {"cutmix": 1.0},
    "recipe of SoT": {
        "augment": ("affine", "randaugment", "erasing"),
        "mixup": 0.8,
        "cutmix": 1.0,
        "label_smoothing": 0.1,
        "weight_decay": 0.03,
    },
}
RESULT = Path(__file__).parent / "results" / "augmentation.json"


def few_digits(folder: Path, seed: int, shots: int) -> Path:
    """Write an .npz of `shots` training digits of each class, with the whole validation split."""
    training, held_out = load_data("digits", "train"), load_data("digits", "validation")
    rng = np.random.default_rng(seed)
    chosen = [
        rng.permutation(np.flatnonzero(training.labels == label))[:shots] for label in range(10)
    ]
    rows = np.concatenate(chosen)
    path = folder / f"digits-{seed}.npz"
    arrays = {"train": (training, rows), "val": (held_out, np.arange(len(held_out.labels)))}
    arrays["test"] = arrays["val"]
    np.savez(
        path,
        **{f"{part}_images": data.images[own] for part, (data, own) in arrays.items()},
        **{f"{part}_labels": data.labels[own] for part, (data, own) in arrays.items()},
    )
    return path


def main() -> None:
    """Train every row for every seed, one after the other, and write the differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--shots", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    test = load_data("digits", "test")
    scores: dict[str, list[float]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.seeds):
            data = few_digits(Path(folder), seed, given.shots)
            for name, options in RUNS.items():
                run = TrainOptions(
                    Path(folder) / "sot.safetensors",
                    data=str(data),
                    set=SIZES,
                    steps=given.steps,
                    seed=seed,
                    force=True,
                    **options,
                )
                model: Any = train("sot", run, progress=None).build()
                samples = {"image": test.images, "labels": test.labels}
                top1 = score(model, samples, model.budgets()[:1])
                scores[name].append(100 * top1["exact"])
                print(f"seed {seed}, {name}: {scores[name][-1]:.1f} %", flush=True)
            if seed:
                write_result(given.out, result_of(scores, given))


def result_of(scores: dict[str, list[float]], given: argparse.Namespace) -> dict[str, Any]:
    """Return the scores of the seeds so far, and the differences from the first row."""
    plain = np.array(scores["none"])
    differences = {
        name: over_seeds((np.array(values) - plain).tolist())
        for name, values in scores.items()
        if name != "none"
    }
    for name, difference in differences.items():
        print(f"{name}: {spoken(difference)}", flush=True)
    return {
        "machine": this_machine().to_dict(),
        "shots": given.shots,
        "steps": given.steps,
        "configuration": SIZES,
        "top1_percent": scores,
        "points_over_none": differences,
    }


if __name__ == "__main__":
    main()
