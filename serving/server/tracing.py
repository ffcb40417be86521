# SPDX-License-Identifier: Apache-2.0
"""Traces of a served repository, if the environment of `saccade serve` requests them.

The models create the spans (model_repository/router/tracing.py); the server only forwards a
caller's context. The server's own trace mode is not used, because it follows every context that a
caller sends, whether sampled or not, and does not know decoding, lanes or batched requests.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from saccade.serving.server.addresses import ServeOptions

_RULES: Mapping[str, Any] = vars(import_module("saccade.model_repository.router.tracing"))
_wants_tracing: Callable[[Mapping[str, str]], bool] = _RULES["wants_tracing"]
_obstacle: Callable[[Mapping[str, str]], str] = _RULES["obstacle"]

FILE = "tracing.py"  # in the router, if it supports contexts
CLOSE_S: float = _RULES["CLOSE_S"]  # the longest time that a model needs to send its last spans
_PATTERN = f"(?i)^({'|'.join(_RULES['CONTEXT'])})$"


def is_traced(models: Path, environment: Mapping[str, str]) -> bool:
    """Return True if these models send spans; a router of an older release cannot."""
    return _wants_tracing(environment) and any(models.glob(f"*/1/{FILE}"))


def trace_arguments(
    models: Path, options: ServeOptions, environment: Mapping[str, str]
) -> list[str]:
    """Return the server arguments that forward callers' contexts to the router."""
    # A router that does not know these parameters would refuse requests that contain them.
    if not is_traced(models, environment):
        return []
    http = [f"--http-header-forward-pattern={_PATTERN}"] if options.http else []
    return [f"--grpc-header-forward-pattern={_PATTERN}", *http]


def trace_notices(models: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield reasons why no spans reach the configured endpoint."""
    if not _wants_tracing(environment):
        return
    if not is_traced(models, environment):
        yield (
            f"No spans are sent: {models} was written by an older release. Run `saccade "
            "repository` again, or unset OTEL_EXPORTER_OTLP_ENDPOINT."
        )
    elif reason := _obstacle(environment):
        yield f"No spans are sent: {reason}. Or unset OTEL_EXPORTER_OTLP_ENDPOINT."
