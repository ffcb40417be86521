# SPDX-License-Identifier: Apache-2.0
"""A policy of two variants that are tables of logits, and its measurements."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from tiny_artefacts import FULL, HALF

from saccade.exporter.artefact.frontier import PolicyEntry
from saccade.exporter.policy.policy import CalibratedStep, Policy
from saccade.models.scores.results import EvaluationResult, proportion
from saccade.serving.bench.in_process import Calls, InProcessLoad
from saccade.serving.bench.policies import PolicyWork, class_answers, entry_of_policy

# Logits of two variants on five samples, and the labels. The small one is sure of the first three.
SMALL = np.array([[9.0, 0], [0, 9.0], [9.0, 0], [0.1, 0], [0, 0.1]])
LARGE = np.array([[5.0, 0], [0, 5.0], [0, 5.0], [0, 5.0], [0, 5.0]])
LABELS = np.array([0, 1, 1, 1, 0])


def chain(rows_seen: list[int]) -> PolicyWork:
    """A policy of two steps over these logits; its inputs are rows of the tables."""

    def run_of(table: np.ndarray) -> Any:
        def run(inputs: Any) -> np.ndarray:
            rows_seen.append(len(inputs["row"]))
            return table[inputs["row"]]

        return run

    steps = (
        CalibratedStep(HALF, "a" * 64, 0.9, 1.0, 0.5),
        CalibratedStep(FULL, "b" * 64, None, 1.0, 0.5),
    )
    policy = Policy("auto", 0.05, 0.04, 0.02, "top1", steps, 0.001, 0.004)
    content: Any = SimpleNamespace(
        min_ari=None, full=FULL, against="full", confidence=0.95, embeds=False,
        split="test", data="d", data_sha256="d" * 64,
        choose_split=None, choose_data=None, choose_data_sha256="c" * 64,
        variants=tuple(SimpleNamespace(variant=s.variant, sha256=s.sha256) for s in steps),
    )  # fmt: skip
    runs = run_of(SMALL), run_of(LARGE)
    rows = {"row": np.arange(5)}
    return PolicyWork(policy, content, runs, rows, rows, runs)


def entry(*, data_sha256: str = "e" * 64, **changes: Any) -> PolicyEntry:
    """The entry of the chain, measured in two rounds on data of this hash."""
    work = chain([])
    answers = class_answers({HALF: SMALL, FULL: LARGE}, LABELS, "drawn", data_sha256)
    right = LARGE.argmax(-1) == LABELS
    result = EvaluationResult(FULL, "top1", "drawn", "e" * 64, (proportion("top-1", right),), right)
    measured = {
        (FULL, ""): InProcessLoad({1: Calls(1, [0.01, 0.01], rounds=[100.0, 50.0])}),
        work.key: InProcessLoad({1: Calls(1, [0.005, 0.005], rounds=[200.0, 110.0])}),
    }
    full: Any = SimpleNamespace(runtime="onnxruntime 1", device="here", ops=None)
    return replace(entry_of_policy(work, answers, result, measured, full), **changes)
