# SPDX-License-Identifier: Apache-2.0
"""The report shows every variant, alone and offline, from its JSON; labels stay apart."""

import json
import re
import subprocess
import sys
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from places import ROOT
from report_figures import (
    figures,
    file,
    measured_policy,
    point,
    shown,
    variant,
    with_examples,
    with_policies,
)

from saccade.core.errors import SaccadeError
from saccade.serving.bench import picture, report
from saccade.serving.bench.figures import throughput_of, words
from saccade.serving.bench.picture import frontier_png

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[bench]'")
pytest.importorskip("plotly", reason="plotly is not installed: pip install '.[bench]'")

from matplotlib.path import Path


@pytest.fixture
def full():
    return figures()


def test_the_tables_hold_every_variant_and_fit_80_columns(full):
    text = shown(report.render(full))
    for each in full["variants"]:
        assert text.count(each["variant"]) >= 4
    assert "…" not in text
    assert re.search(r"nac-b0500-fp32 .*85\.00 .*nac-b1000-fp32", text)
    assert re.search(r"nac-b0125-fp32 .*7,800 .*3,900", text)
    assert "9.00/18.0/270" in text
    assert "A CPU, 2 cores" in text and "triton 2.51.0" in text


def test_without_a_server_the_report_says_so(full, tmp_path):
    full["server"] = None
    for each in full["variants"]:
        each["grpc"] = None
    report.write_report(full, tmp_path)
    text = shown(report.render(full))
    assert "Latency" not in text and "without a server" in text
    assert "gRPC x" not in (tmp_path / "report.html").read_text()


def test_a_busy_machine_and_rounds_that_differ_are_in_the_head(full: dict[str, Any]) -> None:
    assert "Noisy" not in words("summary", full)
    full["machine"] |= {"load_average": 6.24, "cores": 2}
    assert "load average was 6.2 on 2 cores at the start" in words("summary", full)
    assert "load average was 6.2" in shown(report.render(full))
    full["machine"]["load_average"] = 0.4
    full["variants"][1]["grpc"]["concurrency_16"]["inferences_per_second_rounds"] = [300, 480]
    assert "rounds of one variant differ by up to 1.6 times" in words("summary", full)
    full["variants"][1]["grpc"]["concurrency_16"]["inferences_per_second_rounds"] = [390, 410]
    assert "Noisy" not in words("summary", full)


def test_policies_are_beside_the_fixed_budgets(full, tmp_path):
    assert "Policies" not in shown(report.render(full))
    assert report.page(full, b"").count("policy auto") == 0
    with_policies(full)
    text = shown(report.render(full))
    assert re.search(r"auto +92\.50 +90\.5-94\.5 +99\.20 +1 +2,100 +2\.5 +2\.2-2\.9", text)
    assert re.search(r"auto +1 +nac-b0125-fp32 +70\.0 +0\.8000", text) and "…" not in text
    told = " ".join(text.split())
    assert "Policy auto: 2.5 times the throughput of the full model (95 %: 2.2 to 2.9)" in told
    assert "Policy old was not measured: its variants have changed." in told
    report.write_report(full, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<li>Policy auto: 2.5 times" in page and "policy auto 92.50 %" in page


def test_the_picture_of_policies_is_of_speeds_that_both_have(full):
    axes = picture.frontier_figure(with_policies(full)).axes[0]
    assert "in process" in axes.get_xlabel()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fixed budget", "policy"]
    assert "auto · 2.5x · 92.50 %" in [text.get_text() for text in axes.texts]
    # The server's speeds decided who is dominated, so nobody is marked by those in process.
    assert list(axes.lines[0].get_xdata()) == [7800, 840, 800]


def test_dominated_variants_are_marked_in_the_picture_and_off_the_staircase(full):
    axes = picture.frontier_figure(full).axes[0]
    assert axes.lines[0].get_xydata().tolist() == [[3900, 88], [420, 93]]
    words = [text.get_text() for text in axes.texts]
    assert ["dominated by b1000-fp32" in text for text in words] == [False, True, False]


def test_pictures_and_page_come_from_the_json_again(full, tmp_path):
    report.write_report(full, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in ("frontier.png", "report.html")}
    for name in before:
        (tmp_path / name).unlink()
    command = [sys.executable, "-m", "saccade.serving.bench.report", str(tmp_path / "report.json")]
    subprocess.run(command, check=True)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


@pytest.fixture
def codes(full):
    """A model of two towers: the budget saves bytes, each tower has figures of its own."""
    for each, bytes_of, score in zip(
        full["variants"], (16_384, 8_192, 4_096), (1.2, 1.25, -0.1), strict=True
    ):
        name = each["variant"]
        each["files"] = [file(name.replace("-b", f"-{role}-b"), role) for role in ("image", "text")]
        each["embedding_bytes"], each["top5"], each["dominated_by"] = bytes_of, None, None
        each["score"] |= {
            "name": "CIDEr-D", "unit": "CIDEr-D", "value": score,
            "interval": [score - 0.1, score + 0.05],
        }  # fmt: skip
        each["scores"] = [
            {"name": "R@1", "unit": "share", "value": 0.5, "interval": [0.4, 0.6], "n": 99},
            {"name": "JS", "unit": "nats", "value": 0.25, "interval": None, "n": 99},
        ]
        each["in_process"]["text"] = {"best_batch": 1, "batch_1": point(77, 1.0)}
        each["grpc"]["text"] = {"concurrency_1": point(33, 1.0)}
    full["variants"][0]["dominated_by"] = full["variants"][1]["variant"]
    return full


def test_another_unit_and_a_second_component_read_well(codes, tmp_path):
    text = shown(report.render(codes))
    assert "…" not in text and "Further scores" in text
    # No per cent where there is none, a share beside it still in per cent.
    assert re.search(r"nac-b0500-fp32 .*8,192 +1\.250 +1\.150-1\.300", text)
    assert re.search(r"-0\.100 +-0\.200 to -0\.050", text)
    assert re.search(r"R@1 +50\.00 % +40\.0-60\.0", text) and re.search(r"JS +0\.250 +-", text)
    assert "CIDEr-D %" not in text and "top-5" not in text and "Further scores" in text
    assert re.search(r"nac-b0500-fp32 image +800", text)
    assert re.search(r"nac-b0500-fp32 text +77 +- +77 at 1 +33 +-", text)
    report.write_report(codes, tmp_path)
    assert "8,192 bytes per embedding" in (tmp_path / "report.html").read_text()


def test_the_frontier_of_codes_is_score_against_bytes(codes):
    axes = picture.frontier_figure(codes).axes[0]
    assert axes.lines[0].get_xydata().tolist() == [[4096, -0.1], [8192, 1.25]]
    assert axes.get_xlabel() == "Bytes per embedding"
    assert axes.get_ylabel() == "CIDEr-D on the test split"


def test_the_headline_counts_what_the_budget_saves(full):
    full["variants"][2]["score"]["value"] = 0.91
    told = "9.3 times the throughput of nac-b1000-fp32 ({}), with a score 2.0 points"
    where = throughput_of(full["variants"][2])[1]
    assert told.format(where) in report.headline(full)
    full["variants"][2]["score"]["value"] = 0.9301
    assert f"throughput of nac-b1000-fp32 ({where}), with the same score." in report.headline(full)
    full["variants"][2]["score"]["value"] = 0.91
    for each, bytes_of in zip(full["variants"], (4096, 2048, 512), strict=True):
        each["embedding_bytes"] = bytes_of
    assert "an embedding 8.0 times smaller than that of nac-b1000" in report.headline(full)


@pytest.mark.parametrize(
    ("key", "value"), [("variants", []), ("machine", None), ("data", 10**400), ("examples", None)]
)
def test_a_damaged_report_is_refused(key, value, full, tmp_path):
    path = tmp_path / "report.json"
    if key == "examples":  # a picture that is no base64
        value = with_examples(full)["examples"]
        value["shown"][0]["image"] = '"><script>'
    path.write_text(json.dumps(full | {key: value}))
    with pytest.raises(SaccadeError, match="incomplete or edited"):
        report.draw_again(path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_the_example_pictures_are_what_their_committed_figures_give():
    """Fails after a change to the picture: run benchmarks/example_sweeps.py then."""
    known = sorted((ROOT / "benchmarks" / "results").glob("sweep_*.json"))
    assert known
    for path in known:
        content = report.read_report(path)
        place = ROOT / "docs" / "examples" / f"sweep-{content['model']}.png"
        assert place.read_bytes() == frontier_png(content)


@pytest.mark.parametrize(
    "content", ["", "[]", json.dumps({"schema": "saccade.report", "version": 9})]
)
def test_a_foreign_report_is_refused(content, tmp_path):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(SaccadeError, match="saccade bench"):
        report.read_report(tmp_path / "report.json")


def crowded() -> dict[str, Any]:
    """Return a report of seven variants and four policies, of which three are nearly equal."""
    content = figures()
    content["server"] = None
    rates = (216, 290, 430, 800, 980, 1500, 2500)
    scores = (0.924, 0.9238, 0.925, 0.9242, 0.925, 0.921, 0.884)
    budgets = (1, 0.75, 0.5, 0.25, 0.2, 0.125, 0.0625)
    content["variants"] = [
        variant(budget, score, rate, None) | {"grpc": None}
        for budget, score, rate in zip(budgets, scores, rates, strict=True)
    ]
    content["policies"] = [
        measured_policy()
        | {"policy": f"auto-{risk}", "times_full": {"times": rate / 432, "interval": None}}
        | {"in_process": {"best_batch": 8, "batch_8": point(rate, 0.5)}}
        for risk, rate in ((0.005, 1000), (0.01, 1050), (0.02, 1100), (0.05, 2900))
    ]
    return content


def drawn_labels(content: dict[str, Any]) -> tuple[dict[str, np.ndarray], np.ndarray, Any]:
    """Return the labels of a picture with their boxes, its points, and its axes."""
    figure = picture.frontier_figure(content)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    places = [line.get_xydata()[0] for line in axes.lines if line.get_zorder() >= 3]
    boxes = {text.get_text(): text.get_window_extent().extents for text in axes.texts}
    return boxes, axes.transData.transform(places), axes


def test_labels_of_nearly_equal_points_do_not_touch() -> None:
    boxes, points, axes = drawn_labels(crowded())
    assert len(boxes) == len(points) == 11 and "auto-0.02 · 2.5x" in boxes
    inside = axes.get_window_extent().extents
    (legend,) = [axes.get_legend().get_window_extent().extents]
    for name, box in boxes.items():
        others = [other for label, other in boxes.items() if label != name] + [legend]
        for other in others:
            apart = (box[:2] >= other[2:]).any() or (other[:2] >= box[2:]).any()
            assert apart, f"{name}: {box} touches {other}"
        covered = ((points > box[:2]) & (points < box[2:])).all(1)
        assert not covered.any(), f"{name} covers a point"
        assert (box[:2] >= inside[:2]).all() and (box[2:] <= inside[2:]).all(), name


def test_lines_lead_from_policies_to_their_labels_and_do_not_cross() -> None:
    boxes, points, axes = drawn_labels(crowded())
    lines = [line for line in axes.lines if line.get_zorder() == 2.4]
    assert len(lines) >= 4
    ends = [axes.transData.transform(line.get_xydata()) for line in lines]
    for (x, y), (to_x, to_y) in ends:
        assert np.isclose(points, (x, y), atol=0.5).all(1).any()
        assert any(
            box[0] - 1 <= to_x <= box[2] + 1 and box[1] - 1 <= to_y <= box[3] + 1
            for box in boxes.values()
        )
    paths = [Path(each) for each in ends]
    assert not any(one.intersects_path(other) for one, other in combinations(paths, 2))


def test_labels_of_equal_points_stay_in_the_picture() -> None:
    content = crowded()
    for one in content["policies"]:
        one["in_process"] = content["policies"][0]["in_process"]
    boxes, _, axes = drawn_labels(content)
    inside = axes.get_window_extent().extents
    for box in boxes.values():
        assert (box[:2] >= inside[:2]).all() and (box[2:] <= inside[2:]).all()
