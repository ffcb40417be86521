# SPDX-License-Identifier: Apache-2.0
"""Measure what certified chains of variants save, and how often their risk is exceeded.

    python benchmarks/cascade.py
    python benchmarks/cascade.py --checkpoint build/nac_sizes/256-1.safetensors

The shipped digits-sum was trained so that 4 of its 256 modules answer as all of them do: there the
smallest variant alone is the best policy. A circuit without module dropout (nac_sizes.py) loses
with every module that goes, which is what chains are for.

The 5,000 test canvases are split in halves, at random and many times. One half calibrates; the
other, which nothing was chosen on, says what the policy's risk and accuracy are. Beside it the
control: the cheapest chain that does well on the calibration half, with no test.

Speed is measured for the policies of the first split, one thread, in turn with every fixed
budget, on the other half's images.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from digits_folder import CHECKPOINT
from result_file import write_result

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel, subjects_of_folder
from saccade.exporter.exported import ExportOptions, export
from saccade.exporter.policy.answers import Answers, VariantAnswers, answers_of
from saccade.exporter.policy.certify import Certified, certify
from saccade.exporter.policy.chains import Chain, front
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.machine import this_machine
from saccade.model_repository.router.confidence import confidence
from saccade.models.data.datasets import load_data
from saccade.models.scores.intervals import paired_bootstrap, paired_log_ratio

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0625, 0.015625)
RISKS = (0.005, 0.01, 0.02, 0.03)
CONFIDENCE = 0.95
STEPS = 3


@dataclass(frozen=True)
class Population:
    """Every variant on all canvases, cheapest first."""

    models: tuple[EvaluatedModel, ...]
    variants: tuple[VariantAnswers, ...]
    images: np.ndarray
    labels: np.ndarray

    @property
    def full(self) -> str:
        return self.variants[-1].name

    def part(self, rows: np.ndarray) -> list[VariantAnswers]:
        return [replace(one, logits=one.logits[rows]) for one in self.variants]

    def calibrated(self, rows: np.ndarray, seed: int) -> Answers:
        return answers_of(self.part(rows), self.labels[rows], full=self.full, seed=seed)


def population(folder: Path) -> Population:
    """Run every variant on the test split; its time per canvas is that of this very run."""
    there = ArtefactFolder(folder)
    models = subjects_of_folder(there, runtime_named(DEFAULT))
    data = load_data("digits-sum", "test", preprocessing=models[0].images())
    found = []
    for model in models:
        run = model.component("")
        run({"image": data.images[:256]})
        begun = time.perf_counter()
        logits = run({"image": data.images})["logits"]
        seconds = (time.perf_counter() - begun) / len(logits)
        found.append((seconds, model, VariantAnswers(model.name, model.sha256, seconds, logits)))
    found.sort(key=lambda one: one[0])
    return Population(
        tuple(one[1] for one in found), tuple(one[2] for one in found), data.images, data.labels
    )


@dataclass(frozen=True)
class Cascade:
    """A chain as a function of images: those it is sure of leave, the others continue."""

    chain: Chain
    temperatures: tuple[float, ...]

    def ends(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        """The step at which each sample ends, from the logits of all variants."""
        ends = np.full(len(logits[0]), len(self.chain.steps) - 1)
        for at in reversed(range(len(self.chain.thresholds))):
            step = self.chain.steps[at]
            sure = confidence(self.chain.measure, logits[step], self.temperatures[step])
            ends[sure >= self.chain.thresholds[at]] = at
        return ends

    def classes(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        answers = np.stack([logits[step].argmax(-1) for step in self.chain.steps])
        return np.take_along_axis(answers, self.ends(logits)[None], axis=0)[0]

    def run(self, models: Sequence[EvaluatedModel], images: np.ndarray) -> np.ndarray:
        """The class of each image, with no more work than the chain needs."""
        answers, left = np.zeros(len(images), np.int64), np.arange(len(images))
        for at, step in enumerate(self.chain.steps):
            logits = models[step].component("")({"image": images[left]})["logits"]
            answers[left] = logits.argmax(-1)
            if at < len(self.chain.thresholds):
                sure = confidence(self.chain.measure, logits, self.temperatures[step])
                left = left[sure < self.chain.thresholds[at]]
            if not len(left):
                break
        return answers


def guarantees(whole: Population, against: Any, splits: int) -> list[dict[str, Any]]:
    """By risk: how often it was certified, how often the other half exceeded it."""
    rows: dict[float, list[dict[str, float]]] = {risk: [] for risk in RISKS}
    for seed in range(splits):
        order = np.random.default_rng(1_000 + seed).permutation(len(whole.labels))
        mine, other = np.array_split(order, 2)
        answers = whole.calibrated(mine, seed)
        found = certify(answers, RISKS, confidence=CONFIDENCE, against=against, steps=STEPS)
        for one, control in zip(found, untested(answers, against), strict=True):
            if isinstance(one, Certified):
                rows[one.risk].append(
                    met(whole, other, one.chain, answers, against)
                    | {"control": met(whole, other, control, answers, against)["risk"]}
                )
    return [summary(risk, met_rows, splits) for risk, met_rows in rows.items()]


def untested(answers: Answers, against: Any) -> list[Chain]:
    """The cheapest chain that does well enough on the samples that choose, for each risk."""
    every = replace(answers, learn=answers.n)
    table = every.differs if against == "full" else every.lost
    tried = [
        (one.losses(every, table).mean(), one.seconds(every), one)
        for one in front(every, table, STEPS)
    ]
    return [min((o for o in tried if o[0] <= risk), key=lambda o: o[1])[2] for risk in RISKS]


def met(
    whole: Population, rows: np.ndarray, chain: Chain, answers: Answers, against: Any
) -> dict[str, float]:
    """What a chain does on samples that nothing was chosen on."""
    logits = [one.logits[rows] for one in whole.variants]
    cascade, labels = Cascade(chain, answers.temperatures), whole.labels[rows]
    given, full = cascade.classes(logits), logits[-1].argmax(-1)
    risk = (given != full).mean()
    if against == "labels":
        risk = (full == labels).mean() - (given == labels).mean()
    spent = np.cumsum([whole.variants[step].seconds for step in chain.steps])
    return {
        "risk": float(risk),
        "accuracy": float((given == labels).mean()),
        "full_accuracy": float((full == labels).mean()),
        "speed_up": float(whole.variants[-1].seconds / spent[cascade.ends(logits)].mean()),
    }


def summary(risk: float, rows: Sequence[dict[str, float]], splits: int) -> dict[str, Any]:
    """Means over splits, and counts of those beyond the risk."""
    result: dict[str, Any] = {"risk": risk, "splits": splits, "certified": len(rows)}
    if rows:
        result["exceeded"] = sum(row["risk"] > risk for row in rows)
        result["control_exceeded"] = sum(row["control"] > risk for row in rows)
        for name in ("risk", "accuracy", "full_accuracy", "speed_up"):
            result[f"mean_{name}"] = float(np.mean([row[name] for row in rows]))
        result["speed_up_range"] = [
            min(row["speed_up"] for row in rows), max(row["speed_up"] for row in rows)
        ]  # fmt: skip
    return result


def speeds(whole: Population, against: Any, rounds: int) -> list[dict[str, Any]]:
    """Images per second of the first split's policies, over those of each fixed budget."""
    order = np.random.default_rng(1_000).permutation(len(whole.labels))
    mine, other = np.array_split(order, 2)
    answers = whole.calibrated(mine, 0)
    images, labels = whole.images[other], whole.labels[other]
    calls: dict[str, Callable[[], np.ndarray]] = {
        model.name: lambda model=model: model.component("")({"image": images})["logits"].argmax(-1)
        for model in whole.models
    }
    found = certify(answers, RISKS, confidence=CONFIDENCE, against=against, steps=STEPS)
    chains = {f"{one.risk:g}": one.chain for one in found if isinstance(one, Certified)}
    for name, chain in chains.items():
        cascade = Cascade(chain, answers.temperatures)
        calls[name] = lambda cascade=cascade: cascade.run(whole.models, images)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    right: dict[str, np.ndarray] = {}
    for turn in range(rounds + 1):  # the first one warms up
        for name, call in calls.items():
            begun = time.perf_counter()
            given = call()
            if turn:
                taken[name].append(time.perf_counter() - begun)
            right[name] = (given == labels).astype(np.float64)
    full = whole.full
    return [
        {
            "name": name,
            "chain": [whole.variants[step].name for step in chains[name].steps]
            if name in chains
            else [name],
            "images_per_second": len(images) * len(seconds) / sum(seconds),
            "over_full": times(taken[full], seconds),
            "accuracy": float(right[name].mean()),
            "accuracy_minus_full": paired_bootstrap(right[name], right[full], 0),
        }
        for name, seconds in taken.items()
    ]


def times(slow: Sequence[float], fast: Sequence[float]) -> dict[str, Any]:
    """How many times as fast, with its paired interval over the rounds."""
    low, high = paired_log_ratio(slow, fast)
    middle = float(np.exp(np.mean(np.log(np.array(slow) / np.array(fast)))))
    return {"times": middle, "interval": [float(np.exp(low)), float(np.exp(high))]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--splits", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "benchmarks")
    parser.add_argument("--out", type=Path, help="results/cascade.json, or cascade_STEM.json")
    options = parser.parse_args()
    stem = options.checkpoint.stem
    folder = options.build / f"cascade-{stem}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        export(options.checkpoint, ExportOptions(folder, name="nac", budget=BUDGETS))
    whole = population(folder)
    result: dict[str, Any] = {
        "machine": this_machine().to_dict(),
        "checkpoint": stem,
        "confidence": CONFIDENCE,
    }
    for against in ("full", "labels"):
        result[against] = {
            "guarantees": guarantees(whole, against, options.splits),
            "speeds": speeds(whole, against, options.rounds),
        }
        for row in (*result[against]["guarantees"], *result[against]["speeds"]):
            print(against, row, flush=True)
    name = "cascade" if options.checkpoint == CHECKPOINT else f"cascade_{stem}"
    write_result(options.out or ROOT / "benchmarks" / "results" / f"{name}.json", result)


if __name__ == "__main__":
    main()
