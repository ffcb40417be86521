# SPDX-License-Identifier: Apache-2.0
"""Try what the papers claim at a small scale, over seeds, and write the tables of docs/papers.md.

    python benchmarks/claims.py run [nac sot/head ...]   # trains and scores what is missing
    python benchmarks/claims.py page                     # writes the tables

The recipes are data, one file per paper in benchmarks/claims: experiments with their arms, and
claims about them. A run is one arm of an experiment with one seed. It is kept in
results/claims_<paper>.json as soon as it is finished, with a hash of all that decides it: an
interrupted command continues there, and what a recipe changes runs again.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from claim_boxes import answering
from claim_data import made_data
from claim_dino import self_distilled
from claim_heads import read_out
from claim_page import PAGE, filled
from claim_recipes import SEEDS, Experiment, Paper, papers, parse_runs, result_path
from result_file import BUILD, commit_and_date, write_result

from saccade.core.machine import this_machine
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.training.options import TrainOptions
from saccade.models.training.train import train

CHECKPOINTS = BUILD / "claims"
TRAINERS: dict[str, Callable[..., None]] = {"dino": self_distilled, "boxes": answering}


def checkpoint(experiment: Experiment, arm: str, seed: int) -> Path:
    """Return the path of a run's checkpoint, trained if it is missing."""
    out = CHECKPOINTS / f"{arm}-{seed}-{experiment.settings(arm)}.safetensors"
    if not out.exists():
        options = dict(experiment.training(arm))
        if "init" in options:
            start = options["init"]
            own = start in experiment.arms
            options["init"] = checkpoint(experiment, start, seed) if own else Path(start)
        if "data" in options:
            options["data"] = made_data(options["data"])
        if experiment.trainer:
            TRAINERS[experiment.trainer](out, seed=seed, **options)
        else:
            asked = TrainOptions(out, seed=seed, force=True, **options)
            train(experiment.family, asked, progress=None)
    return out


def scores(experiment: Experiment, arm: str, seed: int) -> dict[str, float]:
    """Return the scores of a run, by entry and name."""
    from claim_measures import MEASURES

    path, known = checkpoint(experiment, arm, seed), {}
    for entry, given in experiment.evaluate.items():
        options = {key: tuple(x) if isinstance(x, list) else x for key, x in given.items()}
        if "data" in options:
            options["data"] = made_data(options["data"])
        if "measure" in options:
            found = MEASURES[options.pop("measure")](path, **options)
        else:
            (result,) = evaluate(path, EvaluateOptions(**options), progress=None).results
            found = {score.name: score.value for score in result.scores}
        known |= {f"{entry}: {name}": float(value) for name, value in found.items()}
    path.unlink()
    return known


def run(paper: Paper, name: str, arm: str, seed: int) -> None:
    """Run an arm with a seed, and keep its result."""
    start, busy = time.monotonic(), time.process_time()
    experiment, machine = paper.experiments[name], this_machine()
    with read_out(experiment.arms[arm].get("read_out")):
        found = scores(experiment, arm, seed)
    result = {
        "settings": experiment.settings(arm),
        "scores": found,
        "seconds": time.monotonic() - start,
        "processor_s": time.process_time() - busy,
        "device": machine.device,
        "load_average": machine.load_average,
        **commit_and_date(),
    }
    out, key = result_path(paper.name), f"{name}/{arm}/{seed}"
    paper.runs.update(parse_runs(out))  # another process may have finished some
    paper.runs[key] = result
    runs = dict(sorted(paper.runs.items()))
    write_result(out, {"seeds": SEEDS, "machine": machine.to_dict(), "runs": runs})
    print(f"{paper.name}/{key}: {result['scores']}", flush=True)


def main() -> None:
    """Run what is missing, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="train and score what is missing")
    runs.add_argument("names", nargs="*", help="PAPER[/EXPERIMENT[/ARM]]; default: all papers")
    commands.add_parser("page", help="write the tables of docs/papers.md")
    options = parser.parse_args()
    known = papers()
    if options.command == "page":
        PAGE.write_text(filled(PAGE.read_text(), known))
        return
    for word in options.names or known:
        name, experiment, arm = [*word.split("/"), "", ""][:3]
        for each in [experiment] if experiment else known[name].experiments:
            for missing in known[name].missing(each, arm):
                run(known[name], each, *missing)


if __name__ == "__main__":
    main()
