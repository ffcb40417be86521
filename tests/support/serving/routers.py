# SPDX-License-Identifier: Apache-2.0
"""A router's own code without a server: its routes, requests to it, and what became of them."""

import json
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from picture_files import png
from places import module_at
from router_code import ROUTER

FIGURES = ("score_name", "score_unit", "score", "lower_bound", "inferences_per_second", "p95_ms")
PREPROCESSING = {
    "height_px": 8, "width_px": 8, "channels": 1, "resize_mode": "shortest", "resize_px": [8, 8],
    "interpolation": "bilinear", "antialias": True, "fill": [0], "conversion": "before",
    "alpha": "white", "exif": True, "cut": [], "channel_order": "rgb", "max_image_mib": 16,
    "max_megapixels": 50, "max_side_px": 16384, "min_side_px": 2,
}  # fmt: skip


def router_arguments(routers: int = 1, name: str = "nac_0_0") -> dict[str, str]:
    """Return what the server tells one of several processes of a router."""
    config = json.dumps({"instance_group": [{"count": routers}]})
    return {"model_name": "nac", "model_instance_name": name, "model_config": config}


class Sources:
    """The files of the router, as the server imports them: `src.lane.Lane`.

    Each test imports them anew, after the server's own module (the fixture `pb`) is there.
    """

    def __getattr__(self, name: str) -> ModuleType:
        return import_module(name)


src = Sources()


def variant_route(name: str, **fields: Any) -> dict[str, Any]:
    """Return a variant as routes.json has it, without figures unless they are given."""
    return {
        **dict.fromkeys(FIGURES), "name": name, "sha256": "0" * 64, "budget": 1.0,
        "setting": "b1000", "precision": "fp32", "multiply_adds": 1, "run_batch": 8,
        "parts": {"": name}, "facts": {}, "classes": None, **fields,
    }  # fmt: skip


def model_of(place: Path, variants: Sequence[Any], outputs: dict[str, int], **more: Any) -> Any:
    """Return the router's model over these variants and outputs, which is not initialized yet."""
    part = {
        "inputs": [{"name": "image", "axes": "b 8 8 1", "dtype": "uint8"}],
        "outputs": [
            {"name": name, "axes": f"b {size}", "dtype": "float32"}
            for name, size in outputs.items()
        ],
        "optional": [], "encoded": ["image"],
    }  # fmt: skip
    content = {
        "schema": "saccade.routes", "version": 3, "model": "nac", "family": "nac",
        "preprocessing": PREPROCESSING, "parts": {"": part}, "variants": variants, **more,
    }  # fmt: skip
    (place / "model.py").write_bytes((ROUTER / "model.py").read_bytes())
    (place / "routes.json").write_text(json.dumps(content))
    return module_at(place / "model.py").TritonPythonModel()


def execute(router: Any, requests: Sequence[Any]) -> None:
    """Let a router execute requests, and deliver what it returns, as the server does."""
    for request, response in zip(requests, router.execute(requests), strict=True):
        if response is not None:
            request.send(response, flags=1)


def shade_png(shade: int = 0, side: int = 8) -> bytes:
    """Return a picture of one shade."""
    return png(np.full((side, side), shade, np.uint8))


class FakeRequest:
    """One request for these files, or for a black image, and the sender of its answer.

    Units: timeout is microseconds, as the server hands it on; `gone` is what a caller becomes.
    """

    def __init__(
        self,
        *files: bytes,
        outputs: Sequence[str] = ("logits", "variant", "saccade_lanes"),
        timeout: int = 0,
        identity: str = "",
        **parameters: Any,
    ) -> None:
        array = np.array(files or (shade_png(),), dtype=object).reshape(-1, 1)
        tensor = SimpleNamespace(
            name=lambda: "image", shape=lambda: list(array.shape), as_numpy=lambda: array
        )
        self.inputs = lambda: [tensor]
        self.parameters = lambda: json.dumps(parameters)
        self.timeout, self.request_id = (lambda: timeout), (lambda: identity)
        self.requested_output_names = lambda: list(outputs)
        self.get_response_sender = lambda: self
        self.response: Any = None
        self.gone, self._answered = False, threading.Event()

    def send(self, response: Any, flags: int) -> None:
        assert self.response is None, "answered twice"
        self.response = response
        self._answered.set()

    def is_cancelled(self) -> bool:
        return self.gone

    def answered(self) -> Any:
        """Return the response once it is there, whether it is an answer or an error."""
        assert self._answered.wait(60), "no answer"
        return self.response

    def answer(self) -> dict[str, np.ndarray]:
        """Return the arrays of the answer, by name."""
        assert self.error() is None, self.error()
        return self.answered().tensors

    def error(self) -> tuple[str, str] | None:
        """Return code and words of the refusal, or None."""
        error = self.answered().error
        return error and (error.code(), error.message())
