# SPDX-License-Identifier: Apache-2.0
"""The frontier file, its intervals, and who dominates whom."""

import json
from dataclasses import replace

import numpy as np
import pytest

from saccade.plugins.errors import SaccadeError, ShapeError
from saccade.serving.frontier import (
    FILE_NAME,
    Entry,
    entry_of,
    mark_dominated,
    merge,
    paired_bootstrap,
    read_frontier,
    wilson,
)

POINT = {"inferences_per_second": 100.0, "p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0}


def entry(variant="nac-b1000-fp32", *, sha256="a" * 64, correct=None, speed=100.0, **changes):
    hits, n = (90, 100) if correct is None else (int(correct.sum()), len(correct))
    made = entry_of(
        {
            "variant": variant, "sha256": sha256, "budget": 1.0, "precision": "fp32",
            "runtime": "onnxruntime 1.31.1 CPU", "device": "a processor, 2 cores",
            "score": {
                "name": "top-1", "value": hits / n, "higher_is_better": True, "unit": "fraction",
                "n": n, "interval": list(wilson(hits, n)), "data": "digits",
                "data_sha256": "d" * 64,
            },
            "top5": None,
            "in_process": {
                "threads": 1, "best_batch": 8, "batch_1": POINT,
                "batch_8": {**POINT, "inferences_per_second": speed},
            },
            "grpc": None, "dominated_by": None,
        }
    )  # fmt: skip
    return replace(made, **changes)


def test_wilson_agrees_with_published_values():
    # Newcombe 1998, table I, method 3.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(29, 29) == pytest.approx((0.8830, 1.0), abs=5e-5)


def test_paired_bootstrap_agrees_with_resampling_image_by_image():
    rng = np.random.default_rng(0)
    a, b = rng.random(400) < 0.9, rng.random(400) < 0.85
    picks = rng.integers(0, 400, (4000, 400))
    plain = np.percentile((a[picks].astype(int) - b[picks]).mean(axis=1), (2.5, 97.5))
    assert paired_bootstrap(a, b, 0) == pytest.approx(plain, abs=0.004)
    assert paired_bootstrap(a, b, 0) == paired_bootstrap(a, b, 0)


def test_paired_bootstrap_needs_the_same_images():
    with pytest.raises(ShapeError, match="one length"):
        paired_bootstrap(np.ones(3), np.ones(4), 0)


def answers(*wrong, n=600):
    correct = np.ones(n, int)
    correct[list(wrong)] = 0
    return correct


GOOD, SLIGHTLY_WORSE, BAD = answers(0), answers(1, 2, 3), answers(*range(100, 200))
DOMINATED = {
    # case: (answers and speed of the slow one, of the fast one, who is dominated by whom)
    "slower and surely worse": ((BAD, 100), (GOOD, 200), {"slow": "fast", "fast": None}),
    "slower, worse by chance": ((SLIGHTLY_WORSE, 100), (GOOD, 200), {"slow": None, "fast": None}),
    "slower, better": ((GOOD, 100), (BAD, 200), {"slow": None, "fast": None}),
    "slower, right on the same": ((GOOD, 100), (GOOD, 200), {"slow": "fast", "fast": None}),
    "equally fast, surely worse": ((BAD, 200), (GOOD, 200), {"slow": "fast", "fast": None}),
    "equal in both": ((GOOD, 200), (GOOD, 200), {"slow": None, "fast": None}),
}


@pytest.mark.parametrize("case", DOMINATED)
def test_dominated_only_beyond_the_paired_interval(case):
    (slow, slow_speed), (fast, fast_speed), expected = DOMINATED[case]
    entries = (
        entry("slow", correct=slow, speed=float(slow_speed)),
        entry("fast", sha256="b" * 64, correct=fast, speed=float(fast_speed)),
    )
    marked = mark_dominated(entries, {"slow": slow, "fast": fast})
    assert {each.variant: each.dominated_by for each in marked} == expected


def test_another_device_dominates_nobody():
    entries = (
        entry("slow", correct=BAD),
        entry("fast", sha256="b" * 64, correct=GOOD, speed=900.0, device="elsewhere"),
    )
    marked = mark_dominated(entries, {"slow": BAD, "fast": GOOD})
    assert [each.dominated_by for each in marked] == [None, None]


def test_speed_is_the_servers_where_it_was_measured():
    plain = entry(speed=900.0)
    assert (plain.speed, plain.p95_ms) == (900.0, None)
    served = replace(
        plain,
        grpc={
            "concurrency_4": POINT,
            "concurrency_16": {**POINT, "inferences_per_second": 300.0},
            "concurrency_1": {**POINT, "p95_ms": 4.0},
        },
    )
    assert (served.speed, served.p95_ms) == (300.0, 4.0)
    routed = replace(served, grpc={**served.grpc, "router_concurrency_1": {**POINT, "p95_ms": 5.0}})
    assert (routed.speed, routed.p95_ms) == (300.0, 5.0)


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A folder with the manifests of the tiny model, to be measured."""
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    return tmp_path


def measured(folder, name, **changes) -> Entry:
    manifest = json.loads((folder / f"{name}.manifest.json").read_text())
    return entry(name, sha256=manifest["file"]["sha256"], **changes)


def test_merge_replaces_the_same_and_keeps_the_rest(folder):
    full, half = (measured(folder, f"nac-b{mille}-fp32") for mille in ("1000", "0500"))
    merge(folder, "nac", [full, half])
    elsewhere, again = replace(full, device="elsewhere"), replace(half, top5=0.5)
    found = merge(folder, "nac", [elsewhere, again])
    assert read_frontier(folder / FILE_NAME) == found
    assert sorted((each.variant, each.device, each.top5) for each in found.entries) == sorted(
        (each.variant, each.device, each.top5) for each in (full, elsewhere, again)
    )


def test_merge_drops_what_was_measured_of_other_bytes(folder):
    path = folder / FILE_NAME
    merge(folder, "nac", [measured(folder, "nac-b1000-fp32")])
    path.write_text(path.read_text().replace(measured(folder, "nac-b1000-fp32").sha256, "f" * 64))
    found = merge(folder, "nac", [measured(folder, "nac-b0500-fp32")])
    assert [each.variant for each in found.entries] == ["nac-b0500-fp32"]


def test_merge_refuses_another_model(folder):
    merge(folder, "nac", [])
    with pytest.raises(SaccadeError, match=r"frontier of 'nac', expected 'vit'"):
        merge(folder, "vit", [])


def broken(change):
    content = {
        "schema": "saccade.frontier", "version": 1, "model": "nac",
        "entries": [json.loads(json.dumps(entry().__dict__, default=lambda value: value.__dict__))],
    }  # fmt: skip
    change(content, content["entries"][0])
    return json.dumps(content)


WRONG = {
    "another schema": (lambda file, _: file.update(schema="x"), "'x' version 1"),
    "another version": (lambda file, _: file.update(version=2), "version 2"),
    "an unknown key": (lambda _, one: one.update(speed=1), "speed"),
    "a missing key": (lambda _, one: one.pop("top5"), "top5"),
    "a word for a number": (lambda _, one: one.update(budget="all"), "budget is 'all'"),
    "a truth for a number": (lambda _, one: one["score"].update(value=True), "value is True"),
    "no number": (lambda _, one: one["score"].update(value=float("nan")), "finite"),
    "a point without p95": (lambda _, one: one["in_process"]["batch_1"].pop("p95_ms"), "p95_ms"),
    "an unmeasured best batch": (lambda _, one: one["in_process"].update(best_batch=3), "batch_3"),
    "twice the same": (lambda file, one: file["entries"].append(one), "twice"),
}  # fmt: skip


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text(broken(lambda file, one: None))
    assert read_frontier(path).entries == (entry(),)


@pytest.mark.parametrize("case", WRONG)
def test_refuses_a_file_that_says(case, tmp_path):
    change, words = WRONG[case]
    path = tmp_path / FILE_NAME
    path.write_text(broken(change))
    with pytest.raises(SaccadeError, match="Measure again") as caught:
        read_frontier(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense"])
def test_refuses_what_is_no_frontier(text, tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text(text)
    with pytest.raises(SaccadeError, match="no frontier file"):
        read_frontier(path)
