# SPDX-License-Identifier: Apache-2.0
"""The context of a fault: the service, its models, requests, and a random generator."""

import io
import random
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from chaos.callers import OWN_CHANNEL
from chaos.service import Service
from saccade.serving.bench.load_requests import request
from saccade.serving.repository.description import read_repository

SIDE_PX = 32
_LONGEST_MESSAGE = 2**31 - 1


@dataclass(frozen=True)
class Models:
    """The names that a repository serves: a router and its variants, the full one first."""

    router: str
    variants: tuple[str, ...]

    @property
    def full(self) -> str:
        """The largest variant."""
        return self.variants[0]

    @property
    def cheap(self) -> str:
        """The smallest variant."""
        return self.variants[-1]


@dataclass
class Scene:
    """The context of one fault, and the answers to its own requests.

    `checks` are the fault's own checks: what must be true, and whether it was.
    """

    service: Service
    models: Models
    rng: random.Random
    heard: Counter[str] = field(default_factory=Counter)
    checks: list[tuple[str, bool]] = field(default_factory=list)
    until_over: list[Any] = field(default_factory=list)  # called after everything was observed

    def send(self, messages: Iterable[bytes], *, timeout_s: float = 60, at_once: int = 1) -> None:
        """Send messages, `at_once` at a time, and count the answers by status."""
        import grpc

        limits = [("grpc.max_send_message_length", _LONGEST_MESSAGE), *OWN_CHANNEL]
        with grpc.insecure_channel(self.service.grpc, options=limits) as channel:
            ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

            def status(message: bytes) -> str:
                try:
                    ask(message, timeout=timeout_s)
                except grpc.RpcError as error:
                    return str(error.code().name)
                return "OK"

            with ThreadPoolExecutor(at_once) as threads:
                self.heard.update(threads.map(status, messages))


def models_of(repository: Path) -> Models:
    """Return the names in a repository."""
    deployment = read_repository(repository)
    return Models(deployment.model, tuple(sorted(deployment.variants, reverse=True)))


def budget_of(variant: str) -> float:
    """Return the share in a variant's name: 0.25 for `nac-b0250-fp32`."""
    (part,) = [word for word in variant.split("-") if word[0] == "b" and word[1:].isdigit()]
    return int(part[1:]) / 1000


def picture_request(
    models: Models,
    variant: str,
    pictures: Iterable[bytes] = (),
    outputs: tuple[str, ...] = ("probabilities",),
    **parameters: str,
) -> Any:
    """Return a message to the router, not yet serialized; by default with one small image."""
    from tritonclient.grpc import service_pb2

    files = list(pictures) or [picture(SIDE_PX, SIDE_PX, seed=0)]
    array = np.empty((len(files), 1), dtype=object)
    array[:, 0] = files
    chosen = {"budget": repr(budget_of(variant)), **parameters}
    return service_pb2.ModelInferRequest.FromString(
        request(models.router, {"image": array}, outputs, chosen)
    )


def picture(width_px: int, height_px: int, *, seed: int, kind: str = "PNG") -> bytes:
    """Return an image file with smooth random colors."""
    coarse = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(coarse).resize((width_px, height_px), Image.Resampling.BILINEAR)
    image.save(file, kind)
    return file.getvalue()
