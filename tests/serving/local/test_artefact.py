# SPDX-License-Identifier: Apache-2.0
"""An artefact folder without a server: what it opens, what it refuses, and what it leaves alone."""

import gc
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from engine_places import HostMemory, computed_artefact, use_fake
from picture_files import picture_files
from PIL import Image
from policy_files import write_policy
from tiny_artefacts import FULL, HALF, artefacts

import saccade
from saccade.core.errors import SaccadeError, ShapeError
from saccade.exporter.runtimes.tensorrt import loading
from saccade.serving.client.images import encoded
from saccade.serving.local import artefact
from saccade.serving.local.artefact import LoadedArtefact, load_artefact
from saccade.serving.local.in_process import InProcessRouter

pytest.importorskip("onnxruntime", reason="missing: pip install '.[cpu]'")

IMAGES = np.random.default_rng(0).integers(0, 256, (64, 4, 4, 1), dtype=np.uint8)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two variants and a policy of both; copy it to change it."""
    folder = artefacts(tmp_path_factory.mktemp("local") / "artefact", checkpoint=False)
    write_policy(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "artefact"))


def spoiled(folder: Path, variant: str) -> None:
    """Change one byte of a variant's file."""
    path = folder / f"{variant}.onnx"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_each_variant_is_opened_when_a_request_needs_it(folder):
    spoiled(folder, FULL)
    with load_artefact(folder) as model:
        assert model.classify(IMAGES, budget=0.5)[0].variant == HALF
        with pytest.raises(SaccadeError, match=rf"{FULL}.onnx: SHA-256 is .* changed after its"):
            model.classify(IMAGES)
        assert model.classify(IMAGES, budget=0.5)[0].variant == HALF


def test_a_policy_whose_next_variant_was_changed_is_an_error(folder, monkeypatch):
    write = artefact.write_router

    def write_unsure(place: Path, plan) -> None:  # no answer of the first step is kept
        write(place, plan)
        routes = place / "1" / "routes.json"
        content = json.loads(routes.read_text())
        content["policies"][0]["steps"][0]["threshold"] = 2.0
        routes.write_text(json.dumps(content))

    monkeypatch.setattr(artefact, "write_router", write_unsure)
    with load_artefact(folder) as model:
        answers = model.classify(IMAGES, policy="auto")
        assert {(one.variant, one.steps, one.certified) for one in answers} == {(FULL, 2, True)}
    spoiled(folder, FULL)
    with load_artefact(folder) as model:
        with pytest.raises(SaccadeError, match=f"{FULL}.onnx: SHA-256 is"):
            model.classify(IMAGES, policy="auto")


def test_the_time_to_open_a_variant_is_not_that_of_its_runs(folder, monkeypatch):
    load = InProcessRouter._load

    def load_slowly(router: InProcessRouter, name: str):
        time.sleep(0.3)
        return load(router, name)

    monkeypatch.setattr(InProcessRouter, "_load", load_slowly)
    with load_artefact(folder) as model:
        for _ in range(2):
            (answer,) = model.classify(IMAGES[:1], max_risk=0.0, max_latency_ms=250)
            assert (answer.variant, answer.degraded) == (FULL, False)


def test_a_missing_file_and_a_folder_of_something_else_are_refused(folder, tmp_path):
    with load_artefact(folder) as model:
        (folder / f"{FULL}.onnx").unlink()
        with pytest.raises(SaccadeError, match=f"{FULL}.onnx: missing, but its manifest exists"):
            model.classify(IMAGES)
    for place, words in ((tmp_path / "no", "no such folder"), (tmp_path, "no .manifest.json")):
        with pytest.raises(SaccadeError, match=words):
            load_artefact(place)
    with pytest.raises(SaccadeError, match=r"--threads: found 1000, expected .* at most 256"):
        load_artefact(folder, threads=1000)
    with pytest.raises(SaccadeError, match="has no variant in int8, only in fp32"):
        load_artefact(folder, precisions=("int8",))


def test_a_file_is_tried_in_another_process_before_it_is_opened(folder, monkeypatch):
    tried = []

    def refuse(folder, manifests):
        tried.extend(one.variant.name for one in manifests)
        raise SaccadeError("too large")

    monkeypatch.setattr(artefact, "refuse_untried", refuse)
    with load_artefact(folder) as model, pytest.raises(SaccadeError, match="too large"):
        model.classify(IMAGES, budget=0.5)
    assert tried == [HALF]


def test_the_process_stays_as_it_was(folder, monkeypatch):
    mine = ModuleType("metrics")  # the router has a file of that name
    monkeypatch.setitem(sys.modules, "metrics", mine)
    before = (set(sys.modules), list(sys.path), sys.getswitchinterval(), Image.MAX_IMAGE_PIXELS)
    with load_artefact(folder) as one, load_artefact(folder, threads=2) as other:
        assert one.classify(IMAGES) == other.classify(IMAGES)
    after = (list(sys.path), sys.getswitchinterval(), Image.MAX_IMAGE_PIXELS)
    assert after == before[1:] and sys.modules["metrics"] is mine
    assert not {"model", "lane", "triton_python_backend_utils"} & (set(sys.modules) - before[0])


def test_what_is_dropped_or_closed_leaves_nothing(folder, tmp_path, monkeypatch, eventually):
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    threads, model = threading.active_count(), load_artefact(folder)
    assert "model tiny" not in repr(model) and "tiny" in repr(model)
    model.classify(IMAGES[:1])
    assert list(place.iterdir())
    del model
    gc.collect()
    assert not list(place.iterdir())
    # The process that tried the file has ended; its readers' threads end soon after it.
    eventually(lambda: threading.active_count() <= threads, usually_s=1)
    model = load_artefact(folder)
    model.close()
    model.close()
    assert not list(place.iterdir())
    with pytest.raises(SaccadeError, match="tiny was closed"):
        model.classify(IMAGES)
    with pytest.raises(SaccadeError, match=r"nosuch\.txt"):
        load_artefact(folder, labels=place / "nosuch.txt")
    assert not list(place.iterdir())


def test_threads_share_it_and_each_gets_its_own_answer_or_error(folder):
    spoiled(folder, FULL)

    def asked(budget):
        try:
            return model.classify(IMAGES, budget=budget)
        except SaccadeError as error:
            return str(error)

    with load_artefact(folder) as model, ThreadPoolExecutor(8) as pool:
        expected = {budget: asked(budget) for budget in (1, 0.5)}
        assert "SHA-256" in expected[1] and expected[0.5][0].variant == HALF
        budgets = [1, 0.5] * 20
        assert list(pool.map(asked, budgets)) == [expected[budget] for budget in budgets]


def test_one_bad_request_is_refused_by_index_and_the_next_one_answered(folder):
    with load_artefact(folder) as model:
        with pytest.raises(SaccadeError, match="not a JPEG, PNG or WebP") as refused:
            model.classify([IMAGES[0], b"nonsense"])
        assert refused.value.index == 1
        with pytest.raises(SaccadeError, match="unexpected output 'maps', expected one of logits"):
            model.infer({"image": IMAGES}, ["maps"])
        assert set(model.infer({"image": IMAGES})) == {
            "logits", "probabilities", "embedding", "variant", "variant_sha256",
        }  # fmt: skip
        (answer,) = model.classify(IMAGES[:1], top=99)
        assert len(answer.labels) == 3


def test_a_corrupt_image_of_pillow_is_refused(tmp_path):
    path = tmp_path / "cut.png"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:1000])
    with Image.open(path) as image, pytest.raises(SaccadeError, match=r"cut.png: cannot be decod"):
        encoded([image])


def test_images_of_pillow_are_those_of_their_files(folder, tmp_path):
    files = picture_files(tmp_path)
    opened = [Image.open(file) for file in files]
    with load_artefact(folder) as model:
        outputs = [model.infer({"image": given}, ["logits"])["logits"] for given in (files, opened)]
    assert outputs[0].tobytes() == outputs[1].tobytes()
    assert len({row.tobytes() for row in outputs[0]}) > 5
    with pytest.raises(ShapeError, match=r"mode CMYK, expected 1, L, .* image.convert\('RGB'\)"):
        encoded([Image.new("CMYK", (2, 2))])


def test_plans_of_another_runtime_answer_too(tmp_path, monkeypatch):
    place, engines = computed_artefact(tmp_path / "artefact", "1:2:4")
    use_fake(monkeypatch)
    monkeypatch.setattr(loading, "CudaMemory", HostMemory)
    with load_artefact(place) as here:
        expected = here.infer({"image": IMAGES[:9]}, ["logits"])["logits"]
    plans = {"runtime": "tensorrt", "engines": [str(engines)]}
    with pytest.raises(SaccadeError, match=r"takes up to 4 images, .* Pass --max-images 4, or"):
        load_artefact(place, **plans)
    with load_artefact(place, max_images=4, **plans) as model:
        planned = model.infer({"image": IMAGES[:9]}, ["logits"])["logits"]
    np.testing.assert_allclose(planned, expected, rtol=1e-5)


def test_it_has_the_methods_of_a_client():
    names = ("classify", "embed", "embed_text", "segment", "edit", "answer", "caption", "infer")
    for name in names:
        own, other = getattr(LoadedArtefact, name), getattr(saccade.Client, name)
        assert inspect.signature(own) == inspect.signature(other) and own.__doc__ == other.__doc__


def test_neither_torch_nor_onnx_is_imported(folder):
    code = (
        "import sys, numpy as np, saccade\n"
        "from saccade.exporter.graph import trial\n"
        "trial.tried = lambda *_: {}\n"  # a process of its own
        "images = np.zeros((1, 4, 4, 1), np.uint8)\n"
        "print(saccade.load_artefact(sys.argv[1], policies=False).classify(images)[0].variant)\n"
        "print({'torch', 'onnx', 'scipy', 'pyarrow', 'tritonserver'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, env=os.environ
    )
    assert done.stdout.splitlines() == [FULL, "set()"], done.stderr
    assert not done.stderr
