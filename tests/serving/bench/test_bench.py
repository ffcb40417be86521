# SPDX-License-Identifier: Apache-2.0
"""`bench` end to end on the tiny folder, and what it leaves when it cannot finish."""

import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from folder_walk import MOST, openings, walked
from PIL import Image
from policy_files import write_policy
from report_figures import shown

from saccade.core.errors import MissingPackage, SaccadeError, ShapeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import read_frontier
from saccade.exporter.evaluation.evaluated_model import trained_on
from saccade.models.checkpoint import load, save
from saccade.models.data.datasets import load_data
from saccade.serving.bench import bench as bench_module
from saccade.serving.bench import in_process
from saccade.serving.bench.bench import bench
from saccade.serving.bench.in_process import BATCHES, Calls
from saccade.serving.bench.options import BenchOptions

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[cpu]'")
pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[bench]'")

VARIANTS = ["nac-b1000-fp32", "nac-b0500-fp32", "nac-b0250-fp32", "nac-b0125-fp32"]
SHORT: dict[str, Any] = {"seconds": 0.1, "rounds": 1, "concurrency": (1, 4)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "noise.npz"
    images = rng.integers(0, 256, (400, 8, 8, 1), dtype=np.uint8)
    np.savez(path, images=images, labels=np.arange(400) % 10)
    return path


@pytest.fixture
def folder(tiny_folder, tmp_path):
    return Path(shutil.copytree(tiny_folder, tmp_path / "nac"))


def test_an_unreadable_image_can_be_left_out(folder, tmp_path):
    place = tmp_path / "photos" / "test" / "0"
    place.mkdir(parents=True)
    for index in range(20):
        Image.new("L", (8, 8), index).save(place / f"{index:02}.png")
    (place / "03.png").write_bytes(b"\x89PNG")
    given = {"data": str(tmp_path / "photos"), "split": "all", "server": False, **SHORT}
    with pytest.raises(SaccadeError, match=r"03.png.*benchmarks leave out"):
        bench(folder, BenchOptions(tmp_path / "report", **given))
    bench(folder, BenchOptions(tmp_path / "report", **given, skip_bad=1))
    frontier = json.loads((folder / "frontier.json").read_text())
    assert {one["score"]["n"] for one in frontier["entries"]} == {19}


@pytest.fixture(scope="module")
def watched(tiny_folder, data, tmp_path_factory):
    """One run with everything on, shared by the tests that read what it wrote."""
    pytest.importorskip("pytriton", reason="no server: pip install '.[serve]'")
    place = tmp_path_factory.mktemp("served")
    folder = shutil.copytree(tiny_folder, place / "nac")
    write_policy(Path(folder))
    with walked(Path(folder)) as walk:
        return bench(folder, BenchOptions(place / "report", str(data), **SHORT)), walk


@pytest.fixture(scope="module")
def served(watched):
    return watched[0]


def test_the_folder_is_read_once(watched):
    _, walk = watched
    walk.check(*MOST["bench"])


def test_every_variant_is_measured_in_process_and_served(served):
    full = json.loads((served.folder / "report.json").read_bytes())
    assert [variant["variant"] for variant in full["variants"]] == VARIANTS
    for variant in full["variants"]:
        inside, samples = variant["in_process"], variant["samples"]
        assert inside["threads"] == 1
        rates = {size: inside[f"batch_{size}"]["inferences_per_second"] for size in BATCHES}
        assert rates[inside["best_batch"]] >= 0.95 * max(rates.values())
        points = {f"{kind}concurrency_{count}" for kind in ("", "router_") for count in (1, 4)}
        assert set(variant["grpc"]) == points
        for name, point in variant["grpc"].items():
            latencies = [ms for one in samples["grpc"][name] for ms in one["latencies_ms"]]
            assert point["requests"] == len(latencies) > 0
            assert point["p50_ms"] <= point["p95_ms"] <= point["p99_ms"] <= max(latencies) + 1e-3
            assert 0 < point["client_cpu_share"] <= 1
        (file,) = variant["files"]
        assert file["multiply_adds"] > 0 and file["peak_activation_bytes"] > 0
    assert full["machine"]["runtime"].startswith("onnxruntime ")
    assert full["server"].startswith("triton ")
    page = (served.folder / "report.html").read_text()
    assert all(name in page for name in VARIANTS)
    assert not {"samples", "examples"} & {*served.to_dict(), *served.to_dict()["variants"][0]}
    assert len(full["examples"]["shown"]) > 4
    for example in full["examples"]["shown"]:
        for variant in full["variants"]:
            answer = example["answers"][variant["variant"]]
            assert answer["score"] == variant["samples"]["values"][example["index"]]
            assert (answer["text"] == example["truth"]) == bool(answer["score"])


def test_the_score_is_the_hand_count_on_the_test_split(served, data, tiny_folder):
    import onnxruntime

    test = load_data(str(data), "test")
    for variant in served.full["variants"]:
        path = str(tiny_folder / f"{variant['variant']}.onnx")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        answers = [
            int(session.run(["logits"], {"image": image[None]})[0].argmax())
            for image in test.images
        ]
        hits = [int(a == b) for a, b in zip(answers, test.labels, strict=True)]
        assert variant["samples"]["values"] == hits
        assert variant["score"]["value"] == pytest.approx(np.mean(hits), abs=1e-6)
        low, high = variant["score"]["interval"]
        assert low < np.mean(hits) < high


def test_the_frontier_names_what_was_measured(served):
    frontier = read_frontier(served.folder.parent / "nac" / "frontier.json")
    assert [entry.variant for entry in frontier.entries] == VARIANTS
    for entry, each in zip(frontier.entries, served.full["variants"], strict=True):
        assert entry.sha256 == each["sha256"]
        assert entry.device == served.full["machine"]["device"]
        assert entry.dominated_by == each["dominated_by"]
        # What the router promises of latency is what a caller of the router sees.
        assert entry.p95_ms == each["grpc"]["router_concurrency_1"]["p95_ms"]


def test_a_policy_is_measured_in_process_and_served(served):
    (policy,) = json.loads((served.folder / "report.json").read_bytes())["policies"]
    (entry,) = read_frontier(served.folder.parent / "nac" / "frontier.json").policies
    kept = {key: value for key, value in policy.items() if key != "samples"}
    assert kept == json.loads(json.dumps(asdict(entry)))
    assert [step.variant for step in entry.steps][-1] in VARIANTS and entry.full == VARIANTS[0]
    assert set(policy["grpc"]) == {"router_concurrency_1", "router_concurrency_4"}
    assert policy["samples"]["grpc"]["router_concurrency_4"][0]["latencies_ms"]
    assert not {"samples"} & {*served.to_dict()["policies"][0]}
    assert entry.times_full_served is not None and entry.times_full.interval is None  # one round
    text = shown(served.to_text(), 200)
    assert "Policy auto" in text and "not shown to be faster" in text
    assert "Policy auto" in (served.folder / "report.html").read_text()


def test_a_quick_look_leaves_the_full_measurement(served, data, tmp_path):
    folder = Path(shutil.copytree(served.folder.parent / "nac", tmp_path / "nac"))
    before = (folder / "frontier.json").read_bytes()
    quick: dict[str, Any] = {"seconds": 0.01, "rounds": 1, "limit": 20, "server": False}
    with openings(data.parent) as once:
        load_data(data, "test")
    with openings(data.parent) as opened:
        looked = bench(folder, BenchOptions(tmp_path / "quick", str(data), **quick))
    # Loaded for all variants, and for the policy, whose samples are always of the test split.
    assert 0 < opened["noise.npz"] < 3 * once["noise.npz"]
    assert (folder / "frontier.json").read_bytes() == before
    assert (tmp_path / "quick" / "report.html").exists()
    assert looked.to_dict()["frontier_kept"][0] == ("nac-b1000-fp32: 20 instead of 80 test samples")
    assert "--replace-frontier" in shown(looked.to_text(), 200)
    options = BenchOptions(
        tmp_path / "again", str(data), split="val", replace_frontier=True, **quick
    )
    again = bench(folder, options)
    assert again.to_dict()["frontier_kept"] == []
    report = json.loads((tmp_path / "again" / "report.json").read_bytes())
    held_out = load_data(str(data), "validation").sha256
    assert (report["data"]["split"], report["data"]["sha256"]) == ("validation", held_out)
    assert "on the validation split of" in shown(again.to_text(), 200)
    assert {one.score.n for one in read_frontier(folder / "frontier.json").entries} == {20}


def test_a_server_that_runs_is_measured_as_it_is(server, data, tmp_path):
    quick: dict[str, Any] = {"seconds": 0.02, "rounds": 2, "concurrency": (1, 2), "limit": 40}
    out = tmp_path / "report"
    options = BenchOptions(out, str(data), url=server.url, **quick)
    made = bench(None, options)
    content = json.loads((out / "report.json").read_bytes())
    assert sorted(one["variant"] for one in content["variants"]) == sorted(VARIANTS)
    for one in content["variants"]:
        assert set(one["points"]) == {"1", "2"} and one["score"]["n"] == 40
        assert len(one["points"]["1"]["inferences_per_second_rounds"]) == 2
    assert sorted(path.name for path in out.iterdir()) == ["report.json"]
    assert "No frontier.json was changed" in " ".join(shown(made.to_text(), 200).split())
    with pytest.raises(SaccadeError, match="found both, expected a folder"):
        bench(tmp_path, BenchOptions(tmp_path / "other", url=server.url))
    with pytest.raises(SaccadeError, match="found neither, expected a folder"):
        bench(None, BenchOptions(tmp_path / "other"))
    with pytest.raises(SaccadeError, match="--split val: found no --data"):
        bench(None, BenchOptions(tmp_path / "other", url=server.url, split="val"))
    with pytest.raises(SaccadeError, match="no model 'nothing'"):
        bench(None, BenchOptions(tmp_path / "other", url=server.url, model="nothing"))


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({1: 100, 2: 101, 4: 100, 8: 100, 16: 99, 32: 98, 64: 97}, 8),
        ({1: 560, 2: 570, 4: 590, 8: 570, 16: 440, 32: 380, 64: 320}, 8),
        ({1: 100, 2: 200, 4: 400, 8: 600, 16: 980, 32: 990, 64: 1000}, 16),
        ({1: 100, 2: 60, 4: 50, 8: 40, 16: 30, 32: 20, 64: 10}, 1),
    ],
)
def test_the_batch_to_serve_with_is_fast_and_no_larger_than_that_needs(rates, expected):
    calls = {size: Calls(size, [size / rate]) for size, rate in rates.items()}
    assert in_process.best_batch(calls) == expected


def test_larger_batches_are_left_out_where_one_call_takes_too_long(monkeypatch):
    monkeypatch.setattr(in_process, "LONGEST_CALL_S", 0.0)
    monkeypatch.setattr(in_process, "_WARM_S", 0.0)
    sizes: list[int] = []
    work = SimpleNamespace(
        title="slow",
        inputs={"image": np.zeros((3, 2))},
        varied=False,
        run=lambda given: sizes.append(len(given["image"])) or given,
    )
    measured = in_process.measure(
        {"slow": work}, seconds=0.0, rounds=2, advance=lambda *_, **__: None
    )
    # Two rounds of batches of one, warmed up once; no figure for the others.
    assert sizes == [1, 1, 1]
    assert set(measured["slow"].summary()) == {"threads", "best_batch", "batch_1"}


def test_the_default_data_is_what_the_model_was_trained_on(folder):
    manifest = ArtefactFolder(folder).manifests[0]
    path = folder / manifest.parent.name
    parent = load(path)
    for data, expected in (("digits", "digits"), ("my/photos", None)):
        save(
            path, family=parent.family, config=parent.config,
            weights=parent.weights,
            preprocessing=parent.preprocessing, labels=parent.labels,
            calibration=parent.calibration, card={"data": data},
        )  # fmt: skip
        assert trained_on(ArtefactFolder(folder).checkpoint) == expected
    converted = replace(parent, card={"data": "the authors'", "source": "vit"})
    with pytest.raises(SaccadeError, match=r"was converted.*--data FOLDER"):
        trained_on(converted)
    assert trained_on(replace(converted, labels=())) is None
    path.unlink()
    assert trained_on(ArtefactFolder(folder).checkpoint) is None


@pytest.mark.parametrize("stage", ["measuring", "writing"])
def test_an_interrupted_run_leaves_all_as_it_was(stage, folder, data, tmp_path, monkeypatch):
    options = BenchOptions(tmp_path / "report", str(data), server=False, force=True, **SHORT)
    bench(folder, options)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    owner, name = (in_process, "measure") if stage == "measuring" else (bench_module.report, "draw")
    monkeypatch.setattr(owner, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench(folder, options)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_existing_report_is_refused_before_any_work(folder, data, tmp_path, monkeypatch):
    (tmp_path / "report").mkdir()
    monkeypatch.setattr(ArtefactFolder, "open", lambda _: pytest.fail("work began"))
    with pytest.raises(SaccadeError, match="--force"):
        bench(folder, BenchOptions(tmp_path / "report", str(data)))


def test_data_that_does_not_fit_is_refused(folder, tmp_path):
    np.savez(
        tmp_path / "large.npz",
        images=np.zeros((400, 9, 8, 1), np.uint8),
        labels=np.arange(400) % 10,
    )
    np.savez(
        tmp_path / "more.npz", images=np.zeros((400, 8, 8, 1), np.uint8), labels=np.arange(400) % 12
    )
    for name, error, message in (
        ("no-such-data", SaccadeError, "no-such-data"),
        (str(tmp_path / "large.npz"), ShapeError, r"9, 8, 1"),
        (str(tmp_path / "more.npz"), SaccadeError, "found 12 classes"),
    ):
        with pytest.raises(error, match=message):
            bench(folder, BenchOptions(tmp_path / "report", name, server=False))
    assert not (tmp_path / "report").exists() and not (folder / "frontier.json").exists()


def test_a_changed_artefact_is_refused(folder, data, tmp_path):
    path = folder / "nac-b0500-fp32.onnx"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(SaccadeError, match="SHA-256"):
        bench(folder, BenchOptions(tmp_path / "report", str(data), server=False))


@pytest.mark.parametrize("package", ["matplotlib", "plotly", "jinja2"])
def test_a_missing_package_names_the_extra_before_anything_is_measured(
    package, folder, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=rf"{package}.*\S+\[bench\]"):
        bench(folder, BenchOptions(tmp_path / "report"))


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": 0},
        {"seconds": float("nan")},
        {"rounds": 0},
        {"concurrency": (0,)},
        {"limit": 1},
    ],
)
def test_options_out_of_range_are_refused(change):
    with pytest.raises(SaccadeError, match=f"--{next(iter(change))}"):
        BenchOptions(Path("report"), "digits", **change)
