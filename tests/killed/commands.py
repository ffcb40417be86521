# SPDX-License-Identifier: Apache-2.0
"""The commands that are killed: the inputs and results of each."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parent.parent


@dataclass(frozen=True)
class Command:
    """One command line; `{given}` is the folder of inputs, `{out}` the folder of results."""

    name: str
    words: tuple[str, ...]
    results: tuple[str, ...]  # in {out}: either complete or as before
    requirements: tuple[str, ...]  # the inputs that it needs
    prepare: Callable[[], None] = lambda: None  # runs in the process before the command
    keeps: tuple[str, ...] = ()  # what an unfinished run leaves to resume from
    resume: tuple[str, ...] = ()  # arguments to resume if `keeps` exists
    resumes_alone: bool = False  # same arguments resume; unfinished files are visible
    changes: tuple[str, ...] = ()  # input folders that it writes to: copied to {out}
    spare: str = ""  # ending of files that nothing reads until a result names them
    forces: bool = True  # has --force, which replaces an older result as a whole
    share: float = 1.0  # of the trials that are asked for, if one takes minutes

    @property
    def replaces(self) -> bool:
        """True if every other trial starts with an older result, to be replaced."""
        return bool(self.results) and self.forces and not self.resumes_alone


def inputs(given: Path, requirements: set[str]) -> None:
    """Create the required inputs of the commands in one folder: tiny models and data."""
    sys.path[:0] = [str(TESTS), str(TESTS / "plugins")]
    given.mkdir(parents=True)
    for need in sorted(requirements):
        _MAKERS[need](given)


def _data(given: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (120, 8, 8, 1), dtype=np.uint8)
    np.savez(given / "data.npz", images=images, labels=np.arange(120) % 10)


def _nac(given: Path) -> None:
    values = {each.split("=")[0]: int(each.split("=")[1]) for each in _SMALL.split()}
    import_module("tiny").tiny_nac(given / "nac.safetensors", images=256, **values)


def _authors(given: Path) -> None:
    (given / "authors").mkdir()
    import_module("official_files").vit(given / "authors")


def _sparo(given: Path) -> None:
    names = [f"{colour} {shape}" for colour in ("red", "blue") for shape in ("circle", "square")]
    images = np.random.default_rng(0).integers(0, 256, (48, 16, 16, 3), dtype=np.uint8)
    np.savez(given / "shapes.npz", images=images, labels=np.arange(48) % 4, class_names=names)
    import_module("tiny_families").tiny("sparo", given / "sparo.safetensors")


def _artefacts(given: Path) -> None:
    import_module("tiny_artefacts").artefacts(given / "artefacts")


def _calibrated(given: Path) -> None:
    folder = given / "calibrated"
    import_module("tiny_artefacts").artefacts(folder)
    rates = {"tiny-b1000-fp32": 1.0, "tiny-b0500-fp32": 9.0}
    import_module("policy_files").measured(folder, rates)
    images = np.random.default_rng(0).integers(0, 256, (400, 4, 4, 1), dtype=np.uint8)
    np.savez(given / "noise.npz", images=images)


def _pictures(given: Path) -> None:
    from PIL import Image

    (given / "pictures").mkdir()
    for index in range(6):
        pixels = np.full((5, 7), 40 * index, np.uint8)
        Image.fromarray(pixels).save(given / "pictures" / f"{index}.png")


_MAKERS = {
    "data": _data, "nac": _nac, "authors": _authors, "sparo": _sparo, "artefacts": _artefacts,
    "calibrated": _calibrated, "pictures": _pictures,
}  # fmt: skip

_SMALL = (
    "modules=8 dim=16 code_dim=8 signature_dim=4 propagator_layers=1 heads=2 ffn_dim=16 "
    "readout_modules=2"
)
_DATA = " --data {given}/data.npz"
_BENCH = _DATA + " --no-server --seconds 0.01 --rounds 1 --limit 8"


def _keep_at_every_step() -> None:
    import_module("saccade.models.training.loop").SAVE_EVERY_S = 0.0


def _few_scenes() -> None:
    import_module("saccade.models.official.convert").SAMPLES = 8


def _fake_tensorrt() -> None:
    import pytest

    sys.path[:0] = [str(TESTS)]
    import_module("engine_places").use_fake(pytest.MonkeyPatch())


def _points_in_this_process() -> None:
    """Do the work of a sweep's workers in this process: each would load torch for seconds."""

    def each_alone(
        module: str, tasks: dict[str, Any], kind: type, *, at_a_time: int
    ) -> Iterator[tuple[str, Any]]:
        for key, task in tasks.items():
            yield key, import_module(module).main(task)

    class Here(import_module("saccade.core.worker").Worker):  # type: ignore[misc]
        def ask(self, request: Any, kind: type, *_: Any) -> Any:
            return import_module(self._work).main(request)

    import_module("saccade.serving.bench.sweep.points").each_alone = each_alone  # type: ignore[attr-defined]
    import_module("saccade.serving.bench.sweep.sweep").Worker = Here  # type: ignore[attr-defined]


def _shards_in_this_process() -> None:
    """Run the shards of a bulk job in this process, one after the other."""

    def local(job: Any, shards: list[int], _: int) -> Iterator[Any]:
        work = import_module("saccade.serving.bulk.shard")
        for shard in shards:
            yield work.main(work.ShardRequest(job, shard))

    import_module("saccade.serving.bulk.runners").local = local  # type: ignore[attr-defined]


def _command(
    name: str,
    line: str,
    results: str,
    requirements: str,
    prepare: Callable[[], None] = lambda: None,
    keeps: str = "",
    **more: Any,
) -> Command:
    """Return a command whose words and names are given as texts."""
    return Command(
        name, tuple(line.split()), tuple(results.split()), tuple(requirements.split()), prepare,
        tuple(keeps.split()), **more,
    )  # fmt: skip


_SWEEP = "sweep {given}/nac.safetensors --out {out}/sweep --budget 1,0.5 --jobs 1" + _BENCH
_KEEPS = "sweep/.lock sweep/sweep.json sweep/points sweep/artefacts sweep/report"
_AGAIN: dict[str, Any] = {"resume": ("--resume",)}

COMMANDS = {
    each.name: each
    for each in (
        _command(
            "train", "train nac --out {out}/m.safetensors --steps 2 --batch 8" + _DATA
            + " --set " + _SMALL, "m.safetensors m.csv", "data", _keep_at_every_step,
            "m.resume.pt m.csv", **_AGAIN,
        ),
        _command(
            "train, a run folder", "train nac --out {out}/m --steps 2 --batch 8 --shots 2" + _DATA
            + " --set " + _SMALL, "m", "data", _keep_at_every_step, "m.resume.pt m.resume.csv",
            share=0.02, **_AGAIN,
        ),
        _command(
            "convert", "convert vit {given}/authors/model.pth --out {out}/m.safetensors --config "
            "{given}/authors/config.json --labels {given}/authors/labels.txt", "m.safetensors",
            "authors", _few_scenes,
        ),
        _command(
            "select", "select {given}/sparo.safetensors --out {out}/slots.json --data "
            "{given}/shapes.npz", "slots.json", "sparo",
        ),
        _command("evaluate", "evaluate {given}/nac.safetensors --limit 16" + _DATA, "", "data nac"),
        _command("export", "export {given}/nac.safetensors --out {out}/m --budget 0.5", "m", "nac"),
        _command(
            "build", "build {given}/artefacts --out {out}/engines --engine tensorrt --variant "
            "tiny-b0500-fp32", "engines", "artefacts", _fake_tensorrt,
        ),
        _command(
            "repository", "repository {given}/artefacts --out {out}/repository", "repository",
            "artefacts",
        ),
        _command(
            "bench", "bench {out}/exported --out {out}/report" + _BENCH, "report exported",
            "data nac", changes=("exported",),
        ),
        _command(
            "calibrate", "calibrate {out}/calibrated --data {given}/noise.npz --risk 0.5",
            "calibrated", "calibrated", changes=("calibrated",), spare=".policy.npz", forces=False,
        ),
        _command(
            "sweep", _SWEEP, "sweep", "data nac", _points_in_this_process, _KEEPS,
            resumes_alone=True,
        ),
        _command(
            "sweep, its processes", _SWEEP, "sweep", "data nac", keeps=_KEEPS, resumes_alone=True,
            share=0.02,
        ),
        _command(
            "bulk", "bulk {given}/artefacts --input {given}/pictures --out {out}/bulk --shard 2 "
            "--workers 1", "bulk", "artefacts pictures", _shards_in_this_process,
            "bulk/_plan bulk/answers bulk/manifest.json bulk/_SUCCESS", resumes_alone=True,
        ),
    )
}  # fmt: skip
