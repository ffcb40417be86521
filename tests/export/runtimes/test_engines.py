# SPDX-License-Identifier: Apache-2.0
"""`saccade build` with TensorRT-RTX: plans and manifests, and refusals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from engine_places import FAKES, HOPPER, use_fake, worded
from half_typed import add_variant, half_typed
from rtx_builds import needs_rtx
from tiny_artefacts import FULL, HALF, artefacts, onnx_model

from saccade.core.errors import GateFailed, MissingPackage, SaccadeError
from saccade.core.files import new_folder, sha256_of
from saccade.exporter.runtimes.tensorrt import build as build_module
from saccade.exporter.runtimes.tensorrt import modules
from saccade.exporter.runtimes.tensorrt.build import BuildOptions, build
from saccade.exporter.runtimes.tensorrt.engine_manifest import read_engines
from saccade.exporter.runtimes.tensorrt.layer_types import ExpectedTypes, expected_types_of

BUILT = BuildOptions(
    engine="tensorrt-rtx", compute_capability=("12.0", "8.9"), batch="1:4:16", workspace_mib=256
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return artefacts(tmp_path / "artefact", checkpoint=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact folder with engines for two kinds of GPU in their usual place."""
    folder = artefacts(tmp_path_factory.mktemp("built") / "artefact", checkpoint=False)
    add_variant(folder, FULL, "fp16", half_typed(onnx_model(), "fp16"))
    build(folder, BUILT)
    return folder


@needs_rtx
def test_writes_plans_and_what_is_known_of_them(built: Path) -> None:
    out = built / "engines" / "tensorrt-rtx-8.9+12.0"
    by_name = {engine.variant.name: engine for engine in read_engines(out)}
    assert set(by_name) == {FULL, HALF, "tiny-b1000-fp16"}
    for name, each in by_name.items():
        assert each.parent.sha256 == sha256_of(built / f"{name}.onnx")
        assert each.file.bytes == (out / each.file.name).stat().st_size > 10_000
        assert each.profiles == {
            "image": {"min": (1, 4, 4, 1), "opt": (4, 4, 4, 1), "max": (16, 4, 4, 1)}
        }
        assert each.compute_capabilities == ("8.9", "12.0")
        assert each.version.startswith("1.")
        assert each.options["workspace_mib"] == 256
        assert each.build_seconds > 0
        assert (each.timing_cache_sha256, each.plugins) == (None, {})
        assert "INFO" in (out / f"{name}.log").read_text()
    assert by_name[FULL].layer_types == {"fp32": 2}
    assert by_name["tiny-b1000-fp16"].layer_types == {"fp16": 2}
    assert (out / by_name[FULL].file.name).read_bytes()[:4] == b"vtrt"


@needs_rtx
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compute_capability": ("9.0",)}, r"9\.0: TensorRT-RTX builds for 7\.5, .*12\.0"),
        ({"timing_cache": "cache"}, "TensorRT-RTX does not measure"),
        ({"batch": "1:2"}, "--batch '1:2': expected smallest:usual:largest"),
        ({"batch": "8:4:64"}, "8, 4, 64 are not increasing"),
        ({"batch": "0:8:64"}, "are not increasing numbers of at least 1"),
        ({"axis": ("b=1:2:3",)}, "For the batch, use --batch"),
        ({"axis": ("k=1:2:3",)}, "--axis is 'k', expected none"),
        ({"workspace_mib": 0}, "--workspace-mib: found 0"),
        ({"workspace_mib": 10**15}, "expected .* at most 1048576"),
        ({"variant": ("tiny-b1000-bf16",)}, "saccade export CHECKPOINT --precision bf16"),
    ],
)
def test_refuses_options(folder: Path, options: dict, words: str) -> None:
    with pytest.raises(SaccadeError, match=words):
        build(folder, BuildOptions(engine="tensorrt-rtx", **options))
    assert not (folder / "engines").exists()


@needs_rtx
def test_a_gpu_at_hand_that_it_cannot_build_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "gpu_at_hand", lambda: HOPPER)
    with pytest.raises(SaccadeError, match=r"capability 9\.0: TensorRT-RTX builds for"):
        build(folder, BuildOptions(engine="tensorrt-rtx"))


@needs_rtx
def test_a_newer_opset_and_a_changed_file(folder: Path) -> None:
    newer = onnx_model()
    newer.opset_import[0].version = 99
    add_variant(folder, FULL, "fp32", newer)
    with pytest.raises(SaccadeError, match="has opset 99, expected at most 23"):
        build(folder, BuildOptions(engine="tensorrt-rtx", variant=(FULL,)))
    path = folder / f"{HALF}.onnx"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(SaccadeError, match="was changed after its export"):
        build(folder, BuildOptions(engine="tensorrt-rtx", variant=(HALF,)))


@needs_rtx
def test_a_file_that_is_exported_anew_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exported_anew(*given: Any) -> ExpectedTypes:
        (folder / f"{FULL}.onnx").write_bytes(onnx_model(seed=7).SerializeToString())
        return expected_types_of(*given)

    monkeypatch.setattr(build_module, "expected_types_of", exported_anew)
    with pytest.raises(SaccadeError, match="was changed after its export"):
        build(folder, BuildOptions(engine="tensorrt-rtx", variant=(FULL,)))
    assert not (folder / "engines").exists()


def test_of_two_at_once_the_slower_one_replaces_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(SaccadeError, match="exists already"), new_folder(out):
        with new_folder(out) as faster:
            (faster / "plan").write_bytes(b"of the faster one")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "plan").read_bytes() == b"of the faster one"


@needs_rtx
@pytest.mark.parametrize(
    ("precision", "typed", "float32", "words"),
    [
        ("fp16", "", (), "2 of 2 matrix layers .*embedding is fp32, not fp16.*--precision fp16"),
        ("fp32", "fp16", (), "embedding is fp16, not fp32"),
        ("bf16", "fp16", (), "embedding is fp16, not bf16"),
        ("int8", "", ("embedding",), "1 of 2 matrix layers .*: logits is fp32, not int8"),
        ("fp16", "fp16", ("logits",), "logits is fp16, not fp32"),
        ("fp16", "", ("embedding", "logits"), "none of its 2 matrix layers is fp16"),
    ],
)
def test_a_mistyped_graph_fails_the_proof(
    folder: Path, precision: str, typed: str, float32: tuple[str, ...], words: str
) -> None:
    proto = half_typed(onnx_model(), typed) if typed else onnx_model()
    name = add_variant(folder, FULL, precision, proto, float32_layers=float32).variant.name
    with pytest.raises(GateFailed, match=words):
        build(folder, BuildOptions(engine="tensorrt-rtx", variant=(name,)))
    assert not (folder / "engines").exists()


@needs_rtx
def test_what_it_is_built_from_is_not_replaced(folder: Path) -> None:
    before = sorted(folder.iterdir())
    for out in (folder, folder.parent, folder / "engines" / ".."):
        with pytest.raises(SaccadeError, match=r"replacing it would remove the input .*artefact"):
            build(folder, BuildOptions(engine="tensorrt-rtx", out=out, force=True))
    assert sorted(folder.iterdir()) == before


def test_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for engine in (None, "tensorrt", "tensorrt-rtx"):
        with pytest.raises(MissingPackage, match=r"without a GPU.*'\S+\[rtx\]'"):
            build(folder, BuildOptions(engine=engine))


def test_a_module_that_is_installed_in_part(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text("import libnvinfer")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackage, match=r"tensorrt is not importable \(.*libnvinfer"):
        build(folder, BuildOptions(engine="tensorrt"))


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("ABORT", f"{FULL}: the process in which TensorRT built it failed .killed by SIGABRT"),
        ("UNKNOWN", "cannot parse .*: node 3 is unknown"),
        ("REFUSE", "TensorRT cannot build it: no tactic for node 7"),
    ],
)
def test_a_builder_that_fails_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, word: str, words: str
) -> None:
    use_fake(monkeypatch)
    add_variant(folder, FULL, "fp32", worded(onnx_model(), word))
    before = sorted(folder.iterdir())
    with pytest.raises(SaccadeError, match=words):
        build(folder, BuildOptions(engine="tensorrt"))
    assert sorted(folder.iterdir()) == before


_RUN = """
import resource, sys
sys.path[:0] = {paths!r}
import pytest
from engine_places import use_fake
from saccade.serving.commands.cli import run
with pytest.MonkeyPatch.context() as patch:
    use_fake(patch)
    {before}
    sys.exit(run(["build", {folder!r}, "--engine", {engine!r}]))
"""


def _start(folder: Path, engine: str, before: str = "") -> subprocess.Popen[str]:
    paths = [str(FAKES.parent), str(FAKES.parent / "plugins")]
    code = _RUN.format(paths=paths, before=before, folder=str(folder), engine=engine)
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def test_interrupted_it_ends_the_child_and_leaves_nothing(folder: Path) -> None:
    add_variant(folder, HALF, "fp32", worded(onnx_model(), "HANG"))
    before = sorted(folder.iterdir())
    process = _start(folder, "tensorrt")
    while not (hanging := _hanging(folder)) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert sorted(folder.iterdir()) == before
    assert hanging
    with pytest.raises(ProcessLookupError):
        os.kill(hanging, 0)


def _hanging(folder: Path) -> int:
    """The process that builds for that folder and has said that it hangs."""
    for path in folder.glob("engines/.*/.work-*/hanging"):
        for each in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if each.readlink() == path.parent.resolve():
                    return int(each.parent.name)
            except OSError:
                continue
    return 0


@needs_rtx
def test_a_full_disk_leaves_nothing(folder: Path) -> None:
    before = sorted(folder.iterdir())
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))"
    process = _start(folder, "tensorrt-rtx", before=limit)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 2, said
    assert "File too large" in said
    assert "Traceback" not in said
    assert sorted(folder.iterdir()) == before
