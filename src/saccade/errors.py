# SPDX-License-Identifier: Apache-2.0
"""Errors that the caller can fix, and how the command line ends for each kind."""

from importlib import import_module
from types import ModuleType

DISTRIBUTION = "saccade-serving"


class SaccadeError(Exception):
    """Wrong input: the message says what was found, what was expected and what to do."""

    exit_code = 2


class ShapeError(SaccadeError):
    """A tensor whose shape does not fit."""


class GateFailed(SaccadeError):
    """A check ran and said no."""

    exit_code = 1


class ServerFailed(SaccadeError):
    """The server could not be started, died, or does not answer."""

    exit_code = 3


class MissingPackage(SaccadeError):
    """An optional package is needed and cannot be imported."""


def install(extra: str) -> str:
    """The pip command that brings an extra. The name `saccade` on PyPI is another project's."""
    return f"pip install '{DISTRIBUTION}[{extra}]' (in a clone: pip install '.[{extra}]')"


def require(module: str, *, extra: str) -> ModuleType:
    """The imported module, or one sentence that names the pip command.

    Raises: MissingPackage if it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackage(
            f"{module} is not importable ({error}). Install it with: {install(extra)}"
        ) from error
