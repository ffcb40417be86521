# SPDX-License-Identifier: Apache-2.0
"""Measure where slots may stop moving: what tells whether fewer rounds give the same segmentation.

    python benchmarks/slot_rounds.py

The shipped slot attention model with its own 3 rounds and, with the same weights, with 5. An
answer is lost if its adjusted Rand index with the full model's is below 0.95. For each number of
rounds: the share of lost answers, and the area under the risk-coverage curve of each confidence,
from the masks alone and from how far the slots moved in the last round.

Then the certificate: scenes are split in halves, at random and many times. One half calibrates,
the other gives the risk, beside a control without a test. There a variant costs its rounds, so that
chains are worth their while; the time that a variant really takes is measured beside it.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from result_file import write_result

from saccade.core.machine import this_machine
from saccade.exporter.evaluation.evaluated_model import torch_runner
from saccade.exporter.policy.answers import (
    MEASURES,
    Answers,
    VariantSegments,
    mask_confidence,
    segment_answers_of,
)
from saccade.exporter.policy.certify import Certified, certify
from saccade.exporter.policy.chains import Chain, front
from saccade.exporter.policy.options import MIN_ARI
from saccade.models.checkpoint import load
from saccade.models.data.tetrominoes import tetrominoes
from saccade.models.families import build
from saccade.models.scores.ari import adjusted_rand_index
from saccade.models.shipped import located
from saccade.models.slot_attention.initial import initial_states

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = "shipped:slots-tetrominoes"
TOTALS = (3, 5)  # rounds of the full model: as trained, and more
RISKS = (0.01, 0.02, 0.05, 0.1)
CONFIDENCE, STEPS = 0.95, 3
STARTS, IMAGES_A_START = 8, 400  # initial slots that all images share
_BATCH = 50
Outputs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Rounds:
    """The model at each number of rounds, on the same scenes from the same initial slots."""

    outputs: Mapping[int, Outputs]
    confidence: Mapping[int, np.ndarray]  # [measures n]
    seconds: Mapping[int, float]  # per image

    def owners(self, rounds: int) -> np.ndarray:
        return self.outputs[rounds]["owners"]


def runners() -> tuple[dict[int, Any], dict[str, Any]]:
    """The folded model at 1 to 5 rounds, and its metadata."""
    checkpoint = load(located(CHECKPOINT))
    trained = checkpoint.build()
    model = build("slot-attention", {**trained.config.to_dict(), "rounds": max(TOTALS)}).eval()
    model.load_state_dict(trained.state_dict())
    names = ("masks", "slots", "positions")
    run = {
        int(budget.label.removeprefix("t")): torch_runner(model.at(budget).fold(), "", names)
        for budget in model.budgets()
    }
    return run, trained.runtime_metadata()


def answered(run: Mapping[int, Any], images: np.ndarray, states: np.ndarray) -> Rounds:
    """Run all variants in turn on each batch, so that what disturbs the machine disturbs all."""
    parts: dict[int, list[Outputs]] = {rounds: [] for rounds in run}
    spent = dict.fromkeys(run, 0.0)
    for at in range(0, len(images), _BATCH):
        inputs = {"image": images[at : at + _BATCH], "initial_state": states[at : at + _BATCH]}
        for rounds, one in run.items():
            begun = time.perf_counter()
            parts[rounds].append(one(inputs))
            spent[rounds] += time.perf_counter() - begun
    outputs = {
        rounds: {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        for rounds, found in parts.items()
    }
    owners = {rounds: {**one, "owners": one["masks"].argmax(1)} for rounds, one in outputs.items()}
    sure = {
        rounds: np.stack([mask_confidence(name, one["masks"]) for name in MEASURES])
        for rounds, one in outputs.items()
    }
    return Rounds(owners, sure, {rounds: spent[rounds] / len(images) for rounds in run})


def area(confidence: np.ndarray, lost: np.ndarray) -> float:
    """The mean risk over all coverages, when the most confident answers are kept.

    Source: Geifman and El-Yaniv 2017 (arXiv 1705.08500).
    """
    order = np.argsort(-confidence, kind="stable")
    return float((np.cumsum(lost[order]) / np.arange(1, len(lost) + 1)).mean())


def moved(rounds: int, found: Rounds) -> dict[str, np.ndarray]:
    """How little the slots moved in the last round, as a confidence; none for the first round."""
    if rounds - 1 not in found.outputs:
        return {}
    now, before = found.outputs[rounds], found.outputs[rounds - 1]
    return {
        f"{name} moved": -np.abs(now[name] - before[name]).mean(tuple(range(1, now[name].ndim)))
        for name in ("slots", "positions", "masks")
    }


def separation(found: Rounds, true: np.ndarray, total: int) -> list[dict[str, Any]]:
    """A row per number of rounds: what is lost, and how well each confidence tells."""
    rows = []
    for rounds in range(1, total + 1):
        owners = found.owners(rounds)
        lost = (adjusted_rand_index(found.owners(total), owners) < MIN_ARI).astype(np.float64)
        own = dict(zip(MEASURES, found.confidence[rounds], strict=True))
        surest = np.argsort(-own["top1"], kind="stable")[: int(0.8 * len(lost))]
        rows.append(
            {
                "rounds": rounds,
                "fg_ari": float(adjusted_rand_index(true, owners, foreground=True).mean()),
                "lost": float(lost.mean()),
                "lost_of_the_surest_80_percent": float(lost[surest].mean()),
                "area_by_the_truth": area(-lost, lost),
                "area": {
                    name: area(values, lost)
                    for name, values in {**own, **moved(rounds, found)}.items()
                },
                "seconds_over_full": found.seconds[rounds] / found.seconds[total],
            }
        )
    return rows


def moved_pixels(found: Rounds) -> float:
    """The share of pixels that change slots between 2 and 3 rounds where the ARI is about 0.95."""
    before, now = found.owners(2), found.owners(3)
    near = np.abs(adjusted_rand_index(now, before) - MIN_ARI) < 0.01
    return float((before != now)[near].mean())


def certificates(found: Rounds, total: int, splits: int) -> list[dict[str, Any]]:
    """By risk: how often it was certified, and how often the other half exceeded it."""
    count = len(found.owners(total))
    variants = [
        VariantSegments(
            str(rounds), "", float(rounds), found.owners(rounds), found.confidence[rounds]
        )
        for rounds in range(1, total + 1)
    ]
    whole = segment_answers_of(variants, full=str(total), seed=0, min_ari=MIN_ARI)
    rows: dict[float, list[tuple[float, float, float]]] = {risk: [] for risk in RISKS}
    for seed in range(splits):
        order = np.random.default_rng(1_000 + seed).permutation(count)
        mine, other = (rows_of(whole, part) for part in np.array_split(order, 2))
        for one in certify(mine, RISKS, confidence=CONFIDENCE, against="full", steps=STEPS):
            if isinstance(one, Certified):
                control = untested(mine, one.risk)
                speed = float(total / one.chain.seconds(other))
                rows[one.risk].append((risk_of(one.chain, other), risk_of(control, other), speed))
    return [summary(risk, splits, met) for risk, met in rows.items()]


def summary(risk: float, splits: int, met: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    if not met:
        return {"risk": risk, "splits": splits, "certified": 0}
    risks, control, speed = np.array(met).T
    return {
        "risk": risk,
        "splits": splits,
        "certified": len(met),
        "exceeded": int((risks > risk).sum()),
        "control_exceeded": int((control > risk).sum()),
        "mean_risk": float(risks.mean()),
        "rounds_saved": float(speed.mean()),
    }


def rows_of(whole: Answers, rows: np.ndarray) -> Answers:
    """The same for these samples, of which the first two fifths learn."""
    part = replace(
        whole,
        classes=whole.classes[:, rows],
        confidence=whole.confidence[:, :, rows],
        agreement=None,
    )
    return replace(part, learn=round(0.4 * len(rows)))


def risk_of(chain: Chain, answers: Answers) -> float:
    return float(chain.losses(answers, answers.differs).mean())


def untested(answers: Answers, risk: float) -> Chain:
    """The cheapest chain that does well enough on the samples that choose."""
    fitting = [
        one for one in front(answers, answers.differs, STEPS) if risk_of(one, answers) <= risk
    ]
    return min(fitting, key=lambda one: one.seconds(answers))


def same_start(
    run: Mapping[int, Any], rule: dict[str, Any], slots: int, images: np.ndarray
) -> list[float]:
    """The share that 3 of 5 rounds lose, if all images start from the same slots, by their seed."""
    few, shares = {rounds: run[rounds] for rounds in (3, 5)}, []
    for seed in range(STARTS):
        state = initial_states(rule, 1, slots, seed=seed)
        found = answered(few, images, np.repeat(state, len(images), axis=0))
        shares.append(
            float((adjusted_rand_index(found.owners(5), found.owners(3)) < MIN_ARI).mean())
        )
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scenes", type=int, default=3_000)
    parser.add_argument("--splits", type=int, default=60)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "slot_rounds.json"
    )
    options = parser.parse_args()
    run, metadata = runners()
    rule, slots = metadata["initial_state"], int(metadata["slots"])
    scenes = tetrominoes("test", options.scenes, side_px=20)
    found = answered(run, scenes.images, initial_states(rule, options.scenes, slots))
    result = {
        "machine": this_machine().to_dict(),
        "checkpoint": CHECKPOINT,
        "scenes": options.scenes,
        "min_ari": MIN_ARI,
        "confidence": CONFIDENCE,
        "moved_pixels_at_min_ari": moved_pixels(found),
        "separation": {str(total): separation(found, scenes.masks, total) for total in TOTALS},
        "certificates": certificates(found, max(TOTALS), options.splits),
        "lost_from_one_start": same_start(run, rule, slots, scenes.images[:IMAGES_A_START]),
    }
    for name in ("moved_pixels_at_min_ari", "separation", "certificates", "lost_from_one_start"):
        print(name, result[name], flush=True)
    write_result(options.out, result)


if __name__ == "__main__":
    main()
