# SPDX-License-Identifier: Apache-2.0
"""`bench` on families whose requests are more than an image: what is asked, scored and reported."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_folders import family_folder
from policy_files import calibrated_slots, write_policy
from report_figures import shown

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import read_frontier
from saccade.plugins.native.library import available_library
from saccade.serving.bench.bench import bench
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.report import render
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions

pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
pytest.importorskip("onnxruntime", reason="not installed: pip install '.[cpu]'")
pytest.importorskip("matplotlib", reason="not installed: pip install '.[bench]'")

# Of the variants in a folder; one each would not show what a budget changes.
MEASURED = {"sparo": ("b1000", "b0667")}
SCORES = {
    "sparo": ("zero-shot top-1", "share", "shapes"),
    "slot-attention": ("FG-ARI", "index", "tetrominoes"),
    "vqa": ("accuracy", "share", "shapes"),
    "captioner": ("CIDEr-D", "CIDEr-D", "shapes"),
}
LIMIT = 24


def folder_of(family: str, place: Path) -> Path:
    """The family's tiny folder with the variants that are measured."""
    folder = shutil.copytree(family_folder(family), place / "folder")
    for manifest in ArtefactFolder(folder).manifests:
        if manifest.variant.setting not in MEASURED.get(family, (manifest.variant.setting,)):
            for path in folder.glob(f"{Path(manifest.file.name).stem}.*"):
                path.unlink()
    return folder


# Questions are measured as plain images are.
@pytest.fixture(scope="module", params=["sparo", "slot-attention", "captioner"])
def measured(request, needs_server, tmp_path_factory):
    """One short run of each family on its own data, through a server."""
    family = request.param
    place = tmp_path_factory.mktemp(family)
    options = BenchOptions(place / "report", limit=LIMIT, seconds=0.1, rounds=1, concurrency=(1, 2))
    folder = folder_of(family, place)
    if family == "sparo":
        write_policy(folder)
    if family == "slot-attention":
        assert calibrated_slots(folder).exit_code == 0
        (folder / "frontier.json").unlink()  # the speeds that it was calibrated with
    return family, bench(folder, options)


def test_a_policy_is_served_and_compared_with_the_full_model(measured):
    """Zero-shot: only a router with labels can follow a policy, and has other outputs then."""
    family, report = measured
    if family == "captioner":
        assert "policies" not in report.full
        return
    (policy,) = report.full["policies"]
    assert policy["min_ari"] == (0.95 if family == "slot-attention" else None)
    points = {f"router_concurrency_{count}" for count in (1, 2)}
    (full_model,) = [one for one in report.full["variants"] if one["variant"] == policy["full"]]
    beside = (
        policy["samples"] if family == "sparo" else {"full_grpc": full_model["samples"]["grpc"]}
    )
    assert set(policy["grpc"]) == points <= set(beside["full_grpc"])
    assert ("full_grpc" in policy["samples"]) == (family == "sparo")
    (own,), (full,) = (
        each["router_concurrency_2"] for each in (policy["samples"]["grpc"], beside["full_grpc"])
    )
    rates = [len(one["latencies_ms"]) / one["seconds"] for one in (own, full)]
    times = policy["times_full_served"]["times"]
    assert times == pytest.approx(rates[0] / rates[1], rel=1e-3)


def test_each_request_is_measured_where_it_can_be_asked(measured):
    family, report = measured
    for variant in report.full["variants"]:
        # Kernels unless none can be built here, and the report says which; the others call no op.
        ran = "kernels" if available_library() else "bodies"
        assert variant["ops"] == (ran if family == "captioner" else None)
        routed, direct = (
            {f"{kind}concurrency_{count}" for count in (1, 2)} for kind in ("router_", "")
        )
        # Only the router makes a caption.
        expected = routed if family == "captioner" else routed | direct
        beside = {"text"} if family == "sparo" else set()
        assert set(variant["grpc"]) == expected | beside
        assert beside <= set(variant["in_process"])
        for role in beside:
            assert set(variant["grpc"][role]) == expected
            assert variant["in_process"][role]["batch_64"]["inferences_per_second"] > 0
            assert set(variant["samples"][role]["grpc"]) == expected
        assert len(variant["files"]) == {"vqa": 1}.get(family, 2)


def test_the_score_is_the_familys_and_reaches_the_frontier(measured):
    family, report = measured
    frontier = read_frontier(report.folder.parent / "folder" / "frontier.json")
    assert len(frontier.entries) == len(report.full["variants"])
    for entry, each in zip(frontier.entries, report.full["variants"], strict=True):
        score = entry.score
        assert (score.name, score.unit, score.data) == SCORES[family]
        values = np.array(each["samples"]["values"])
        assert len(values) == score.n == LIMIT * (2 if family == "vqa" else 1)
        assert score.value == pytest.approx(values.mean(), abs=1e-5)
        assert score.interval[0] <= score.value <= score.interval[1]
        assert (entry.embedding_bytes is None) == (family != "sparo")
        assert entry.p95_ms is not None and entry.speed > 0
    sizes = [entry.embedding_bytes for entry in frontier.entries]
    if family == "sparo":
        assert 3 * sizes[0] == 4 * sizes[1]  # slots


def test_the_measured_folder_is_deployed_with_its_scores(measured, tmp_path):
    family, report = measured
    deployment = deploy(report.folder.parent / "folder", RepositoryOptions(out=tmp_path / "out"))
    assert not deployment.unmeasured
    routes: dict[str, Any] = json.loads((tmp_path / f"out/{family}/1/routes.json").read_bytes())
    for route, each in zip(routes["variants"], report.full["variants"], strict=True):
        assert route["name"] == each["variant"]
        assert route["lower_bound"] == each["score"]["interval"][0]
        assert route["run_batch"] == each["in_process"]["best_batch"]


def test_the_report_names_the_score_and_its_unit(measured):
    family, report = measured
    name, unit, _ = SCORES[family]
    text = " ".join(shown(render(report.to_dict())).split())
    assert (f"{name} %" in text) == (unit == "share")
    assert name in text and "…" not in text
    page = (report.folder / "report.html").read_text()
    assert all(
        file["name"] in page for variant in report.full["variants"] for file in variant["files"]
    )
