# SPDX-License-Identifier: Apache-2.0
"""Build the engines of a sweep's points and record their sizes. They are not run here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.exporter.runtimes.build import build
from saccade.exporter.runtimes.options import BuildOptions
from saccade.exporter.runtimes.runtime import Runtime
from saccade.serving.bench.sweep.points import Failure
from saccade.serving.bench.sweep.ready import ReadyPoint
from saccade.serving.bench.sweep.state import SweepFolder, link


def build_engines(state: SweepFolder, ready: Sequence[ReadyPoint], runtime: Runtime) -> None:
    """Build an engine for each point; record a refusal, which does not fail the point itself."""
    for candidate in ready:
        out = _folder(state, candidate, runtime)
        built = out.is_dir() and state.read(candidate.point, _piece(runtime))
        if built or state.read(candidate.point, _failed(runtime)):
            continue
        try:
            options = BuildOptions(engine=runtime.name, out=out, force=True)
            made = build(candidate.folder, options)
        except SaccadeError as error:
            state.write(candidate.point, _failed(runtime), {"reason": str(error)})
            continue
        content = {"engine": runtime.name, "plans": made.files()}
        state.write(candidate.point, _piece(runtime), content)


def collect_engines(
    state: SweepFolder, ready: Sequence[ReadyPoint], runtime: Runtime
) -> list[dict[str, Any]]:
    """Link the engines into the artefact folder, as `saccade build` does; describe each."""
    rows = []
    for candidate in ready:
        built = state.read(candidate.point, _piece(runtime))
        if built is None:
            continue
        capabilities = "+".join(built["plans"][0]["compute_capabilities"])
        place = state.artefacts / "engines" / f"{runtime.name}-{capabilities}"
        place.mkdir(parents=True, exist_ok=True)
        for path in _folder(state, candidate, runtime).iterdir():
            if path.is_file():
                link(path, place / path.name)
        rows += [
            {"variant": candidate.variant.name, "engine": runtime.name, **one}
            for one in built["plans"]
        ]
    return rows


def refused_engines(
    state: SweepFolder, ready: Sequence[ReadyPoint], runtime: Runtime
) -> list[Failure]:
    """Return the engines that were not built, with the reasons."""
    failures = []
    for candidate in ready:
        if refused := state.read(candidate.point, _failed(runtime)):
            point = candidate.point
            reason = f"{runtime.name}: {refused['reason']}"
            failures.append(Failure(point.variant, point.setting, point.precision, "build", reason))
    return failures


def forgive_engine(state: SweepFolder, candidate: ReadyPoint, runtime: Runtime) -> None:
    """Remove the record that the engine was refused."""
    (state.place(candidate.point) / f"{_failed(runtime)}.json").unlink(missing_ok=True)


def _piece(runtime: Runtime) -> str:
    return f"engine-{runtime.name}"


def _failed(runtime: Runtime) -> str:
    return f"engine-{runtime.name}-failed"


def _folder(state: SweepFolder, candidate: ReadyPoint, runtime: Runtime) -> Path:
    return state.place(candidate.point) / f"engine-{runtime.name}"
