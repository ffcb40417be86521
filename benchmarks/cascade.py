# SPDX-License-Identifier: Apache-2.0
r"""Measure what certified chains of variants save, and how often their risk is exceeded.

    python benchmarks/cascade.py
    git show c5d82ef:models/shipped/digits-sum.safetensors > build/first-digits-sum.safetensors
    python benchmarks/cascade.py --checkpoint build/first-digits-sum.safetensors
    python benchmarks/cascade.py --checkpoint build/first-digits-sum.safetensors \
        --choose-split validation

The shipped digits-sum was trained so that 4 of its 256 modules answer as all of them do: there the
smallest variant alone is the best policy. The one that was shipped first loses when modules go,
which is what chains are for, and its full model is 60 times as expensive as 4 modules.

The 5,000 test canvases are split in halves, at random and many times. One half calibrates; the
other, which nothing was chosen on, says what the policy's risk and accuracy are. Beside it the
control: the cheapest chain that does well on the calibration half, with no test. Of that half, two
fifths choose the chains and the rest certifies; with --choose-split another split chooses, as with
`saccade calibrate --choose-split`, and all of the half certifies.

Speed is measured for the policies of the first splits (--speed-splits), one thread, in turn with
every fixed budget, on the other half's images. Each variant runs in the batch in which it is
fastest. A policy is compared with the fastest budget whose accuracy is not shown to be lower.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from result_file import RESULTS, options_of, write_result
from served_models import DIGITS, digits_folder

from saccade.core.machine import this_machine
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel, subjects_of_folder
from saccade.exporter.policy.answers import Answers, CalibratedVariant, VariantAnswers, answers_of
from saccade.exporter.policy.certify import Certificate, Chain, certify, front
from saccade.exporter.runtimes.runners import Runner, run_in_batches
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.model_repository.router.confidence import confidence
from saccade.models.data.datasets import load_data
from saccade.models.scores.results import paired_bootstrap, paired_log_ratio
from saccade.models.shipped import SHIPPED

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0625, 0.015625)
RISKS = (0.005, 0.01, 0.02, 0.03)
CONFIDENCE = 0.95
STEPS = 3
BATCHES, TRIED_IMAGES, TRIES = (2, 4, 8, 16, 32, 64), 256, 5


@dataclass(frozen=True)
class Model:
    """A variant in process, in the batch in which it is fastest."""

    run: Runner
    batch: int

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Return the logits of any number of images."""
        return run_in_batches(self.run, {"image": images}, self.batch)["logits"]


@dataclass(frozen=True)
class Population:
    """Every variant's answers to all canvases, cheapest first."""

    variants: tuple[VariantAnswers, ...]
    labels: np.ndarray
    choosing: "Population | None" = None  # other canvases, which choose

    @property
    def full(self) -> str:
        return self.variants[-1].name

    def part(self, rows: np.ndarray) -> list[VariantAnswers]:
        return [replace(one, logits=one.logits[rows]) for one in self.variants]

    def calibrated(self, rows: np.ndarray, seed: int) -> Answers:
        mine, labels, apart = self.part(rows), self.labels[rows], 0
        if self.choosing:
            labels, apart = (
                np.concatenate([self.choosing.labels, labels]),
                len(self.choosing.labels),
            )
            mine = [
                replace(one, logits=np.concatenate([other.logits, one.logits]))
                for other, one in zip(self.choosing.variants, mine, strict=True)
            ]
        return answers_of(mine, labels, full=self.full, seed=seed, apart=apart)


def population(
    folder: Path, images: np.ndarray, labels: np.ndarray, choose_split: str | None = None
) -> tuple[Population, tuple[Model, ...]]:
    """Run every variant on all canvases, each in the batch in which it is fastest."""
    other = load_data("digits-sum", choose_split) if choose_split else None
    found = []
    for subject in subjects_of_folder(ArtefactFolder(folder), runtime_named(DEFAULT)):
        model, seconds = fastest(subject, images[:TRIED_IMAGES])
        print(f"{subject.name}: {1 / seconds:.0f} images/s in batches of {model.batch}", flush=True)
        answers = VariantAnswers(subject.name, subject.sha256, seconds, model(images))
        found.append((model, answers))
    found.sort(key=lambda one: one[1].seconds)
    choosing = other and Population(
        tuple(replace(answers, logits=model(other.images)) for model, answers in found),
        other.labels,
    )
    whole = Population(tuple(one[1] for one in found), labels, choosing)
    return whole, tuple(one[0] for one in found)


def fastest(subject: EvaluatedModel, images: np.ndarray) -> tuple[Model, float]:
    """Return a variant in its fastest batch, and its seconds per image: the least of some tries."""
    models = [Model(subject.component("").run, batch) for batch in BATCHES]
    least = dict.fromkeys(BATCHES, float("inf"))
    for _ in range(TRIES):
        for model in models:
            begun = time.perf_counter()
            model(images)
            least[model.batch] = min(least[model.batch], time.perf_counter() - begun)
    best = min(models, key=lambda model: least[model.batch])
    return best, least[best.batch] / len(images)


@dataclass(frozen=True)
class Cascade:
    """A chain as a function of images: those it is sure of leave, the others continue."""

    chain: Chain
    variants: tuple[CalibratedVariant, ...]

    def ends(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        """The step at which each sample ends, from the logits of all variants."""
        ends = np.full(len(logits[0]), len(self.chain.steps) - 1)
        for at in reversed(range(len(self.chain.thresholds))):
            step = self.chain.steps[at]
            sure = confidence(self.chain.measure, logits[step], self.variants[step].temperature)
            ends[sure >= self.chain.thresholds[at]] = at
        return ends

    def classes(self, logits: Sequence[np.ndarray]) -> np.ndarray:
        answers = np.stack([logits[step].argmax(-1) for step in self.chain.steps])
        return np.take_along_axis(answers, self.ends(logits)[None], axis=0)[0]

    def run(self, models: Sequence[Model], images: np.ndarray) -> np.ndarray:
        """The class of each image, with no more work than the chain needs."""
        answers, left = np.zeros(len(images), np.int64), np.arange(len(images))
        for at, step in enumerate(self.chain.steps):
            logits = models[step](images[left])
            answers[left] = logits.argmax(-1)
            if at < len(self.chain.thresholds):
                sure = confidence(self.chain.measure, logits, self.variants[step].temperature)
                left = left[sure < self.chain.thresholds[at]]
            if not len(left):
                break
        return answers


def guarantees(whole: Population, against: Any, splits: int, jobs: int) -> list[dict[str, Any]]:
    """By risk: how often it was certified, how often the other half exceeded it."""
    rows: dict[float, list[dict[str, float]]] = {risk: [] for risk in RISKS}
    # A forked process would have the threads of the runtime's sessions without their state.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for found in pool.map(one_split, repeat(whole, splits), repeat(against), range(splits)):
            for risk, row in found.items():
                rows[risk].append(row)
    return [summary(risk, met_rows, splits) for risk, met_rows in rows.items()]


def one_split(whole: Population, against: Any, seed: int) -> dict[float, dict[str, float]]:
    """By risk that one half certified: what the chain and the control do on the other half."""
    mine, other = halves(whole, seed)
    answers = whole.calibrated(mine, seed)
    found = certify(answers, RISKS, confidence=CONFIDENCE, against=against, steps=STEPS)
    return {
        one.risk: met(whole, other, one.chain, answers, against)
        | {"control": met(whole, other, control, answers, against)["risk"]}
        for one, control in zip(found, untested(answers, against), strict=True)
        if isinstance(one, Certificate)
    }


def untested(answers: Answers, against: Any) -> list[Chain]:
    """The cheapest chain that does well enough on the calibration's samples, for each risk."""
    every = replace(answers.like_traffic, learn=answers.like_traffic.n)
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
    cascade, labels = Cascade(chain, answers.variants), whole.labels[rows]
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


def halves(whole: Population, seed: int) -> list[np.ndarray]:
    """The rows of a split: those that calibrate, and the others."""
    return np.array_split(np.random.default_rng(1_000 + seed).permutation(len(whole.labels)), 2)


def speeds(
    whole: Population,
    models: Sequence[Model],
    images: np.ndarray,
    against: Any,
    rounds: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Images per second of one split's policies, over those of each fixed budget."""
    mine, other = halves(whole, seed)
    answers = whole.calibrated(mine, seed)
    images, labels = images[other], whole.labels[other]
    fixed = {one.name: model for one, model in zip(whole.variants, models, strict=True)}
    calls: dict[str, Callable[[], np.ndarray]] = {
        name: lambda model=model: model(images).argmax(-1) for name, model in fixed.items()
    }
    found = certify(answers, RISKS, confidence=CONFIDENCE, against=against, steps=STEPS)
    chains = {f"{one.risk:g}": one.chain for one in found if isinstance(one, Certificate)}
    for name, chain in chains.items():
        cascade = Cascade(chain, answers.variants)
        calls[name] = lambda cascade=cascade: cascade.run(models, images)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    right = {name: (call() == labels).astype(np.float64) for name, call in calls.items()}
    for turn in range(rounds):  # every second one in reverse
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            begun = time.perf_counter()
            calls[name]()
            taken[name].append(time.perf_counter() - begun)
    rows = []
    for name, seconds in taken.items():
        steps = chains[name].steps if name in chains else (list(fixed).index(name),)
        best = over_best(name, tuple(fixed), taken, right) if name in chains else {}
        rows.append(
            {
                "name": name,
                "split": seed,
                "chain": [whole.variants[step].name for step in steps],
                "batches": [models[step].batch for step in steps],
                "images_per_second": len(images) * len(seconds) / sum(seconds),
                "over_full": times(taken[whole.full], seconds),
                **best,
                "accuracy": float(right[name].mean()),
                "accuracy_minus_full": paired_bootstrap(right[name], right[whole.full], 0),
            }
        )
    return rows


def over_splits(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each risk: the ratios of its policies, with the mean and range over the splits."""
    found = []
    for name in dict.fromkeys(row["name"] for row in rows if "over_best_fixed" in row):
        own = [row for row in rows if row["name"] == name]
        one: dict[str, Any] = {"risk": float(name), "splits": len(own)}
        for key in ("over_full", "over_best_fixed"):
            ratios = [row[key]["times"] for row in own]
            one[key] = {
                "mean": float(np.exp(np.mean(np.log(ratios)))), "range": [min(ratios), max(ratios)],
            }  # fmt: skip
        one["not_shown_less_accurate"] = sum(row["accuracy_minus_full"][1] >= 0 for row in own)
        found.append(one)
    return found


def over_best(
    name: str, fixed: Sequence[str], taken: dict[str, list[float]], right: dict[str, np.ndarray]
) -> dict[str, Any]:
    """How many times as fast as the fastest budget whose accuracy is not shown to be lower.

    If all are shown to be lower, the nearest one counts.
    """
    gap = {one: paired_bootstrap(right[one], right[name], 0, samples=2_000) for one in fixed}
    equal = [one for one in fixed if gap[one][1] >= 0] or [max(fixed, key=lambda one: gap[one][1])]
    best = min(equal, key=lambda one: sum(taken[one]))
    return {"over_best_fixed": {"name": best, **times(taken[best], taken[name])}}


def times(slow: Sequence[float], fast: Sequence[float]) -> dict[str, Any]:
    """How many times as fast, with its paired interval over the rounds."""
    low, high = paired_log_ratio(slow, fast)
    middle = float(np.exp(np.mean(np.log(np.array(slow) / np.array(fast)))))
    return {"times": middle, "interval": [float(np.exp(low)), float(np.exp(high))]}


def main() -> None:
    options = _options()
    stem = Path(options.checkpoint.removeprefix(SHIPPED)).stem
    folder = digits_folder(f"cascade-{stem}", BUDGETS, options.checkpoint)
    data = load_data("digits-sum", "test")
    whole, models = population(folder, data.images, data.labels, options.choose_split)
    result: dict[str, Any] = {
        "machine": this_machine().to_dict(),
        "checkpoint": stem,
        "canvases": len(data.labels),
        "choose_split": options.choose_split,
        "confidence": CONFIDENCE,
    }
    for against in ("full", "labels"):  # first all that is timed, on a machine with nothing else
        rows = [
            row
            for seed in range(options.speed_splits)
            for row in speeds(whole, models, data.images, against, options.rounds, seed)
        ]
        result[against] = {"speeds": rows, "over_splits": over_splits(rows)}
    for against in ("full", "labels"):
        result[against]["guarantees"] = guarantees(whole, against, options.splits, options.jobs)
        for kind in ("guarantees", "speeds", "over_splits"):
            for row in result[against][kind]:
                print(against, row, flush=True)
    name = "cascade" if options.checkpoint == DIGITS else f"cascade_{stem}"
    name += f"_{options.choose_split}" if options.choose_split else ""
    write_result(options.out or RESULTS / f"{name}.json", result)


def _options() -> argparse.Namespace:
    parser = options_of(__doc__, "cascade", rounds=10)
    parser.add_argument("--splits", type=int, default=100)
    parser.add_argument("--speed-splits", type=int, default=1, help="splits that are timed")
    parser.add_argument("--jobs", type=int, default=1, help="processes that calibrate splits")
    parser.add_argument("--checkpoint", default=DIGITS, help="exported once")
    parser.add_argument("--choose-split", help="of digits-sum, such as validation: chooses chains")
    # by default cascade.json, or cascade_STEM.json
    parser.set_defaults(out=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
