# SPDX-License-Identifier: Apache-2.0
"""What stands in a written repository, and what preflight says of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_artefacts import MODEL, rehash

from saccade.serving.repository.model_config import parse_config
from saccade.serving.repository.preflight.repository import Target, open_repository
from saccade.serving.repository.preflight.verb import steps


def config_of(repository: Path, model: str) -> Any:
    """Return the configuration of a model."""
    return parse_config((repository / model / "config.pbtxt").read_text())


def routes_of(repository: Path, model: str = MODEL) -> Any:
    """Return what the router of a model reads."""
    return json.loads((repository / model / "1" / "routes.json").read_text())


def change_routes(repository: Path, change: Callable[[Any], object]) -> None:
    """Change what the router reads, and the hashes with it."""
    routes = routes_of(repository)
    change(routes)
    (repository / MODEL / "1" / "routes.json").write_text(json.dumps(routes))
    rehash(repository)


def reasons(repository: Path, *checks: str, model: str = MODEL) -> list[str]:
    """Return what these checks of preflight find wrong with a router, by its name."""
    made = steps(open_repository(repository), Target(bundled=False))
    runs = [run for name, one, run in made if one == model and name in checks]
    return [reason for run in runs for reason in run().reasons]
