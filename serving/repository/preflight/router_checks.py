# SPDX-License-Identifier: Apache-2.0
"""Check the router: this release's code, and the files written for the repository's models."""

from collections.abc import Iterator

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.preprocessing import Preprocessing
from saccade.serving.repository.adaptive import adaptive_of
from saccade.serving.repository.adaptive import faults as adaptive_faults
from saccade.serving.repository.image_caps import absurd_caps
from saccade.serving.repository.policies import faults, policies_of
from saccade.serving.repository.preflight.config_checks import departing_files
from saccade.serving.repository.preflight.difference import differences
from saccade.serving.repository.preflight.rendered import (
    FREE_OF_ROUTES,
    rendered_router,
    rendered_router_files,
    rendered_routes,
    variants_of,
    zero_shot,
)
from saccade.serving.repository.preflight.report import NotChecked
from saccade.serving.repository.preflight.repository import Repository
from saccade.serving.repository.preflight.target import Target


def check_fields(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the router's configuration is the one that saccade writes for these models."""
    yield from differences(repository.router.fields, rendered_router(repository), {})


def check_content(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the folder has the routes, the labels, and this release's code, which is run."""
    yield from departing_files(repository.router.folder, rendered_router_files(repository))


def check_router(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the server can pass on the router's answers, and its variants take its batches."""
    config = repository.router.config
    for model in repository.models:
        if config.max_batch_size > model.config.max_batch_size:
            yield (
                f"its max_batch_size is {config.max_batch_size}, but {model.name} takes at most "
                f"{model.config.max_batch_size}."
            )


def check_routes(repository: Repository, target: Target) -> Iterator[str]:
    """Check that routes.json is what saccade writes for these models, with sensible caps."""
    try:
        content = repository.routes
    except NotChecked as error:
        yield f"{error}."
        return
    yield from (f"routes.json: {reason}" for reason in _caps(content["preprocessing"]))
    hashes = {variant.name: variant.sha256 for variant in variants_of(repository)}
    yield from (f"routes.json: {reason}" for reason in faults(policies_of(content), hashes))
    budgets = [float(variant.main.variant.budget) for variant in variants_of(repository)]
    if (adaptive := adaptive_of(content)) is not None:
        reasons = adaptive_faults(adaptive, policies_of(content), budgets)
        yield from (f"routes.json: adaptive: {reason}" for reason in reasons)
    for reason in differences(content, rendered_routes(repository), FREE_OF_ROUTES):
        yield f"routes.json: {reason}"
    if budgets != sorted(budgets, reverse=True):
        yield f"budgets are in the order {budgets}, expected largest first."
    for name in zero_shot(repository):
        yield from _vectors(repository, f"{name}.npy")


def _caps(declared: object) -> Iterator[str]:
    if isinstance(declared, dict):
        try:
            yield from (f"{reason}." for reason in absurd_caps(Preprocessing.from_dict(declared)))
        except SaccadeError as error:
            yield str(error)


def _vectors(repository: Repository, name: str) -> Iterator[str]:
    try:
        # Memory-mapped: a header that claims more than the file has is refused, not allocated.
        path = repository.router.version / name
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        yield f"the vectors of labels in {name} cannot be read ({error})."
        return
    count = len(repository.router.labels)
    if vectors.ndim != 2 or len(vectors) != count or not np.isfinite(vectors).all():
        yield (
            f"{name} has vectors of shape {vectors.shape} for {count} labels, expected one finite "
            "vector per label."
        )
