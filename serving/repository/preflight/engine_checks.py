# SPDX-License-Identifier: Apache-2.0
"""Check plans and their manifests: the artefact, TensorRT, GPUs and batches they are for."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.plugins.availability import TENSORRT_LIBRARY
from saccade.serving.repository.preflight.report import NotChecked
from saccade.serving.repository.preflight.repository import RepositoryModel, read_engine
from saccade.serving.repository.preflight.target import Target
from saccade.serving.repository.runtimes.plans import (
    RTX,
    check_plan,
    engine_file,
    is_loadable,
    plan_files,
)
from saccade.serving.repository.stored_sample import read_sample

if TYPE_CHECKING:
    from saccade.exporter.runtimes.tensorrt.engine_manifest import EngineManifest


def check_engines(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that every plan has a manifest and matches it."""
    for path in sorted(model.folder.glob("engine-*.json")):
        try:
            read_engine(path)
        except SaccadeError as error:
            yield str(error)
    names = plan_files(tuple(model.engines))
    for capability, engine in model.engines.items():
        plan = model.version / names[capability]
        if plan.is_file() and sha256_of(plan) != engine.file.sha256:
            yield (
                f"{plan.name} is not the plan of {engine_file(capability)}. A plan is executable "
                "code: saccade serves only plans that it built. Write the repository again."
            )
        if not is_loadable(engine):
            yield f"its plan for {capability} {RTX}."
        else:
            yield from _fitting(model, capability, engine)
    if target.tensorrt is None:
        raise NotChecked(
            "plans were built with TensorRT "
            + ", ".join(sorted({engine.version for engine in model.engines.values()}))
            + ". To compare this with the server's version, pass --tensorrt-version VERSION"
        )
    for capability, engine in model.engines.items():
        if _short(engine.version) != _short(target.tensorrt):
            yield (
                f"its plan for {capability} was built with TensorRT {engine.version}, but the "
                f"server has {target.tensorrt}. Build it with the server's version."
            )


def _fitting(model: RepositoryModel, capability: str, engine: "EngineManifest") -> Iterator[str]:
    try:
        check_plan(Path(engine_file(capability)), engine, model.manifest)
    except SaccadeError as error:
        yield str(error)
    if engine.compute_capabilities != (capability,):
        yield (
            f"{engine_file(capability)} is for {', '.join(engine.compute_capabilities)}, expected "
            f"{capability} from its name."
        )


def check_profiles(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that profiles take every batch that the configuration admits."""
    largest = model.config.max_batch_size
    shapes = {}
    if model.sampled and model.sample.is_file():
        shapes = {name: array.shape for name, array in read_sample(model.sample).inputs.items()}
    for capability, engine in model.engines.items():
        for name, profile in sorted(engine.profiles.items()):
            low, high = profile["min"], profile["max"]
            if low[0] > 1 or high[0] < largest:
                yield (
                    f"max_batch_size is {largest}, but the profile of {name!r} for {capability} "
                    f"takes {low[0]} to {high[0]}."
                )
            shape = shapes.get(name, low)
            if not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=False)):
                yield (
                    f"the stored sample's {name!r} is {list(shape)}, but the profile for "
                    f"{capability} takes {list(low)} to {list(high)}."
                )


def check_capabilities(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that there is a plan for each GPU of this machine."""
    for capability in sorted({gpu.capability for gpu in target.gpus} - set(model.engines)):
        yield (
            f"this machine has a GPU of compute capability {capability}, but the plans are for "
            f"{', '.join(model.engines)}."
        )
    if not target.gpus:
        raise NotChecked("this machine has no GPU to compare the plans with")


def check_plugins(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that all plans need the same library of plugins, and that it loads if it is here."""
    needed = {pair for engine in model.engines.values() for pair in engine.plugins.items()}
    names = sorted({name for name, _ in needed})
    absent = []
    for name in names:
        digests = sorted(digest for plugin, digest in needed if plugin == name)
        path = TENSORRT_LIBRARY.with_name(name)
        if len(digests) > 1:
            yield (
                f"its plans were built with different {name} files, but a server loads only one. "
                "Build them again with one."
            )
        elif not path.is_file():
            absent.append(name)
        elif sha256_of(path) != digests[0]:
            yield f"its plans were built with a different {name} than the one installed here."
        else:
            try:
                ctypes.CDLL(str(path))
            except OSError as error:
                yield f"{name} cannot be loaded ({error})."
    if absent:
        raise NotChecked(
            f"its plans call plugins of {', '.join(absent)}, which is not built here. The server "
            "loads it with --backend-config=tensorrt,plugins="
        )


def _short(version: str) -> tuple[str, ...]:
    # Plans work with one release (major, minor and patch), whatever the build number.
    return tuple(version.split(".")[:3])
