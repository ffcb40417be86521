# SPDX-License-Identifier: Apache-2.0
"""Plans and their manifests: of this artefact, of TensorRT, for these GPUs and batches."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.errors import SaccadeError
from saccade.files import sha256_of
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
    """Every plan has its manifest, and is what that says."""
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
                f"{plan.name} is not the plan of {engine_file(capability)}: a plan is executable "
                "code, and only those that saccade built are served. Write the repository again."
            )
        if not is_loadable(engine):
            yield f"its plan for {capability} {RTX}."
        else:
            yield from _fitting(model, capability, engine)
    if target.tensorrt is None:
        raise NotChecked(
            "plans are of TensorRT "
            + ", ".join(sorted({engine.version for engine in model.engines.values()}))
            + "; whether that is the server's, --tensorrt-version VERSION lets it be checked"
        )
    for capability, engine in model.engines.items():
        if _short(engine.version) != _short(target.tensorrt):
            yield (
                f"its plan for {capability} was built with TensorRT {engine.version}, the server "
                f"has {target.tensorrt}. Build it with the server's version."
            )


def _fitting(model: RepositoryModel, capability: str, engine: "EngineManifest") -> Iterator[str]:
    try:
        check_plan(Path(engine_file(capability)), engine, model.manifest)
    except SaccadeError as error:
        yield str(error)
    if engine.compute_capabilities != (capability,):
        yield (
            f"{engine_file(capability)} is for {', '.join(engine.compute_capabilities)}, its name "
            f"says {capability}."
        )


def check_profiles(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Profiles reach as far as the configuration lets requests in."""
    largest = model.config.max_batch_size
    shapes = {}
    if model.sampled and model.sample.is_file():
        shapes = {name: array.shape for name, array in read_sample(model.sample).inputs.items()}
    for capability, engine in model.engines.items():
        for name, profile in sorted(engine.profiles.items()):
            low, high = profile["min"], profile["max"]
            if low[0] > 1 or high[0] < largest:
                yield (
                    f"max_batch_size is {largest}, the profile of {name!r} for {capability} takes "
                    f"{low[0]} to {high[0]}."
                )
            shape = shapes.get(name, low)
            if not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=False)):
                yield (
                    f"the stored sample's {name!r} is {list(shape)}, its profile for {capability} "
                    f"takes {list(low)} to {list(high)}."
                )


def check_capabilities(model: RepositoryModel, target: Target) -> Iterator[str]:
    """There is a plan for the GPU at hand."""
    for capability in sorted({gpu.capability for gpu in target.gpus} - set(model.engines)):
        yield f"the GPU at hand is {capability}, plans are for {', '.join(model.engines)}."
    if not target.gpus:
        raise NotChecked("there is no GPU at hand to hold the plans against")


def check_plugins(model: RepositoryModel, target: Target) -> Iterator[str]:
    """The library of plugins that the plans call is one and the same, and loads where it is."""
    needed = {pair for engine in model.engines.values() for pair in engine.plugins.items()}
    names = sorted({name for name, _ in needed})
    absent = []
    for name in names:
        digests = sorted(digest for plugin, digest in needed if plugin == name)
        path = TENSORRT_LIBRARY.with_name(name)
        if len(digests) > 1:
            yield f"its plans were built with different {name}; a server loads one of them."
        elif not path.is_file():
            absent.append(name)
        elif sha256_of(path) != digests[0]:
            yield f"its plans were built with another {name} than the one that is here."
        else:
            try:
                ctypes.CDLL(str(path))
            except OSError as error:
                yield f"{name} cannot be loaded ({error})."
    if absent:
        raise NotChecked(
            f"its plans call plugins of {', '.join(absent)}, not built here; the server loads "
            "them by --backend-config=tensorrt,plugins="
        )


def _short(version: str) -> tuple[str, ...]:
    # Plans are good for one release: major, minor and patch, whatever the build.
    return tuple(version.split(".")[:3])
