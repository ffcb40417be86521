# SPDX-License-Identifier: Apache-2.0
r"""How often is a policy withdrawn that keeps its risk, and how soon one that does not?

    saccade calibrate FOLDER --data calibration.npz --split all --risk 0.01,0.03,0.05 --name web
    python benchmarks/monitor.py FOLDER traffic.npz

`traffic.npz` has `images` that took no part in the calibration. Each stream draws from them at
random, as the monitor's samples do: 20,000 without a change, or 1,000 and then up to 10,000 of the
same images changed: blurred, from a darker camera of more contrast, noisy, or mostly of the two
classes that lose most. Besides, streams that lose exactly the certified share.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter
from result_file import options_of, table, write_result

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.evaluation.evaluated_model import subjects_of_folder
from saccade.exporter.policy.policy import FALSE_ALARM, Policy, policy_files, read_policies
from saccade.exporter.runtimes.runners import run_in_batches
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.model_repository.router.confidence import confidence
from saccade.model_repository.router.evidence import Evidence

STREAMS, LIFE, CALM, CHANGED = 200, 20_000, 1_000, 10_000
CLASSES, CLASS_SHARE = 2, 0.8


def blurred(images: np.ndarray) -> np.ndarray:
    """Return images out of focus: a Gaussian of one pixel."""
    return np.stack(
        [
            np.asarray(Image.fromarray(image.squeeze()).filter(ImageFilter.GaussianBlur(1)))
            for image in images
        ]
    ).reshape(images.shape)


CHANGES = {
    "none": lambda images: images,
    "blur": blurred,
    "other camera": lambda images: (255 * (images / 255) ** 2.5).astype(np.uint8),
    "noise": lambda images: np.clip(
        images + np.random.default_rng(0).normal(0, 60, images.shape), 0, 255
    ).astype(np.uint8),
}


def losses(policy: Policy, logits: Mapping[str, np.ndarray], full: str) -> np.ndarray:
    """Return which samples get an answer that differs from the full model's."""
    answer = logits[policy.steps[-1].variant].argmax(-1)
    for step in reversed(policy.steps[:-1]):
        own = logits[step.variant]
        sure = confidence(policy.measure, own, step.temperature) >= step.threshold
        if policy.early is not None:
            sure &= np.isin(own.argmax(-1), policy.early)
        answer = np.where(sure, own.argmax(-1), answer)
    return answer != logits[full].argmax(-1)


def alarms(risk: float, streams: Iterator[np.ndarray]) -> list[int | None]:
    """Return after how many samples each stream refutes the risk; None if it does not."""
    found: list[int | None] = []
    for stream in streams:
        evidence = Evidence(risk, FALSE_ALARM)
        for lost in stream:
            evidence.add(lost=bool(lost))
            if evidence.refutes:
                break
        found.append(evidence.samples if evidence.refutes else None)
    return found


def row(
    policy: str, change: str, share: float, found: list[int | None], calm: int
) -> dict[str, Any]:
    """Return the figures of the streams of one kind; delays begin with the change."""
    late = [at - calm for at in found if at is not None and at > calm]
    early = sum(at is not None and at <= calm for at in found)
    delay = float(np.median(late)) if late else None
    counts = {"withdrawn": len(late), "before_change": early, "median_samples": delay}
    return {"policy": policy, "change": change, "lost": share, **counts}


def measured(options: Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures of each policy and change."""
    images, rng = np.load(options.traffic)["images"], np.random.default_rng(0)
    subjects = subjects_of_folder(ArtefactFolder(options.folder), runtime_named(DEFAULT))
    runs = {subject.name: subject.component("").run for subject in subjects}
    logits = {}
    for change, changed in CHANGES.items():
        shown = {"image": changed(images)}
        logits[change] = {
            name: run_in_batches(run, shown, 32)["logits"] for name, run in runs.items()
        }
    for content in map(read_policies, policy_files(options.folder)):
        for policy in content.policies:
            drawn = (rng.random(LIFE) < policy.risk for _ in range(STREAMS))
            found = alarms(policy.risk, drawn)
            yield row(policy.name, "at the risk", policy.risk, found, 0)
            lost = {name: losses(policy, one, content.full) for name, one in logits.items()}
            plain, classes = lost["none"], logits["none"][content.full].argmax(-1)
            found = alarms(policy.risk, (rng.choice(plain, LIFE) for _ in range(STREAMS)))
            yield row(policy.name, "none", plain.mean(), found, 0)
            worst = sorted({*classes}, key=lambda one: -plain[classes == one].mean())[:CLASSES]
            many = np.isin(classes, worst)
            lost["classes"] = np.concatenate(
                [rng.choice(plain[many], round(1e4 * CLASS_SHARE)), rng.choice(plain[~many], 2000)]
            )
            for change in (*list(CHANGES)[1:], "classes"):
                streams = (
                    np.concatenate([rng.choice(plain, CALM), rng.choice(lost[change], CHANGED)])
                    for _ in range(STREAMS)
                )
                found = alarms(policy.risk, streams)
                yield row(policy.name, change, lost[change].mean(), found, CALM)


def main() -> None:
    """Print and write the figures."""
    parser = options_of(__doc__ or "", "monitor")
    parser.add_argument("folder", type=Path)
    parser.add_argument("traffic", type=Path)
    options, rows = parser.parse_args(), []
    for one in measured(options):
        rows.append(one)
        print(table(list(one), [[str(value) for value in one.values()]]), flush=True)
    write_result(options.out, {"rows": rows, "streams": STREAMS})


if __name__ == "__main__":
    main()
