# SPDX-License-Identifier: Apache-2.0
"""TensorRT-RTX engines of a sweep's points: built and weighed; nothing here can run them."""

from collections.abc import Sequence
from typing import Any

from saccade.errors import SaccadeError
from saccade.serving.bench.sweep.options import RTX
from saccade.serving.bench.sweep.points import Failure
from saccade.serving.bench.sweep.ready import Ready
from saccade.serving.bench.sweep.state import SweepFolder, link

_PIECE, _FAILED = f"engine-{RTX}", f"engine-{RTX}-failed"


def build_engines(state: SweepFolder, ready: Sequence[Ready]) -> None:
    """An engine of each point; what is refused is noted and says nothing of the other runtime."""
    from saccade.export.runtimes.tensorrt.build import BuildOptions, build

    for each in ready:
        if state.read(each.point, _PIECE) or state.read(each.point, _FAILED):
            continue
        out = state.place(each.point) / "engine"
        try:
            found = build(state.exported(each.point), BuildOptions(engine=RTX, out=out, force=True))
        except SaccadeError as error:
            state.write(each.point, _FAILED, {"reason": str(error)})
            continue
        plans = [
            {
                "name": one.file.name,
                "bytes": one.file.bytes,
                "sha256": one.file.sha256,
                "compute_capabilities": list(one.compute_capabilities),
                "version": one.version,
                "build_seconds": round(one.build_seconds, 3),
            }
            for one in found.manifests
        ]
        state.write(each.point, _PIECE, {"engine": RTX, "plans": plans})


def collect_engines(state: SweepFolder, ready: Sequence[Ready]) -> list[dict[str, Any]]:
    """The engines in the artefact folder, where `saccade build` would put them; what they are."""
    found = []
    for each in ready:
        built = state.read(each.point, _PIECE)
        if built is None:
            continue
        capabilities = "+".join(built["plans"][0]["compute_capabilities"])
        place = state.artefacts / "engines" / f"{RTX}-{capabilities}"
        place.mkdir(parents=True, exist_ok=True)
        for path in (state.place(each.point) / "engine").iterdir():
            if path.is_file():
                link(path, place / path.name)
        found += [{"variant": each.variant.name, "engine": RTX, **one} for one in built["plans"]]
    return found


def refused_engines(state: SweepFolder, ready: Sequence[Ready]) -> list[Failure]:
    """Which were not built, and why."""
    found = []
    for each in ready:
        if refused := state.read(each.point, _FAILED):
            point = each.point
            reason = f"{RTX}: {refused['reason']}"
            found.append(Failure(point.variant, point.setting, point.precision, "build", reason))
    return found


def forgive_engine(state: SweepFolder, each: Ready) -> None:
    """Forget that the engine was refused."""
    (state.place(each.point) / f"{_FAILED}.json").unlink(missing_ok=True)
