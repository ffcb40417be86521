# SPDX-License-Identifier: Apache-2.0
"""What goes to the router and comes back: the same for the blocking and the asyncio client."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from saccade.plugins.errors import SaccadeError, ServerFailed
from saccade.serving.embeddings import Embeddings
from saccade.serving.images import Image, encoded, requests

DEFAULT_URL = "127.0.0.1:8001"


@dataclass(frozen=True)
class Classification:
    """The most probable labels of one image, best first, and the variant that answered."""

    labels: tuple[tuple[str, float], ...]
    variant: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        labels = [{"label": label, "probability": value} for label, value in self.labels]
        return {"labels": labels, "variant": self.variant}


def choice(
    budget: float | None, min_score: float | None = None, max_latency_ms: float | None = None
) -> dict[str, str]:
    """The request parameter by which the router chooses; none takes the full model.

    Raises: SaccadeError if there is more than one, or it is out of range.
    """
    given = {"budget": budget, "min_score": min_score, "max_latency_ms": max_latency_ms}
    chosen = {name: float(value) for name, value in given.items() if value is not None}
    if len(chosen) > 1:
        flags = ", ".join("--" + name.replace("_", "-") for name in chosen)
        raise SaccadeError(f"{flags} were given together; each chooses the variant. Give one.")
    for name, value in chosen.items():
        top = math.inf if name == "max_latency_ms" else 1.0
        if not 0 < value <= top or math.isinf(value):
            wanted = "above 0" if math.isinf(top) else "above 0 and at most 1"
            raise SaccadeError(f"{name} is {value:g}, expected a number {wanted}.")
    # As text: a number in a request is an integer or a double by its looks.
    return {name: repr(value) for name, value in chosen.items()}


def classify_calls(
    images: Sequence[Image] | np.ndarray, parameters: dict[str, str], top: int, timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Arguments of `infer` for each request that classifies some of the images."""
    from tritonclient.grpc import InferRequestedOutput

    if not 1 <= top <= 100_000:
        raise SaccadeError(f"top is {top}, expected 1 or more labels an image.")
    outputs = [
        InferRequestedOutput("probabilities", class_count=top),
        InferRequestedOutput("variant"),
    ]
    for files in list(requests(encoded(images))):
        yield _call(files, outputs, parameters, timeout_s)


def embed_calls(
    images: Sequence[Image] | np.ndarray, parameters: dict[str, str], timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Arguments of `infer` for each request that embeds some of the images."""
    from tritonclient.grpc import InferRequestedOutput

    names = ("embedding", "variant", "variant_sha256")
    outputs = [InferRequestedOutput(name) for name in names]
    for files in list(requests(encoded(images))):
        yield _call(files, outputs, parameters, timeout_s)


def classifications(result: Any) -> list[Classification]:
    """What a request to classify was answered."""
    rows = _output(result, "probabilities")
    variants = _output(result, "variant").reshape(-1)
    return [
        Classification(tuple(_label(entry) for entry in row), _text(variant))
        for row, variant in zip(rows, variants, strict=True)
    ]


def joined_embeddings(results: Sequence[Any]) -> Embeddings:
    """What the requests to embed were answered, which must all come of one variant."""
    made_by = {
        (_text(name), _text(digest))
        for result in results
        for name, digest in zip(
            _output(result, "variant").reshape(-1),
            _output(result, "variant_sha256").reshape(-1),
            strict=True,
        )
    }
    if len(made_by) != 1:
        raise ServerFailed(
            f"The answers come from {len(made_by)} variants ({sorted(made_by)}): the server was "
            "exchanged between two requests. Embed again."
        )
    ((variant, sha256),) = made_by
    vectors = np.concatenate([_output(result, "embedding") for result in results])
    return Embeddings(vectors, variant, sha256)


def variants_of(config: Any, model: str) -> tuple[str, ...]:
    """The variants behind a router, from its configuration.

    Raises: SaccadeError if the model is no router.
    """
    names = config.config.parameters["variants"].string_value
    if not names:
        raise SaccadeError(
            f"{model} is not a router: it names no variants. Give the name that "
            "`saccade serve` shows, or write the repository anew with `saccade repository`."
        )
    return tuple(names.split(","))


def check_timeout(timeout_s: float) -> float:
    """A deadline that is one.

    Raises: SaccadeError if it is not above 0.
    """
    if not 0 < timeout_s < math.inf:
        raise SaccadeError(f"timeout_s is {timeout_s}, expected seconds above 0.")
    return timeout_s


def _call(
    files: list[bytes], outputs: list[Any], parameters: dict[str, str], timeout_s: float
) -> dict[str, Any]:
    from tritonclient.grpc import InferInput

    image = InferInput("image", [len(files), 1], "BYTES")
    image.set_data_from_numpy(np.array(files, dtype=object).reshape(-1, 1))
    return {
        "inputs": [image],
        "outputs": outputs,
        "parameters": parameters or None,
        "client_timeout": timeout_s,
        # The same to the server, which drops what still waits when nobody listens any more.
        "timeout": max(1, int(timeout_s * 1e6)),
    }


def _output(result: Any, name: str) -> np.ndarray:
    found = result.as_numpy(name)
    if found is None or found.size == 0:
        raise ServerFailed(
            f"The answer has no {name}. The server must run with numpy < 2: see `saccade doctor`."
        )
    return np.asarray(found)


def _label(entry: bytes) -> tuple[str, float]:
    # `probability:index:label`, and no label where the model has none.
    probability, index, *label = entry.decode().split(":", 2)
    return (label[0] if label else index), float(probability)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
