# SPDX-License-Identifier: Apache-2.0
"""Errors that the caller can fix, each with the exit code of the command line."""

from importlib import import_module
from types import ModuleType

DISTRIBUTION = "saccade-serving"
PUBLISHED = False  # whether PyPI has it; messages and a test of the pages follow


class SaccadeError(Exception):
    """Wrong input. The message says what was found, what was expected and what to do."""

    exit_code = 2


class ShapeError(SaccadeError):
    """A tensor whose shape does not fit."""


class Damaged(SaccadeError):
    """A file, a folder or a part of one that is incomplete or does not keep to its format."""

    def __init__(self, place: object, why: str, command: str = "") -> None:
        """Say what is wrong with `place`; `command` writes such a file."""
        super().__init__(str(place), why, command)  # the arguments, so that it can be sent

    def __str__(self) -> str:
        place, why, command = self.args
        writer = f" with: {command}" if command else "."
        return f"{place}: {why}. Copy it again from its source, or write it again{writer}"


class GateFailed(SaccadeError):
    """A check ran and failed."""

    exit_code = 1


class ServerFailed(SaccadeError):
    """The server could not be started, died, or does not answer.

    `retry` says whether another try can help; `status` is the gRPC status of a failed call, such
    as UNAVAILABLE, or empty.
    """

    exit_code = 3

    def __init__(self, message: str, *, retry: bool = False, status: str = "") -> None:
        super().__init__(message)
        self.retry, self.status = retry, status


class MissingPackage(SaccadeError):
    """An optional package is needed and cannot be imported."""


def install(extra: str) -> str:
    """Return the pip command that installs an extra; `saccade` on PyPI is another project."""
    name = DISTRIBUTION if PUBLISHED else "."
    return f"pip install '{name}[{extra}]'{'' if PUBLISHED else ' (in a clone of the repository)'}"


# The extra that installs each package, by the package's import name.
_EXTRAS = {
    "torch": "export",
    "onnx": "export",
    "onnxscript": "export",
    "onnx_graphsurgeon": "export",
    "msgpack": "export",
    "instant_clip_tokenizer": "text",
    "tokenizers": "text",
    "onnxruntime": "cpu",
    "openvino": "openvino",
    "pytriton": "serve",
    "sklearn": "bench",
    "scipy": "bench",
    "matplotlib": "bench",
    "plotly": "bench",
    "jinja2": "bench",
    "yaml": "yaml",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "nicegui": "explore",
    "starlette": "openai",
    "uvicorn": "openai",
    "httptools": "openai",
    "uvloop": "openai",
    "orjson": "openai",
    "huggingface_hub": "hub",
    "pyarrow": "bulk",
    "ray": "bulk",
    "opentelemetry": "trace",
    "envoy": "proxy",
    "tensorrt_rtx": "rtx",
    "tensorrt": "gpu",
}


def missing_package(error: BaseException) -> MissingPackage | None:
    """Turn a failed import of an extra's package into an error that contains the pip command."""
    name = error.name if isinstance(error, ImportError) else None
    extra = _EXTRAS.get((name or "").partition(".")[0])
    return None if name is None or extra is None else _missing(name, error, extra)


def _missing(module: str, error: BaseException, extra: str) -> MissingPackage:
    return MissingPackage(
        f"{module} is not importable ({error}). Install it with: {install(extra)}"
    )


def require(module: str, *, extra: str) -> ModuleType:
    """Import and return a module of an optional package.

    Raises: MissingPackage, with the pip command, if it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise _missing(module, error, extra) from error
