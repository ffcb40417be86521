# SPDX-License-Identifier: Apache-2.0
"""Certified policies for artefacts in tests, made in milliseconds from random answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from router_code import router_module
from support.serving.frontiers import frontier_entry, point

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.evaluation.calibrate import Calibration, calibrate
from saccade.exporter.policy.answers import VariantAnswers, answers_of
from saccade.exporter.policy.certify import Certificate, certify
from saccade.exporter.policy.options import Against, CalibrateOptions
from saccade.exporter.policy.policy import (
    PolicyFile,
    policy_of,
    with_answers,
    write_policies,
)

SAMPLES, CLASSES, CONFIDENCE, STEPS = 500, 3, 0.95, 3


def write_policy(
    folder: Path,
    name: str = "auto",
    risks: Sequence[float] = (0.1,),
    *,
    of: Sequence[str] = (),
    runtime: str = "onnxruntime 1.31.1 CPU",
    logits: Mapping[str, np.ndarray] | None = None,
    against: Against = "full",
    **fields: Any,
) -> PolicyFile:
    """Write a policy file for the variants with these names, or for all.

    `logits` are those of each variant, instead of random ones, and `fields` more of the file.
    Labels are what the full model answers.
    """
    there = [variant for variant in ArtefactFolder(folder).variants if not of or variant.name in of]
    there.sort(key=lambda variant: variant.main.variant.budget)
    variants = _drawn(there)
    if logits is not None:
        variants = [replace(variant, logits=logits[variant.name]) for variant in variants]
    labels = variants[-1].logits.argmax(-1) if against == "labels" else None
    answers = answers_of(variants, labels, full=there[-1].name, seed=0)
    found = certify(answers, risks, confidence=CONFIDENCE, against=against, steps=STEPS)
    passed = [one for one in found if isinstance(one, Certificate)]
    assert len(passed) == len(risks)
    content = PolicyFile(
        name=name,
        model=there[0].main.variant.model,
        task="classification",
        against=against,
        confidence=CONFIDENCE,
        most_steps=STEPS,
        data="drawn",
        data_sha256="0" * 64,
        split="test",
        seed=0,
        samples=answers.n,
        learn=answers.learn,
        runtime=runtime,
        device="here",
        full=there[-1].name,
        variants=answers.variants,
        answers_sha256="",
        policies=tuple(
            policy_of(name if len(risks) == 1 else f"{name}-{one.risk:g}", one, answers)
            for one in passed
        ),
    )
    content, arrays = with_answers(replace(content, **fields), answers)
    write_policies(folder, content, arrays)
    return content


def measured(folder: Path, rates: Mapping[str, float], **changes: Any) -> None:
    """Write speeds of the variants into the frontier, as `saccade bench` would.

    Units: rates are per second, by the variant's name.
    """
    there = ArtefactFolder(folder)
    known = {"batch": 1, "runtime": "onnxruntime 1", "device": "here", **changes}
    there.merge(
        frontier_entry(
            one.name, one.sha256, budget=one.main.variant.budget, inside=point(rates[one.name]),
            **known,
        )
        for one in there.variants
    )  # fmt: skip


def calibrated_slots(folder: Path, **options: Any) -> Calibration:
    """Calibrate the tiny slot attention model on noise, on which its two variants often agree."""
    measured(folder, {"slot-attention-t2-fp32": 100.0, "slot-attention-t1-fp32": 1_000.0})
    rng = np.random.default_rng(0)
    np.savez(folder / "noise.npz", images=rng.integers(0, 256, (200, 16, 16, 3), dtype=np.uint8))
    given = {"data": str(folder / "noise.npz"), "risk": (0.3,), **options}
    return calibrate(folder, CalibrateOptions(**given), progress=None)


def spread(place: Path, folder: Path, images: np.ndarray) -> None:
    """Set the thresholds of the deployed policy so that these images end at every step."""
    ort, path = pytest.importorskip("onnxruntime"), place / "routes.json"
    confidence = router_module("confidence").confidence
    routes = router_module("routes").read_routes(path)
    labels = router_module("plain_family").Labels(place, routes.variants)
    variants = {variant.name: variant for variant in ArtefactFolder(folder).variants}
    content, left = json.loads(path.read_text()), images
    (policy,) = content["policies"]
    for step in policy["steps"][:-1]:
        variant = variants[step["variant"]]
        manifest = variant.components.get("image", variant.main)
        session = ort.InferenceSession(folder / manifest.file.name)
        (logits,) = session.run([manifest.outputs[0].name], {"image": left})
        if "image" in variant.components:
            (route,) = [route for route in routes.variants if route.name == variant.name]
            logits = labels.scores(route, logits)["logits"]
        sure = confidence(policy["measure"], logits, step["temperature"])
        step["threshold"] = float(np.median(sure))
        left = left[sure < step["threshold"]]
    path.write_text(json.dumps(content))


def _drawn(variants: Sequence[VariantFiles]) -> list[VariantAnswers]:
    """Draw answers of increasing accuracy and cost, where some samples are easy for all."""
    rng = np.random.default_rng(0)
    labels, ease = rng.integers(0, CLASSES, SAMPLES), rng.normal(1.0, 2.2, SAMPLES)
    made = []
    for at, variant in enumerate(variants):
        logits = 0.6 * rng.normal(size=(SAMPLES, CLASSES))
        logits[np.arange(SAMPLES), labels] += 2.4 + 0.4 * at + ease
        made.append(VariantAnswers(variant.name, variant.sha256, 4.0**at, logits))
    return made
