# SPDX-License-Identifier: Apache-2.0
"""Compare models of one recipe that differ in one thing: three seeds each, intervals over seeds.

    python benchmarks/compare.py vqa                # trains what is missing, then scores
    python benchmarks/compare.py vqa --score        # scores what is there

Checkpoints go to build/compare and the figures to results/compare_<name>.json. A test sample's
value is its mean over an arm's seeds; the difference of two arms is paired by sample. `over_seeds`
is the t interval of the seeds' differences. It tells whether a recipe is better, while the interval
over samples is about these particular checkpoints.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from result_file import RESULTS, write_result
from scipy import stats

from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.checkpoint import load
from saccade.models.scores.results import paired_bootstrap
from saccade.models.training.options import TrainOptions
from saccade.models.training.train import train

SEEDS = (0, 1, 2)
CHECKPOINTS = Path("build/compare")


@dataclass(frozen=True)
class Comparison:
    """The arms of one recipe, and the pairs to compare."""

    family: str
    arms: dict[str, dict[str, Any]]  # the --set options of each
    pairs: tuple[tuple[str, str], ...]  # differences are first minus second
    evaluations: tuple[EvaluateOptions, ...]
    training: dict[str, Any] = field(default_factory=dict)  # other fields of TrainOptions
    transfer: tuple[str, str] | None = None  # data as in training, and other data


COMPARISONS = {
    "sparo": Comparison(
        "sparo",
        {kind: {"pooling": kind} for kind in ("sparo", "cls", "gap")},
        (("sparo", "cls"), ("sparo", "gap")),
        tuple(
            EvaluateOptions(data="shapes", task=task)
            for task in ("zero-shot", "retrieval", "hard-negatives")
        ),
    ),
    "sot": Comparison(
        "sot",
        {"sum": {"fusion": "sum"}, "class": {"fusion": "class"}},
        (("sum", "class"),),
        (EvaluateOptions(data="shapes", task="top1"),),
        {"data": "shapes"},
    ),
    "vqa": Comparison(
        "vqa",
        {kind: {"attention": kind} for kind in ("softmax", "sparsemax", "tvmax")},
        (("sparsemax", "softmax"), ("tvmax", "softmax")),
        (EvaluateOptions(data="shapes", task="vqa"),),
    ),
    "slots-left": Comparison(
        "slot-attention",
        {kind: {"attention": kind, "positions": "left"} for kind in ("t-sa", "sa")},
        (("t-sa", "sa"),),
        # Pieces at positions as in training, and anywhere: does the model generalize?
        tuple(
            EvaluateOptions(data="tetrominoes", task="ari", positions=positions)
            for positions in ("left", "anywhere")
        ),
        {"data": "tetrominoes", "steps": 1_500, "batch": 16},
        ("tetrominoes (left)", "tetrominoes"),
    ),
    "captioner": Comparison(
        "captioner",
        {kind: {"attention": kind} for kind in ("softmax", "sparsemax", "tvmax")},
        (("sparsemax", "softmax"), ("tvmax", "softmax")),
        (EvaluateOptions(data="shapes", task="caption"),),
    ),
    "listops": Comparison(
        "nac", {"nac": {}}, (), (EvaluateOptions(task="top1"),), {"data": "listops"}
    ),
    "slots": Comparison(
        "slot-attention",
        {"t-sa": {}},
        (),
        (EvaluateOptions(data="tetrominoes", task="ari"),),
        {"data": "tetrominoes", "recipe": "shipped"},
    ),
}


def trained(name: str, arm: str, seed: int) -> None:
    """Train the checkpoint of one run if it is missing; resume an interrupted run."""
    comparison = COMPARISONS[name]
    out = CHECKPOINTS / name / f"{arm}-{seed}.safetensors"
    options = TrainOptions(out, set=comparison.arms[arm], seed=seed, **comparison.training)
    if not out.exists():
        print(f"train {out.stem}", flush=True)
        train(comparison.family, replace(options, resume=options.state_path.exists()))


def scored(name: str) -> dict[str, Any]:
    """Return the scores of every run of seeds with all arms, and the differences of the pairs."""
    comparison = COMPARISONS[name]
    seeds = [
        seed
        for seed in SEEDS
        if all(
            (CHECKPOINTS / name / f"{arm}-{seed}.safetensors").exists() for arm in comparison.arms
        )
    ]
    if not seeds:
        raise SystemExit(f"{CHECKPOINTS / name}: no seed has all arms. Leave --score out.")
    runs: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for options in comparison.evaluations:
        samples: dict[str, list[np.ndarray]] = {}
        for arm in comparison.arms:
            for seed in seeds:
                path = CHECKPOINTS / name / f"{arm}-{seed}.safetensors"
                (results,) = evaluate(path, options).results
                samples.setdefault(arm, []).append(results.samples)
                known = {"arm": arm, "seed": seed, "validation": load(path).card["validation"]}
                runs.append(known | results.to_dict())
        for better, worse in comparison.pairs:
            differences.append(
                {"task": results.task, "data": results.data, "score": results.scores[0].name}
                | {"pair": [better, worse]}
                | paired_difference(samples[better], samples[worse])
            )
    result = {"comparison": name, "seeds": seeds, "table": table(runs)}
    return result | {"runs": runs, "differences": differences}


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every score of every arm: its mean over the seeds and the value of each seed."""
    values: dict[tuple[str, ...], list[float]] = {}
    for run in runs:
        for score in run["scores"]:
            row = (run["arm"], run["task"], run["data"], score["name"])
            values.setdefault(row, []).append(score["value"])
    names = ("arm", "task", "data", "score")
    return [
        dict(zip(names, row, strict=True)) | {"mean": float(np.mean(seeds)), "by_seed": seeds}
        for row, seeds in values.items()
    ]


def paired_difference(first: list[np.ndarray], second: list[np.ndarray]) -> dict[str, Any]:
    """Return first minus second, with a 95 % interval over samples and the difference per seed.

    Shapes: one [n] per seed, the same samples in the same order.
    """
    a, b = np.mean(first, 0), np.mean(second, 0)
    by_seed = [float(x.mean() - y.mean()) for x, y in zip(first, second, strict=True)]
    return {
        "difference": float(a.mean() - b.mean()),
        "interval": list(paired_bootstrap(a, b)),
        "by_seed": by_seed,
        "over_seeds": over_seeds(by_seed),
        "samples": len(a),
    }


def over_seeds(values: Sequence[float]) -> dict[str, Any] | None:
    """Return the mean of one value per seed, its t interval, and whether that excludes 0.

    None for a single seed.
    """
    if len(values) < 2:
        return None
    mean = float(np.mean(values))
    half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return {
        "seeds": len(values),
        "mean": mean,
        "half_width": half,
        "interval": [mean - half, mean + half],
        "shown": abs(mean) > half,
    }


def spoken(result: dict[str, Any] | None) -> str:
    """Return the interval as text, in the unit of the score, with a verdict."""
    if result is None:
        return "one seed, no interval"
    verdict = "shown" if result["shown"] else "not shown"
    return (
        f"{result['mean']:+.3f} +- {result['half_width']:.3f} over {result['seeds']} seeds: "
        f"{verdict}"
    )


def every_score(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the differences of every score of the table, over seeds; none for a single seed."""
    rows = {
        (row["arm"], row["task"], row["data"], row["score"]): row["by_seed"]
        for row in result.get("table", ())
    }
    scores = []
    for first, second in COMPARISONS[result["comparison"]].pairs:
        for (arm, *named), values in rows.items():
            if arm == first and len(values) > 1:
                differences = np.subtract(values, rows[(second, *named)])
                row = dict(zip(("task", "data", "score"), named, strict=True))
                scores.append(
                    row | {"pair": [first, second], "over_seeds": over_seeds(differences)}
                )
    return scores


def transfer(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return how each score changes from data as in training to other data, over seeds.

    First minus second of each pair: faster learning does not imply better transfer.
    """
    comparison = COMPARISONS[result["comparison"]]
    if comparison.transfer is None:
        return []
    near, far = comparison.transfer
    rows = {(row["arm"], row["data"], row["score"]): row["by_seed"] for row in result["table"]}
    transferred = []
    for first, second in comparison.pairs:
        for score in dict.fromkeys(row["score"] for row in result["table"]):
            one, other = (
                np.subtract(rows[arm, far, score], rows[arm, near, score])
                for arm in (first, second)
            )
            if len(one) > 1:
                transferred.append(
                    {"pair": [first, second], "score": score, "from": near, "to": far}
                    | {"changes": {first: one.tolist(), second: other.tolist()}}
                    | {"over_seeds": over_seeds(one - other)}
                )
    return transferred


def main() -> None:
    """Train and score one comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(COMPARISONS))
    parser.add_argument("--score", action="store_true", help="do not train")
    options = parser.parse_args()
    out = RESULTS / f"compare_{options.name}.json"
    if not options.score:
        for arm, seed in product(COMPARISONS[options.name].arms, SEEDS):
            trained(options.name, arm, seed)
    report(scored(options.name), out)


def report(result: dict[str, Any], out: Path) -> None:
    """Write the result and print each difference."""
    derived = {"every_score": every_score(result), "transfer": transfer(result)}
    write_result(out, result | {name: figures for name, figures in derived.items() if figures})
    for each in derived["every_score"] or result["differences"]:
        first, second = each["pair"]
        over = spoken(each["over_seeds"])
        print(f"{each['score']} on {each['data']}, {first} over {second}: {over}")
    for each in derived["transfer"]:
        first, second = each["pair"]
        over = spoken(each["over_seeds"])
        print(f"Change of {each['score']} to {each['to']}, {first} minus that of {second}: {over}")


if __name__ == "__main__":
    main()
