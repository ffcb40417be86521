# SPDX-License-Identifier: Apache-2.0
"""Engines of a sweep's points: built and weighed; nothing here can run them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError
from saccade.export.runtimes.build import build
from saccade.export.runtimes.options import BuildOptions
from saccade.export.runtimes.runtime import Runtime
from saccade.serving.bench.sweep.points import Failure
from saccade.serving.bench.sweep.ready import Ready
from saccade.serving.bench.sweep.state import SweepFolder, link


def build_engines(state: SweepFolder, ready: Sequence[Ready], runtime: Runtime) -> None:
    """An engine of each point; what is refused is noted and says nothing of the other runtime."""
    for each in ready:
        out = _folder(state, each, runtime)
        built = out.is_dir() and state.read(each.point, _piece(runtime))
        if built or state.read(each.point, _failed(runtime)):
            continue
        try:
            options = BuildOptions(engine=runtime.name, out=out, force=True)
            made = build(each.folder, options)
        except SaccadeError as error:
            state.write(each.point, _failed(runtime), {"reason": str(error)})
            continue
        content = {"engine": runtime.name, "plans": made.files()}
        state.write(each.point, _piece(runtime), content)


def collect_engines(
    state: SweepFolder, ready: Sequence[Ready], runtime: Runtime
) -> list[dict[str, Any]]:
    """The engines in the artefact folder, where `saccade build` would put them; what they are."""
    found = []
    for each in ready:
        built = state.read(each.point, _piece(runtime))
        if built is None:
            continue
        capabilities = "+".join(built["plans"][0]["compute_capabilities"])
        place = state.artefacts / "engines" / f"{runtime.name}-{capabilities}"
        place.mkdir(parents=True, exist_ok=True)
        for path in _folder(state, each, runtime).iterdir():
            if path.is_file():
                link(path, place / path.name)
        found += [
            {"variant": each.variant.name, "engine": runtime.name, **one} for one in built["plans"]
        ]
    return found


def refused_engines(state: SweepFolder, ready: Sequence[Ready], runtime: Runtime) -> list[Failure]:
    """Which were not built, and why."""
    found = []
    for each in ready:
        if refused := state.read(each.point, _failed(runtime)):
            point = each.point
            reason = f"{runtime.name}: {refused['reason']}"
            found.append(Failure(point.variant, point.setting, point.precision, "build", reason))
    return found


def forgive_engine(state: SweepFolder, each: Ready, runtime: Runtime) -> None:
    """Forget that the engine was refused."""
    (state.place(each.point) / f"{_failed(runtime)}.json").unlink(missing_ok=True)


def _piece(runtime: Runtime) -> str:
    return f"engine-{runtime.name}"


def _failed(runtime: Runtime) -> str:
    return f"engine-{runtime.name}-failed"


def _folder(state: SweepFolder, each: Ready, runtime: Runtime) -> Path:
    return state.place(each.point) / f"engine-{runtime.name}"
