# SPDX-License-Identifier: Apache-2.0
"""The report shows every variant, alone and offline, from its JSON."""

import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from saccade.errors import SaccadeError
from saccade.serving.bench import report

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[bench]'")


def point(rate: float, milliseconds: float) -> dict[str, Any]:
    return {
        "inferences_per_second": rate,
        "p50_ms": milliseconds,
        "p95_ms": 2 * milliseconds,
        "p99_ms": 30 * milliseconds,
        "client_cpu_share": 0.2,
    }


def file(name: str, role: str) -> dict[str, Any]:
    return {
        "name": name,
        "role": role,
        "sha256": "ab" * 32,
        "file_bytes": 3_000_000,
        "parameters": 700_000,
        "multiply_adds": 51_000_000,
        "peak_activation_bytes": 1_000_000,
    }


def variant(budget: float, score: float, rate: float, dominated_by: str | None) -> dict[str, Any]:
    return {
        "variant": f"nac-b{round(1000 * budget):04d}-fp32",
        "sha256": "ab" * 32,
        "budget": budget,
        "precision": "fp32",
        "kept": round(256 * budget),
        "total": 256,
        "unit": "modules",
        "files": [file(f"nac-b{round(1000 * budget):04d}-fp32", "")],
        "score": {
            "name": "top-1",
            "unit": "share",
            "higher_is_better": True,
            "value": score,
            "interval": [score - 0.02, score + 0.02],
            "n": 599,
        },
        "scores": [],
        "top5": 0.99,
        "embedding_bytes": None,
        "in_process": {
            "best_batch": 8,
            **{f"batch_{size}": point(2 * rate, 1.0) for size in (1, 8, 64)},
        },
        "grpc": {
            "concurrency_1": point(rate / 2, 2.0),
            "concurrency_16": point(rate, 9.0),
            "router_concurrency_1": point(rate / 3, 3.0),
        },
        "dominated_by": dominated_by,
    }


@pytest.fixture
def full() -> dict[str, Any]:
    return {
        "schema": report.SCHEMA,
        "version": report.VERSION,
        "model": "nac",
        "data": {"name": "digits-sum & <script>", "sha256": "cd" * 32, "n": 599},
        "machine": {"device": "A CPU, 2 cores", "runtime": "onnxruntime 1.31.1 CPU"},
        "date": "2026-11-21T02:30:00+00:00",
        "server": "triton 2.51.0",
        "variants": [
            variant(1, 0.93, 420, None),
            variant(0.5, 0.85, 400, "nac-b1000-fp32"),
            variant(0.125, 0.88, 3900, None),
        ],
    }


def rendered(content: Any) -> str:
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=80).print(content)
    return stream.getvalue()


def test_the_tables_hold_every_variant_and_fit_80_columns(full: dict[str, Any]) -> None:
    text = rendered(report.render(full))
    for variant in full["variants"]:
        assert text.count(variant["variant"]) >= 4
    assert "…" not in text
    assert re.search(r"nac-b0500-fp32 .*85\.00 .*nac-b1000-fp32", text)
    assert re.search(r"nac-b0125-fp32 .*7,800 .*3,900", text)
    assert "9.00/18.0/270" in text
    assert "A CPU, 2 cores" in text and "triton 2.51.0" in text


def test_without_a_server_the_report_says_so(full: dict[str, Any], tmp_path: Path) -> None:
    full["server"] = None
    for variant in full["variants"]:
        variant["grpc"] = None
    report.write_report(full, tmp_path)
    text = rendered(report.render(full))
    assert "Latency" not in text and "without a server" in text
    assert "gRPC x" not in (tmp_path / "report.html").read_text()


def test_the_page_is_whole_without_a_network(full: dict[str, Any], tmp_path: Path) -> None:
    report.write_report(full, tmp_path)
    page = (tmp_path / "report.html").read_text()
    picture = (tmp_path / "frontier.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert base64.b64encode(picture).decode() in page
    # Nothing is loaded: every src is the picture itself, and there is no address at all.
    assert set(re.findall(r'src="([^,"]*)', page)) == {"data:image/png;base64"}
    own = page.replace(base64.b64encode(picture).decode(), "")
    assert not re.search(r"https?:|//[a-z]|<link|@import|url\(|<script", own)
    assert "&lt;script&gt;" in page
    for variant in full["variants"]:
        assert page.count(variant["variant"]) >= 3


def test_names_are_text_in_picture_and_page(full: dict[str, Any], tmp_path: Path) -> None:
    hostile = '"><img src=x onerror=alert(1)>$\\frac{$ ${title}'
    full["model"] = full["data"]["name"] = full["machine"]["device"] = hostile
    for variant in full["variants"]:
        variant["variant"] = variant["files"][0]["name"] = hostile
        variant["score"]["name"] = variant["unit"] = hostile
    full["failed"] = [{"variant": hostile, "stage": hostile, "reason": hostile}]
    report.write_report(full, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") == 1 and "<img src=x" not in page
    assert page.count("&quot;&gt;&lt;img src=x onerror=alert(1)&gt;$\\frac{$ ${title}") > 20


def test_dominated_variants_are_marked_in_the_picture_and_off_the_staircase(full) -> None:
    from matplotlib.figure import Figure

    from saccade.serving.bench import picture

    axes = Figure().add_subplot()
    picture._draw_frontier(axes, full["variants"])
    assert list(axes.lines[0].get_xdata()) == [420, 3900]
    assert list(axes.lines[0].get_ydata()) == [93, 88]
    picture._name_points(axes, full)
    words = [text.get_text() for text in axes.texts]
    assert ["dominated by b1000-fp32" in text for text in words] == [False, False, True]


def test_pictures_and_page_come_from_the_json_again(full: dict[str, Any], tmp_path: Path) -> None:
    report.write_report(full, tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in ("frontier.png", "report.html")}
    for name in before:
        (tmp_path / name).unlink()
    command = [sys.executable, "-m", "saccade.serving.bench.report", str(tmp_path / "report.json")]
    subprocess.run(command, check=True)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


@pytest.fixture
def codes(full: dict[str, Any]) -> dict[str, Any]:
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


def test_another_unit_and_a_second_component_read_well(
    codes: dict[str, Any], tmp_path: Path
) -> None:
    text = rendered(report.render(codes))
    assert "…" not in text
    # No per cent where there is none, a share beside it still in per cent.
    assert re.search(r"nac-b0500-fp32 .*8,192 +1\.250 +1\.150-1\.300", text)
    assert re.search(r"-0\.100 +-0\.200 to -0\.050", text)
    assert re.search(r"R@1 +50\.00 % +40\.0-60\.0", text) and re.search(r"JS +0\.250 +-", text)
    assert "CIDEr-D %" not in text and "top-5" not in text
    assert re.search(r"nac-b0500-fp32 image +800", text)
    assert re.search(r"nac-b0500-fp32 text +77 +- +77 at 1 +33 +-", text)
    report.write_report(codes, tmp_path)
    assert "8,192 bytes an embedding" in (tmp_path / "report.html").read_text()


def test_the_frontier_of_codes_is_score_against_bytes(codes: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    from saccade.serving.bench import picture

    axes = Figure().add_subplot()
    picture._draw_frontier(axes, codes["variants"])
    assert list(axes.lines[0].get_xdata()) == [4096, 8192]
    assert list(axes.lines[0].get_ydata()) == [-0.1, 1.25]
    picture._dress(axes, codes)
    assert axes.get_xlabel() == "bytes per embedding"
    assert axes.get_ylabel() == "CIDEr-D on the test split"


def test_the_headline_counts_what_the_budget_saves(full: dict[str, Any]) -> None:
    full["variants"][2]["score"]["value"] = 0.91
    assert "9.3 times the throughput of nac-b1000-fp32, score 2.0 points lower" in report.headline(
        full
    )
    for each, bytes_of in zip(full["variants"], (4096, 2048, 512), strict=True):
        each["embedding_bytes"] = bytes_of
    assert "an embedding 8.0 times smaller than that of nac-b1000" in report.headline(full)


def test_a_damaged_report_is_refused(full: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for key, value in (("variants", []), ("machine", None), ("data", 10**400)):
        path.write_text(json.dumps(full | {key: value}))
        with pytest.raises(SaccadeError, match="damaged or was edited"):
            report.draw_again(path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_the_examples_are_what_their_committed_figures_give() -> None:
    """Fails after a change to the page: run benchmarks/example_sweeps.py then."""
    root = ROOT
    known = sorted((root / "benchmarks" / "results").glob("sweep_*.json"))
    assert known
    for path in known:
        content = report.read_report(path)
        place = root / "docs" / "examples" / f"sweep-{content['model']}"
        picture = place.with_suffix(".png").read_bytes()
        assert place.with_suffix(".html").read_text("utf-8") == report.page(content, picture)


@pytest.mark.parametrize(
    "content", ["", "[]", json.dumps({"schema": "saccade.report", "version": 9})]
)
def test_a_foreign_report_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(SaccadeError, match="saccade bench"):
        report.read_report(tmp_path / "report.json")
