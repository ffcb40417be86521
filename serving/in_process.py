# SPDX-License-Identifier: Apache-2.0
"""What a variant does without a server: its answers on a data set, and how fast it gives them."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from saccade.plugins.errors import ShapeError
from saccade.plugins.progress import Advance

BATCHES = (1, 2, 4, 8, 16, 32, 64)
_AS_FAST_AS = 0.95  # of the highest throughput: below that, the difference is more than noise
_USUAL_BATCH = 8
_SCORE_BATCH = 8  # a circuit of many modules is fastest at about eight images a call


@dataclass
class Calls:
    """Durations of equal calls to one session, gathered over several rounds.

    Units: seconds a call; core_s is processor time of all calls together.
    """

    batch: int
    seconds: list[float] = field(default_factory=list)
    core_s: float = 0.0

    @property
    def inferences_per_second(self) -> float:
        """Images over time, all calls together."""
        return self.batch * len(self.seconds) / sum(self.seconds)

    @property
    def core_ms_per_image(self) -> float:
        """Processor time an image, in milliseconds."""
        return 1e3 * self.core_s / (self.batch * len(self.seconds))

    def summary(self) -> dict[str, float]:
        """Throughput and quantiles, as the frontier stores them."""
        quantiles = np.percentile(1e3 * np.asarray(self.seconds), (50, 95, 99))
        names = ("p50_ms", "p95_ms", "p99_ms")
        return {
            "inferences_per_second": round(self.inferences_per_second, 2),
            **{name: round(float(value), 4) for name, value in zip(names, quantiles, strict=True)},
            "calls": len(self.seconds),
        }


def sample(session: Any, images: np.ndarray, calls: Calls, *, seconds: float) -> None:
    """Call the session on the same batch for a while and add the durations to `calls`.

    Shapes: images [n h w c]; the batch repeats them as often as it takes.
    """
    batch = np.resize(images, (calls.batch, *images.shape[1:]))
    feed = {session.get_inputs()[0].name: batch}
    session.run(None, feed)  # the first call of a shape plans its memory
    core = time.process_time()
    end = time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        session.run(None, feed)
        stop = time.perf_counter()
        calls.seconds.append(round(stop - start, 8))
        if stop >= end:
            break
    calls.core_s += time.process_time() - core


@dataclass(frozen=True)
class InProcess:
    """One variant without a server.

    Shapes: logits float32 [n classes], one row for each image.
    """

    logits: np.ndarray
    calls: dict[int, Calls]

    @property
    def best_batch(self) -> int:
        """The batch size to serve with."""
        return best_batch(self.calls)

    def summary(self) -> dict[str, Any]:
        """The figures as the frontier stores them."""
        points = {f"batch_{size}": calls.summary() for size, calls in self.calls.items()}
        return {"threads": 1, "best_batch": self.best_batch, **points}


def best_batch(calls: Mapping[int, Calls]) -> int:
    """Of the batch sizes that reach nearly the highest throughput, the one nearest to eight.

    A smaller batch costs the server more for each request, a larger one makes requests wait.
    """
    rates = {size: each.inferences_per_second for size, each in calls.items()}
    near = [size for size in rates if rates[size] >= _AS_FAST_AS * max(rates.values())]
    return min(near, key=lambda size: (abs(math.log2(size / _USUAL_BATCH)), size))


def measure(
    sessions: Mapping[str, Any],
    images: np.ndarray,
    *,
    seconds: float,
    rounds: int,
    advance: Advance,
) -> dict[str, InProcess]:
    """Every session's answers, and its speed at each batch size, taking turns.

    Units:  seconds a session and batch size over all rounds.
    Raises: ShapeError if the images are not what the models take.
    """
    answers = {name: logits(session, images) for name, session in sessions.items()}
    calls = {name: {size: Calls(size) for size in BATCHES} for name in sessions}
    for _ in range(rounds):
        for size in BATCHES:
            for name, session in sessions.items():
                sample(session, images, calls[name][size], seconds=seconds / rounds)
                advance(1, f"{name} in process, batch {size}")
    return {name: InProcess(answers[name], calls[name]) for name in sessions}


def logits(session: Any, images: np.ndarray) -> np.ndarray:
    """The session's logits for every image.

    Shapes: images uint8 [n h w c] -> float32 [n classes].
    Raises: ShapeError if the images are not what the model takes.
    """
    spec = session.get_inputs()[0]
    if list(images.shape[1:]) != list(spec.shape[1:]) or images.dtype != np.uint8:
        raise ShapeError(
            f"The data's images are {images.dtype} {list(images.shape[1:])}, the model takes "
            f"uint8 {list(spec.shape[1:])} (height, width, channels). "
            "Name the data the model was trained on with --data."
        )
    parts = [
        session.run(["logits"], {spec.name: images[at : at + _SCORE_BATCH]})[0]
        for at in range(0, len(images), _SCORE_BATCH)
    ]
    return np.concatenate(parts)


def correct(scores: np.ndarray, labels: np.ndarray, *, top: int = 1) -> np.ndarray:
    """Whether each image's label is among its `top` highest scores.

    Shapes: scores [n classes], labels [n] -> bool [n].
    """
    best = np.argsort(-scores, axis=1, kind="stable")[:, :top]
    hit: np.ndarray = (best == labels[:, None]).any(axis=1)
    return hit
