# SPDX-License-Identifier: Apache-2.0
"""`saccade calibrate --embedding`: what it certifies, and what the router answers with it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from policy_files import measured
from support.serving.repositories import config_of, reasons, routes_of
from tiny_artefacts import FULL, HALF, MODEL, artefacts, manifest_of, onnx_model

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import ParentEntry, write_manifest
from saccade.exporter.evaluation import embedding_samples
from saccade.exporter.evaluation.calibrate import calibrate
from saccade.exporter.policy.maps import ROUTER, nearest
from saccade.exporter.policy.options import CalibrateOptions
from saccade.exporter.policy.policy import check_certificates, read_policies
from saccade.serving.client.embeddings import load_embeddings, save_embeddings
from saccade.serving.client.router_view import DESCRIBED
from saccade.serving.local.artefact import load_artefact
from saccade.serving.local.server_code import ServerCode
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions

SAMPLES = 1_200
NOISE = 0.02


def drawn(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 4, 4, 1), dtype=np.uint8)


def rotated(model: onnx.ModelProto, noise: float) -> onnx.ModelProto:
    """The same model, whose embeddings are rotated and a little different."""
    rng = np.random.default_rng(7)
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    for tensor in model.graph.initializer:
        if tensor.name == "embed":
            weights = onnx.numpy_helper.to_array(tensor)
            other = weights @ turn + noise / 255 * rng.normal(size=weights.shape)
            tensor.CopyFrom(onnx.numpy_helper.from_array(other.astype(np.float32), "embed"))
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = artefacts(tmp_path_factory.mktemp("exported") / "tiny")
    parent = ArtefactFolder(place).manifests[0].parent
    data = rotated(onnx_model(0), NOISE).SerializeToString()
    manifest = manifest_of("b0500", data, ParentEntry(parent.name, parent.sha256))
    (place / manifest.file.name).write_bytes(data)
    write_manifest(place, manifest)
    measured(place, {FULL: 100.0, HALF: 1_000.0})
    return place


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "images.npz"
    np.savez(path, images=drawn(SAMPLES))
    return path


def options(data: Path, **changes: Any) -> CalibrateOptions:
    return CalibrateOptions(**{"data": str(data), "risk": (0.2,), "embedding": True, **changes})


@pytest.fixture(scope="module")
def calibrated(exported: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = shutil.copytree(exported, tmp_path_factory.mktemp("calibrated") / "tiny")
    calibrate(place, options(images), progress=None)
    return place


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported, tmp_path / "tiny")


@pytest.fixture(scope="module")
def model(calibrated: Path) -> Any:
    with load_artefact(calibrated) as loaded:
        yield loaded


def test_neighbors_are_certified_and_the_file_says_of_what(calibrated):
    content = read_policies(calibrated / "auto.policy.json")
    (policy,) = content.policies
    assert content.task == "embedding" and content.full == FULL and content.embeds
    assert policy.steps[0].variant == HALF and policy.observed <= policy.bound <= 0.2
    assert (content.index, content.vectors, content.samples) == ("images.npz", 600, 600)
    assert {(one.source, one.target) for one in content.maps} == {(HALF, FULL), (FULL, HALF)}
    assert all(one.used and one.recall > 0.8 for one in content.maps)
    (report,) = check_certificates(calibrated, ArtefactFolder(calibrated).variants)
    assert report.passed


@pytest.mark.parametrize("choose", (False, True), ids=("one data", "other data chooses"))
def test_no_sample_that_fits_a_map_certifies(folder, images, tmp_path, monkeypatch, choose):
    seen = {}

    def watched(queries, full, index, *others):
        seen["index"] = np.concatenate([*index])
        seen["queries"] = queries[full]
        return nearest(queries, full, [seen["index"]], *others)

    monkeypatch.setattr(embedding_samples, "nearest", watched)
    other = tmp_path / "other.npz"
    np.savez(other, images=drawn(400, seed=6))
    changes = {"choose_data": str(other)} if choose else {}
    done = calibrate(folder, options(images, **changes), progress=None)
    assert (seen["queries"] @ seen["index"].T).max() < 1 - 1e-6
    assert done.content.samples == len(seen["queries"]) == (1_400 if choose else 600)
    assert done.content.samples - done.content.learn == (1_200 if choose else 360)
    assert done.content.index == ("other.npz" if choose else "images.npz")


def test_a_policy_answers_in_the_full_models_space(model, calibrated):
    content = read_policies(calibrated / "auto.policy.json")
    queries, index = drawn(200, seed=3), drawn(500, seed=4)
    full = model.embed(list(queries[..., 0]))
    by_policy = model.embed(list(queries[..., 0]), policy="auto")
    assert (by_policy.variant, by_policy.sha256) == (FULL, full.sha256)
    assert by_policy.certified and {name for name, _ in by_policy.by} <= {FULL, HALF}
    assert HALF in {name for name, _ in by_policy.by}
    stored = ROUTER.unit(model.embed(list(index[..., 0])).vectors)
    own, found = (ROUTER.unit(one.vectors) @ stored.T for one in (full, by_policy))
    differs = (own.argmax(1) != found.argmax(1)).mean()
    assert differs < 0.2 + 3 * 0.03
    alone = ROUTER.unit(model.embed(list(queries[..., 0]), budget=0.5).vectors) @ stored.T
    assert (own.argmax(1) != alone.argmax(1)).mean() > 0.6  # without the map
    assert content.policies[0].steps[0].variant == HALF


def test_each_row_is_what_its_request_alone_gets(model):
    queries = list(drawn(12, seed=3)[..., 0])
    together = model.embed(queries, policy="auto")
    for at, query in enumerate(queries):
        alone = model.embed([query], policy="auto")
        assert alone.by[0] == together.by[at]
        assert np.allclose(alone.vectors[0], together.vectors[at], rtol=1e-5, atol=1e-6)


def test_a_budget_alone_stays_in_its_own_space_and_space_maps_it(model):
    queries = list(drawn(50, seed=3)[..., 0])
    own, full = model.embed(queries, budget=0.5), model.embed(queries)
    assert own.variant == HALF and not own.by
    up = model.embed(queries, budget=0.5, space="b1000")
    down = model.embed(queries, space="b0500")
    assert (up.variant, up.sha256) == (FULL, full.sha256) and {*up.by} == {(HALF, own.sha256)}
    assert (down.variant, down.sha256) == (HALF, own.sha256) and {*down.by} == {(FULL, full.sha256)}
    assert np.diag(full.similarity(up)).min() > 0.9 and np.diag(own.similarity(down)).min() > 0.9
    assert np.diag(ROUTER.unit(full.vectors) @ ROUTER.unit(own.vectors).T).min() < 0.5
    for wrong in ("b0250", "nothing"):
        with pytest.raises(SaccadeError, match="b1000, b0500"):
            model.embed(queries, space=wrong)
    with pytest.raises(SaccadeError, match="only one of them"):
        model.embed(queries, space="b0500", policy="auto")


def test_mapped_vectors_join_a_file_of_the_space_and_no_other(model, tmp_path):
    queries, path = list(drawn(5, seed=3)[..., 0]), tmp_path / "index.npz"
    names = [str(at) for at in range(5)]
    save_embeddings(path, model.embed(queries), names)
    with pytest.raises(SaccadeError, match="--space"):
        save_embeddings(path, model.embed(queries, budget=0.5), names, append=True)
    with pytest.raises(SaccadeError, match="--space"):
        save_embeddings(path, model.embed(queries, space="b0500"), names, append=True)
    mapped = model.embed(queries, budget=0.5, space="b1000")
    save_embeddings(path, mapped, names, append=True)
    save_embeddings(path, model.embed(queries), names, append=True)
    stored, known = load_embeddings(path)
    assert stored.variant == FULL and len(stored.vectors) == len(known) == 15
    assert [name for name, _ in stored.by] == [FULL] * 5 + [HALF] * 5 + [FULL] * 5
    assert len(stored.similarity(model.embed(queries))) == 15


def test_a_policy_of_embeddings_is_for_embeddings_only(model):
    queries = list(drawn(5, seed=3)[..., 0])
    with pytest.raises(SaccadeError, match="policies"):
        model.classify(queries, policy="auto")
    assert model.classify(queries)[0].variant == FULL
    assert model.embed(queries, max_risk=0.0).by[0][0] == FULL
    with pytest.raises(SaccadeError, match="unknown policy"):
        model.embed(queries, policy="other")


def test_both_kinds_of_policies_are_served_together(calibrated, images, tmp_path):
    place = shutil.copytree(calibrated, tmp_path / "tiny")
    with pytest.raises(SaccadeError, match="has policies for embeddings"):
        calibrate(place, options(images, embedding=False), progress=None)
    calibrate(place, options(images, embedding=False, name="classes"), progress=None)
    queries = list(drawn(40, seed=3)[..., 0])
    with load_artefact(place) as one:
        assert one.classify(queries, policy="classes")[0].steps == 1
        with pytest.raises(SaccadeError, match="expected one of:\nclasses"):
            one.classify(queries, policy="auto")
        with pytest.raises(SaccadeError, match="expected one of:\nauto"):
            one.embed(queries, policy="classes")
        # A risk finds the policy for what is asked.
        assert one.embed(queries, max_risk=0.2).variant == FULL
        assert one.classify(queries, max_risk=0.2)[0].certified


def test_the_repository_has_the_maps_and_preflight_knows_them(calibrated, tmp_path):
    out = tmp_path / "repository"
    deployed = deploy(calibrated, RepositoryOptions(out, slo_ms=1_000.0))
    assert deployed.policies == ("auto",)
    (policy,) = routes_of(out)["policies"]
    assert policy["embeds"] is True
    described = json.loads(config_of(out, MODEL).parameters[DESCRIBED].string_value)
    assert described["space"] == FULL
    with np.load(out / MODEL / "1" / "spaces.npz") as spaces:
        assert {*spaces} == {"anchors", f"{HALF}.{FULL}", f"{FULL}.{HALF}"}
    assert reasons(out, "routes", "fields", "files") == []


def test_requests_that_adapt_get_one_space(calibrated, tmp_path):
    out = tmp_path / "repository"
    deploy(calibrated, RepositoryOptions(out, slo_ms=10_000.0))
    code = ServerCode({file.name: file for file in (out / MODEL / "1").glob("*.py")})
    answering = code.module("answering").Answering(out / MODEL / "1")
    choose = code.module("choose")
    asked = ("embedding", "variant", "degraded")
    choice = answering.choice("{}", asked)
    role, choice = answering.component(choice, {"image"}, asked)
    assert (role, choice.space) == ("", FULL) and choice.wish.embeds
    names = [one.name for one in choose.candidates_of(answering.routes, choice.wish)]
    assert names == [FULL, "auto", HALF]
    # Without a map, a variant does not take part.
    lost = [route._replace(in_space=route.name == FULL) for route in answering.routes.variants]
    alone = answering.routes._replace(variants=tuple(lost), policies=())
    assert [one.name for one in choose.candidates_of(alone, choice.wish)] == [FULL]
    # Who does not ask how it was chosen gets one variant in its own space.
    _, choice = answering.component(answering.choice("{}", asked[:2]), {"image"}, asked[:2])
    assert choice.wish is None and choice.space == ""


def test_an_index_of_the_users_is_searched(folder, images, model, tmp_path):
    stored = model.embed(list(drawn(300, seed=8)[..., 0]))
    path = tmp_path / "mine.npz"
    save_embeddings(path, stored, [str(at) for at in range(300)])
    done = calibrate(folder, options(images, against_index=path), progress=None)
    assert (done.content.index, done.content.vectors) == ("mine.npz", 300)
    save_embeddings(path, replace(stored, sha256="f" * 64), ["0"] * 300, force=True)
    with pytest.raises(SaccadeError, match="--against-index"):
        calibrate(folder, options(images, against_index=path), progress=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    (
        ({"limit": 60, "risk": (0.2,)}, "leaves 30 samples"),
        ({"limit": 400, "risk": (0.01,)}, "expected at least 996"),
        ({"min_recall": 1.0}, "recall@1"),
        ({"against": "labels"}, "--against labels"),
        ({"min_ari": 0.9}, "--min-ari"),
        ({"embedding": False, "against_index": Path("a.npy")}, "--embedding"),
    ),
    ids=("few", "fewer", "recall", "labels", "ari", "index"),
)
def test_what_cannot_be_certified_is_refused(folder, images, changes, words):
    with pytest.raises(SaccadeError, match=words):
        calibrate(folder, options(images, **changes), progress=None)
    assert not list(folder.glob("auto*"))


def test_a_folder_without_embeddings_is_refused(tmp_path, images):
    place = artefacts(tmp_path / "tiny")
    for manifest in ArtefactFolder(place).manifests:
        kept = tuple(spec for spec in manifest.outputs if spec.name != "embedding")
        write_manifest(place, replace(manifest, outputs=kept))
    measured(place, {FULL: 100.0, HALF: 1_000.0})
    with pytest.raises(SaccadeError, match="has no output embedding"):
        calibrate(place, options(images), progress=None)


def test_maps_other_than_the_calibrations_are_refused(calibrated, tmp_path):
    place = shutil.copytree(calibrated, tmp_path / "tiny")
    path = place / "auto.policy.json"
    content = json.loads(path.read_text())
    content["maps"][0]["recall"] = 1.0
    path.write_text(json.dumps(content))
    (report,) = check_certificates(place, ArtefactFolder(place).variants)
    assert not report.passed and "maps" in report.problem
