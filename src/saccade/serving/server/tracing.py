# SPDX-License-Identifier: Apache-2.0
"""Traces of a served repository, where the environment of `saccade serve` asks for them.

The spans are the models' own (model_repository/router/tracing.py). The server's part is to hand a
caller's context on. Its own trace mode is not used: it follows every context that a caller sends,
whether sampled or not, and knows nothing of decoding, of lanes and of calls for several requests.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from saccade.serving.server.addresses import ServeOptions

_RULES: Mapping[str, Any] = vars(import_module("saccade.model_repository.router.tracing"))
_wants_tracing: Callable[[Mapping[str, str]], bool] = _RULES["wants_tracing"]
_obstacle: Callable[[Mapping[str, str]], str] = _RULES["obstacle"]

FILE = "tracing.py"  # of the router, since it knows of contexts
CLOSE_S: float = _RULES["CLOSE_S"]  # that a model's process takes at most for its last spans
_PATTERN = f"(?i)^({'|'.join(_RULES['CONTEXT'])})$"


def is_traced(models: Path, environment: Mapping[str, str]) -> bool:
    """True if these models are to send spans; a router of an older release knows none."""
    return _wants_tracing(environment) and any(models.glob(f"*/1/{FILE}"))


def trace_arguments(
    models: Path, options: ServeOptions, environment: Mapping[str, str]
) -> list[str]:
    """Arguments of the server by which callers' contexts reach the router."""
    # A router that does not know these parameters would refuse the requests that have them.
    if not is_traced(models, environment):
        return []
    http = [f"--http-header-forward-pattern={_PATTERN}"] if options.http else []
    return [f"--grpc-header-forward-pattern={_PATTERN}", *http]


def trace_notices(models: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """What stands between an endpoint that is named and spans that arrive there."""
    if not _wants_tracing(environment):
        return
    if not is_traced(models, environment):
        yield (
            f"No spans are sent: {models} was written by an older release. Run `saccade "
            "repository` again, or unset OTEL_EXPORTER_OTLP_ENDPOINT."
        )
    elif reason := _obstacle(environment):
        yield f"No spans are sent: {reason}. Or unset OTEL_EXPORTER_OTLP_ENDPOINT."
