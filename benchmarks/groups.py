# SPDX-License-Identifier: Apache-2.0
r"""Measure what chains over several checkpoints save through a server, and keep of their promise.

    python benchmarks/groups.py
    python benchmarks/groups.py --real-size

The test samples of `signs`, which are independent, are split in halves, at random and many times.
One half calibrates a chain of the shipped signs models; the other one, on which nothing was chosen,
measures its risk and its accuracy. Beside it the control: the cheapest chain that does well on the
calibration half, with no test.

Every certified chain is then a policy of one server, as is each variant alone. Their throughput is
measured in turn, with 1 and with 16 images per request, on signs that are in no split. A chain is
compared with the full model, and with the fastest variant that is at least as accurate on the other
half.

With --real-size, the members are ViT-S/16, B/16 and L/16 with random weights. Their thresholds are
such that as many images leave at each step as did on average in `groups.json`.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from result_file import BUILD, RESULTS, options_of, write_result
from served_models import QUIET

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel, subjects_of_folder
from saccade.exporter.export import ExportOptions, export
from saccade.exporter.group import GroupOptions, group
from saccade.exporter.policy.answers import MEASURES, Answers, VariantAnswers, answers_of
from saccade.exporter.policy.certify import Certificate, Chain, certify, front
from saccade.exporter.policy.policy import policy_of
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.model_repository.router.confidence import confidence
from saccade.model_repository.router.routes import PolicyRoute, StepRoute
from saccade.models.checkpoint import save
from saccade.models.data.datasets import load_data
from saccade.models.data.signs import sign_batch
from saccade.models.preprocessing import Preprocessing
from saccade.models.sot.config import PRESETS
from saccade.models.sot.model import SoT
from saccade.serving.bench.load import LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.load_requests import png_files, request
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.policies import RouterPolicies, served_policy
from saccade.serving.server.server import Server

MEMBERS = {size: f"shipped:signs-{size}" for size in ("small", "middle", "large")}
REAL = {
    "s": PRESETS["vit-s16"],
    "b": PRESETS["vit-b16"],
    "l": replace(PRESETS["vit-b16"], dim=1024, layers=24, heads=16, mlp_dim=4096),
}
REAL_WINDOW = 20.0  # times as long as a window of the small models
REAL_CLIENTS = {1: 4}  # 16 images of a ViT-L take so long that a lane refuses the next ones
TIMEOUT_S = 600.0  # a ViT-L takes a second per image
DATA, ONNX = "signs", runtime_named(DEFAULT)
CONFIDENCE, STEPS = 0.95, 3
BATCHES, TRIED, TRIES = (1, 4, 16, 64), 128, 3
TRAFFIC, TRAFFIC_SEED = 1_024, 9  # new signs of requests
CLIENTS = {1: 16, 16: 4}  # by images per request
TIMES_FULL, TIMES_SINGLE, HELD = 1.8, 1.3, 19  # the aims, of 20 splits


@dataclass(frozen=True)
class Population:
    """Every variant's answers to all samples, cheapest first."""

    variants: tuple[VariantAnswers, ...]
    labels: np.ndarray

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.variants]

    def answers(self, rows: np.ndarray, seed: int) -> Answers:
        """Return the answers to some samples, of which a part chooses and the rest certifies."""
        mine = [replace(one, logits=one.logits[rows]) for one in self.variants]
        return answers_of(mine, self.labels[rows], full=self.names[-1], seed=seed)


def grouped(place: Path, members: Mapping[str, str | Path]) -> Path:
    """Return the group of these checkpoints; exported once and then reused."""
    if not place.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as exports:
            for word, checkpoint in members.items():
                export(checkpoint, ExportOptions(Path(exports) / word, name=word, gate="quick"))
            group([f"{word}={Path(exports) / word}" for word in members], GroupOptions(place))
    return place


def population(folder: Path) -> Population:
    """Run every variant on all test samples, and time it in its fastest batch."""
    found, labels = [], np.zeros(0)
    for subject in subjects_of_folder(ArtefactFolder(folder), ONNX):
        data = load_data(DATA, "test", preprocessing=subject.images())
        labels = data.labels
        logits = subject.component("")({"image": data.images})["logits"]
        seconds = fastest(subject, data.images[:TRIED])
        print(f"{subject.name}: {(logits.argmax(-1) == labels).mean():.4f}, {seconds * 1e3:.3f} ms")
        found.append(VariantAnswers(subject.name, sha_of(folder, subject.name), seconds, logits))
    return Population(tuple(sorted(found, key=lambda one: one.seconds)), labels)


def sha_of(folder: Path, name: str) -> str:
    """Return the hash of a variant."""
    return next(one.sha256 for one in ArtefactFolder(folder).variants if one.name == name)


def fastest(subject: EvaluatedModel, images: np.ndarray) -> float:
    """Return seconds per image in the best batch: the least of some tries."""
    least = float("inf")
    for batch in BATCHES * TRIES:
        inputs, begun = {"image": images[:batch]}, time.perf_counter()
        subject.component("").run(inputs)
        least = min(least, (time.perf_counter() - begun) / batch)
    return least


@dataclass(frozen=True)
class Split:
    """A chain that one half of the samples certified, and what it does on the other half."""

    seed: int
    certificate: Certificate
    answers: Answers
    figures: dict[str, Any]


def split_of(whole: Population, risk: float, seed: int) -> Split | None:
    """Return the chain of one split; None if the risk was not certified."""
    drawn = np.random.default_rng(1_000 + seed).permutation(len(whole.labels))
    mine, other = np.array_split(drawn, 2)
    answers = whole.answers(mine, seed)
    (found,) = certify(answers, (risk,), confidence=CONFIDENCE, against="full", steps=STEPS)
    if not isinstance(found, Certificate):
        return None
    # The confidences there need the temperatures of the calibration.
    there = rescaled(whole, other, answers)
    chain, right = found.chain, there.classes == there.labels
    figures = {
        "chain": [whole.names[step] for step in chain.steps],
        "shares": chain.shares(there),
        "risk": float(chain.losses(there, there.differs).mean()),
        "accuracy": float(chain.losses(there, right * 1.0).mean()),
        "variants": dict(zip(whole.names, right.mean(1).tolist(), strict=True)),
        "control": float(control(answers, risk).losses(there, there.differs).mean()),
    }
    return Split(seed, found, answers, figures)


def rescaled(whole: Population, rows: np.ndarray, answers: Answers) -> Answers:
    """Return the answers to other samples, with confidences at the calibration's temperatures."""
    logits = [one.logits[rows] for one in whole.variants]
    warm = [one.temperature for one in answers.variants]
    sure = [
        [confidence(name, own, at) for own, at in zip(logits, warm, strict=True)]
        for name in MEASURES
    ]
    classes = np.stack([own.argmax(-1) for own in logits]).astype(np.int32)
    return replace(
        answers,
        learn=0,
        classes=classes,
        confidence=np.array(sure),
        labels=whole.labels[rows].astype(np.int32),
    )


def control(answers: Answers, risk: float) -> Chain:
    """Return the cheapest chain that does well enough on all of the calibration's samples."""
    every = replace(answers, learn=answers.n)
    table = every.differs
    chains = front(every, table, STEPS)
    good = [one for one in chains if one.losses(every, table).mean() <= risk]
    return min(good, key=lambda one: one.seconds(every))


def followed(splits: Sequence[Split], full: str) -> RouterPolicies:
    """Return the chains of all splits as policies of one router."""
    content: Any = SimpleNamespace(against="full", confidence=CONFIDENCE, full=full, embeds=False)
    policies = [policy_of(f"split-{one.seed:02d}", one.certificate, one.answers) for one in splits]
    routes = tuple(served_policy(content, policy) for policy in policies)
    return RouterPolicies(
        routes, {one.name: tuple(step.share for step in one.steps) for one in policies}
    )


@contextmanager
def under_load(folder: Path, policies: RouterPolicies) -> Iterator[LoadGenerator]:
    """Serve a group with policies, and yield a generator of load."""
    with tempfile.TemporaryDirectory() as place:
        options = RepositoryOptions(Path(place) / "repository")
        deploy(folder, options, policies=policies)
        with (
            Server(options.out, QUIET) as server,
            LoadGenerator(server.url, server_pid=server.pid, timeout_s=TIMEOUT_S) as load,
        ):
            yield load


def rates(
    load: LoadGenerator, streams: Mapping[str, Stream], *, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Return images per second of each stream in each round, measured in turn."""
    found: dict[str, list[float]] = {name: [] for name in streams}
    for turn in range(rounds):
        for at in np.random.default_rng(turn).permutation(len(streams)):
            name, stream = list(streams.items())[at]
            result = load.run([stream], seconds=seconds, warmup_s=0.3)
            found[name].append(refuse_errors(result, load.url).rate * stream.images)
    return found


def streams_of(
    model: str, files: np.ndarray, images: int, policies: Sequence[str], settings: Mapping[str, str]
) -> dict[str, Stream]:
    """Return the requests of each policy and each variant, which is chosen by its budget's name."""
    chosen = {name: {"policy": name} for name in policies}
    chosen |= {name: {"budget": setting} for name, setting in settings.items()}
    starts = range(0, len(files) - images + 1, images)
    make = partial(request, model)
    return {
        name: Stream(
            name,
            model,
            CLIENTS[images],
            tuple(
                make({"image": files[at : at + images]}, ("probabilities",), parameters)
                for at in starts
            ),
            images,
        )
        for name, parameters in chosen.items()
    }


def settings_of(folder: Path) -> dict[str, str]:
    """Return the name of each variant's budget."""
    return {one.name: one.main.variant.setting for one in ArtefactFolder(folder).variants}


def compared(split: Split, found: Mapping[str, Sequence[float]], full: str) -> dict[str, float]:
    """Return how many times as fast a chain is as the full model, and as the best single one."""
    own = np.array(found[f"split-{split.seed:02d}"])
    accurate = [
        name
        for name, accuracy in split.figures["variants"].items()
        if accuracy >= split.figures["accuracy"] or name == full
    ]
    single = max(accurate, key=lambda name: float(np.mean(found[name])))
    return {
        "times_full": float(np.exp(np.log(own / np.array(found[full])).mean())),
        "times_single": float(np.exp(np.log(own / np.array(found[single])).mean())),
        "single": single,  # type: ignore[dict-item]
    }


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return the geometric mean and the range."""
    return {"mean": float(np.exp(np.mean(np.log(values)))), "range": [min(values), max(values)]}


def trained(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the shipped group."""
    folder = grouped(BUILD / DATA, MEMBERS)
    whole = population(folder)
    found = [split_of(whole, options.risk, seed) for seed in range(options.splits)]
    splits = [one for one in found if one]
    full, settings = whole.names[-1], settings_of(folder)
    files = png_files(sign_batch(np.random.default_rng(TRAFFIC_SEED), TRAFFIC)[0])
    by_images: dict[str, Any] = {}
    with under_load(folder, followed(splits, full)) as load:
        for images in CLIENTS:
            names = [f"split-{one.seed:02d}" for one in splits]
            streams = streams_of(DATA, files, images, names, settings)
            measured = rates(load, streams, rounds=options.rounds, seconds=options.seconds)
            pairs = [compared(one, measured, full) for one in splits]
            by_images[str(images)] = {
                "clients": CLIENTS[images],
                "images_per_second": {name: measured[name] for name in settings},
                "splits": pairs,
                "times_full": summary([one["times_full"] for one in pairs]),
                "times_single": summary([one["times_single"] for one in pairs]),
            }
            print(images, by_images[str(images)]["times_full"], flush=True)
            print(images, by_images[str(images)]["times_single"], flush=True)
    held = sum(one.figures["risk"] <= options.risk for one in splits)
    return {
        "samples": len(whole.labels),
        "risk": options.risk,
        "certified": len(splits),
        "held": held,
        "control_held": sum(one.figures["control"] <= options.risk for one in splits),
        "shares": np.mean([one.figures["shares"] for one in alike(splits)], axis=0).tolist(),
        "splits": [{"seed": one.seed, **one.figures} for one in splits],
        "by_images": by_images,
        "aims": {
            f"times the full model, at least {TIMES_FULL}": {
                key: one["times_full"]["mean"] for key, one in by_images.items()
            },
            f"times the best single variant, at least {TIMES_SINGLE}": {
                key: one["times_single"]["mean"] for key, one in by_images.items()
            },
            f"splits within their risk, at least {HELD} of {options.splits}": held,
        },
    }


def alike(splits: Sequence[Split]) -> list[Split]:
    """Return the splits whose chain has the most frequent length."""
    lengths = [len(one.certificate.chain.steps) for one in splits]
    usual = max(set(lengths), key=lengths.count)
    return [one for one, length in zip(splits, lengths, strict=True) if length == usual]


def real_sized(options: argparse.Namespace) -> dict[str, Any]:
    """Measure ViTs of real size, of which as many images leave at each step as of the signs."""
    shares = json.loads((RESULTS / "groups.json").read_text())["shares"]
    folder = grouped(BUILD / "vits", {word: random_vit(word) for word in REAL})
    settings = settings_of(folder)
    names = [*reversed(settings)][-len(shares) :]  # a folder lists the most expensive first
    images = np.random.default_rng(0).integers(0, 256, (64, 224, 224, 3), dtype=np.uint8)
    models = {one.name: one for one in subjects_of_folder(ArtefactFolder(folder), ONNX)}
    left, steps = np.arange(len(images)), []
    for at, name in enumerate(names):
        threshold = None
        if at < len(shares) - 1:
            logits = models[name].component("")({"image": images[left]})["logits"]
            sure = confidence(MEASURES[0], logits, 1.0)
            gone = round(shares[at] * len(images))
            threshold = float(np.sort(sure)[-gone])
            left = left[sure < threshold]
        steps.append(StepRoute(name, sha_of(folder, name), threshold, 1.0, shares[at]))
    del models
    route = PolicyRoute(
        "shares", "full", CONFIDENCE, options.risk, options.risk, "top1", names[-1], 1.0, (*steps,)
    )
    files, by_images = png_files(images), dict[str, Any]()
    full = {names[-1]: settings[names[-1]]}
    with under_load(folder, RouterPolicies((route,), {"shares": tuple(shares)})) as load:
        for count, clients in REAL_CLIENTS.items():
            streams = {
                name: replace(stream, concurrency=clients)
                for name, stream in streams_of("vits", files, count, ["shares"], full).items()
            }
            seconds = options.seconds * REAL_WINDOW
            found = rates(load, streams, rounds=options.rounds, seconds=seconds)
            ratios = np.log(np.array(found["shares"]) / np.array(found[names[-1]]))
            by_images[str(count)] = {
                "clients": clients,
                "images_per_second": found,
                "times_full": {
                    "mean": float(np.exp(ratios.mean())),
                    "range": np.exp([ratios.min(), ratios.max()]).tolist(),
                },
            }
            print(count, by_images[str(count)]["times_full"], flush=True)
    return {
        "models": [f"ViT-{word.upper()}/16" for word in REAL],
        "shares": shares,
        "by_images": by_images,
    }


def random_vit(word: str) -> Path:
    """Return a checkpoint of this size with random weights."""
    config, path = REAL[word], BUILD / f"vit-{word}16.safetensors"
    if not path.exists():
        rng = np.random.default_rng(0)
        shape = (16, config.height_px, config.width_px, config.channels)
        save(
            path,
            family="sot",
            config=config.to_dict(),
            weights=SoT(config).eval().state_dict(),
            preprocessing=Preprocessing.of(config),
            labels=tuple(f"class {at}" for at in range(config.classes)),
            calibration={"image": rng.integers(0, 256, shape, dtype=np.uint8)},
            card={"data": "random weights and images"},
        )
    return path


def main() -> None:
    parser = options_of(__doc__, "groups", rounds=3, seconds=1.5)
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--risk", type=float, default=0.01)
    parser.add_argument("--real-size", action="store_true", help="ViTs with random weights")
    parser.set_defaults(out=None)  # groups.json or groups_real_size.json
    options = parser.parse_args()
    result = (real_sized if options.real_size else trained)(options)
    out = RESULTS / f"groups{'_real_size' * options.real_size}.json"
    write_result(options.out or out, result)
    for aim, found in result.get("aims", {}).items():
        print(f"{aim}: {found}")


if __name__ == "__main__":
    main()
