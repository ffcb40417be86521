# SPDX-License-Identifier: Apache-2.0
"""Add seeds to a comparison of compare.py, without the checkpoints of the first seeds.

    python benchmarks/further_seeds.py sparo 3 4

Trains missing seeds of every arm, scores them on the same test data, and combines their differences
with those in results/compare_<name>.json. All differences and their interval over seeds go to
results/seeds_<name>.json. An interval over samples would need the samples of every seed, which a
results file does not contain.
"""

import argparse
import json
from typing import Any

from compare import COMPARISONS, RESULTS, SEEDS, Comparison, trained
from over_seeds import over_seeds, spoken
from result_file import write_result

from saccade.exporter.evaluation.evaluate import evaluate


def runs_of(name: str, comparison: Comparison, seed: int) -> list[dict[str, Any]]:
    """Return the scores of every arm for one seed."""
    runs = []
    for arm in comparison.arms:
        path = trained(name, arm, seed)
        for options in comparison.evaluations:
            (results,) = evaluate(path, options).results
            runs.append({"arm": arm, "seed": seed, **results.to_dict()})
    return runs


def score_of(runs: list[dict[str, Any]], arm: str, task: str, seed: int) -> float:
    """Return the task's first score in one run."""
    (scores,) = (r for r in runs if (r["arm"], r["task"], r["seed"]) == (arm, task, seed))
    return float(scores["scores"][0]["value"])


def main() -> None:
    """Train, score and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(COMPARISONS))
    parser.add_argument("seeds", type=int, nargs="+")
    options = parser.parse_args()
    if known := sorted(set(options.seeds) & set(SEEDS)):
        parser.error(f"seeds {known} belong to compare.py. Pass other seeds.")
    comparison = COMPARISONS[options.name]
    first = json.loads((RESULTS / f"compare_{options.name}.json").read_bytes())
    runs = [run for seed in options.seeds for run in runs_of(options.name, comparison, seed)]
    data = {(each["task"], each["data_sha256"]) for each in (*first["runs"], *runs)}
    if len(data) != len({task for task, _ in data}):
        raise SystemExit("the first seeds had other test data. Run compare.py again.")
    differences = []
    for difference in first["differences"]:
        better, worse = difference["pair"]
        by_seed = difference["by_seed"] + [
            score_of(runs, better, difference["task"], seed)
            - score_of(runs, worse, difference["task"], seed)
            for seed in options.seeds
        ]
        named = {key: difference[key] for key in ("task", "score", "pair")}
        differences.append(named | {"by_seed": by_seed, "over_seeds": over_seeds(by_seed)})
        print(
            f"{difference['score']}, {better} over {worse}: {spoken(differences[-1]['over_seeds'])}"
        )
    seeds = [*first["seeds"], *options.seeds]
    result = {"comparison": options.name, "seeds": seeds, "runs": runs, "differences": differences}
    write_result(RESULTS / f"seeds_{options.name}.json", result)


if __name__ == "__main__":
    main()
