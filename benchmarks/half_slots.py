# SPDX-License-Identifier: Apache-2.0
"""Check whether half of the slots, chosen on validation data, rejects false sentences better.

    python benchmarks/half_slots.py          # first: python benchmarks/compare.py sparo

Each of the three SPARO models of `compare.py` is scored on hard negatives of the test scenes, with
all slots and with the half that `saccade select` ranks first. It ranks slots by zero-shot accuracy,
by how often they tell a true sentence from a false one, and by masks trained on false sentences.
The figures go to results/half_slots.json.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from compare import CHECKPOINTS, RESULTS, SEEDS, paired_difference
from result_file import write_result

from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.models.checkpoint import load
from saccade.models.sparo.select import SelectOptions, select, selected_checkpoint

WAYS: dict[str, dict[str, Any]] = {
    "accuracy": {},
    "negatives": {"by": "negatives"},
    "slot masks": {"masks": "slot"},
    "dimension masks": {"masks": "dimension"},
}


def samples(path: Path, budget: float) -> np.ndarray:
    """Return True for each image that is closer to its true sentence than to the false one."""
    options = EvaluateOptions(data="shapes", task="hard-negatives", budget=(budget,))
    (results,) = evaluate(path, options).results
    return results.samples


def main() -> None:
    """Select, score and write."""
    whole: list[np.ndarray] = []
    halves: dict[str, list[np.ndarray]] = {way: [] for way in WAYS}
    for seed in SEEDS:
        path = CHECKPOINTS / "sparo" / f"sparo-{seed}.safetensors"
        whole.append(samples(path, 1))
        with tempfile.TemporaryDirectory() as folder:
            for way, given in WAYS.items():
                slots = Path(folder) / f"{way}.json"
                select(path, SelectOptions(out=slots, **given))
                chosen = selected_checkpoint(load(path), slots, Path(folder) / "half.safetensors")
                halves[way].append(samples(chosen.path, 0.5))
    rows = {way: paired_difference(halve, whole) for way, halve in halves.items()}
    result = {"all slots": float(np.mean(whole)), "half of them": rows}
    print(json.dumps(result, indent=1))
    write_result(RESULTS / "half_slots.json", result)


if __name__ == "__main__":
    main()
