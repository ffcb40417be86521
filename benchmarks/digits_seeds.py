# SPDX-License-Identifier: Apache-2.0
"""Train the small digits model with three seeds: mean and spread of test scores by budget."""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from budget_scores import score_budgets

from saccade.core.files import json_bytes, write_atomically
from saccade.core.machine import this_machine
from saccade.models.training.train import TrainOptions, train

BUDGETS = (1.0, 0.5, 0.25, 0.2, 0.125)


def run_of(seed: int, threads: int) -> dict[str, Any]:
    """Train once with the command's defaults and score on the test split."""
    with tempfile.TemporaryDirectory() as folder:
        begin, cpu = time.monotonic(), time.process_time()
        options = TrainOptions(Path(folder) / "digits.safetensors", seed=seed, threads=threads)
        checkpoint = train("nac", options)
        return {
            "seed": seed,
            "training_s": time.monotonic() - begin,
            "training_processor_s": time.process_time() - cpu,
            "card": checkpoint.card,
            "test": score_budgets(checkpoint, "digits", BUDGETS),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/digits_seeds.json"))
    options = parser.parse_args()
    runs = [run_of(seed, options.threads) for seed in options.seeds]
    summary = {}
    for budget in (f"{value:g}" for value in BUDGETS):
        scores = [run["test"]["budgets"][budget]["top_1"] for run in runs]
        summary[budget] = {
            "mean": statistics.fmean(scores),
            "least": min(scores),
            "most": max(scores),
            "standard_deviation": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        }
        print(f"budget {budget:>6}: mean {100 * summary[budget]['mean']:.2f} %, {scores}")
    content = {"machine": this_machine().to_dict(), "summary": summary, "runs": runs}
    write_atomically(options.out, json_bytes(content))


if __name__ == "__main__":
    main()
