# SPDX-License-Identifier: Apache-2.0
"""The frontier file, its intervals, and who dominates whom."""

import json
from dataclasses import replace

import numpy as np
import pytest
from support.serving.frontiers import ROUNDS, frontier_entry, point

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import (
    FILE_NAME,
    FrontierEntry,
    mark_dominated,
    read_frontier,
)
from saccade.exporter.artefact.precedence import NarrowerMeasurement, chosen_place
from saccade.models.scores.results import wilson

POINT = point()


def entry(variant="nac-b1000-fp32", *, sha256="a" * 64, correct=None, speed=100.0, **changes):
    hits, n = (90, 100) if correct is None else (int(correct.sum()), len(correct))
    inside = point(speed, seconds=1.5, rounds=rounds(speed))
    known = {"n": n, "inside": inside, **changes}
    return frontier_entry(variant, sha256, hits / n, wilson(hits, n), **known)


def rounds(speed, noise=(0.9, 1.0, 1.1)):
    return [speed * factor for factor in noise]


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
    assert {entry.variant: entry.dominated_by for entry in marked} == expected


# Speeds of five rounds in turn: the second is in truth no slower than the first.
NOISY = [100.0, 150.0, 90.0, 130.0, 110.0], [140.0, 80.0, 120.0, 95.0, 125.0]


@pytest.mark.parametrize("worse", [GOOD, BAD], ids=["same answers", "surely worse"])
def test_a_speed_that_rounds_do_not_show_dominates_nobody(worse):
    pair = [entry("one", correct=worse), entry("other", sha256="b" * 64, correct=GOOD)]
    values = {"one": worse, "other": GOOD}

    def marked(*speeds):
        points = [
            {"inferences_per_second": float(np.mean(own)), **({ROUNDS: own} if own else {})}
            for own in speeds
        ]
        both = [
            replace(one, in_process={"best_batch": 8, "batch_8": {**POINT, **point}})
            for one, point in zip(pair, points, strict=True)
        ]
        return [one.dominated_by for one in mark_dominated(both, values)]

    assert marked(*NOISY) == marked(*NOISY[::-1]) == [None, None]
    assert marked([100.0], [300.0]) == [None, None]  # one round says nothing of the next
    # A machine that slows down for both leaves their ratio alone.
    assert marked([100.0, 50.0, 20.0], [160.0, 85.0, 31.0]) == ["other", None]


SMALLER = {
    "fewer samples": ({"correct": answers(0, n=50)}, "50 instead of 600 test samples"),
    "without the server": ({"grpc": None}, "no server"),
    "fewer clients": ({"grpc": {"concurrency_1": POINT}}, "at concurrency_16"),
    "fewer rounds": ({"noise": (1.0,)}, "1 instead of 3 rounds"),
    "less time": ({"seconds": 0.5}, "0.5 instead of 1.5 s per point"),
}


@pytest.mark.parametrize("case", SMALLER)
def test_a_smaller_measurement_replaces_no_larger_one_unasked(case, folder):
    change, words = SMALLER[case]
    names = "nac-b1000-fp32", "nac-b0500-fp32"

    def made(name, correct=GOOD, noise=(0.9, 1.0, 1.1), seconds=1.5, **grpc):
        loaded = {**POINT, ROUNDS: rounds(100.0, noise), "seconds": seconds}
        served = {"grpc": {"concurrency_1": loaded, "concurrency_16": loaded}, **grpc}
        return measured(folder, name, correct=correct, **served)

    large = [made(name) for name in names]
    unasked(folder, large)
    before = (folder / FILE_NAME).read_bytes()
    # One variant that lacks something keeps all: halves of two measurements are none.
    small = [made(names[0]), made(names[1], **change)]
    with pytest.raises(NarrowerMeasurement, match="contains a larger") as refused:
        unasked(folder, small)
    (reason,) = refused.value.less
    assert reason.startswith(f"{names[1]}: ") and words in reason
    assert (folder / FILE_NAME).read_bytes() == before
    ArtefactFolder(folder).merge(small)  # asked for
    unasked(folder, large)
    elsewhere = [replace(one, device="elsewhere") for one in small]
    unasked(folder, elsewhere)


def unasked(folder, entries):
    ArtefactFolder(folder).merge(entries, over_larger=False)


def test_a_quick_measurement_with_another_version_replaces_no_larger_one_unasked(folder):
    name = "nac-b1000-fp32"
    served = {"grpc": {"concurrency_1": POINT}}
    large = replace(measured(folder, name, correct=GOOD, **served), runtime="onnxruntime 1.9.0 CPU")
    unasked(folder, [large])
    quick = measured(folder, name, correct=answers(0, n=50))
    words = "50 instead of 600 test samples of onnxruntime 1.9.0 CPU"
    with pytest.raises(NarrowerMeasurement, match=words):
        unasked(folder, [quick])
    unasked(folder, [replace(quick, runtime="openvino 2026.2 CPU")])  # is not compared
    full = measured(folder, name, correct=GOOD, **served)
    unasked(folder, [full])  # both stay, and are told apart by their version
    assert {large.runtime, full.runtime} < {
        one.runtime for one in ArtefactFolder(folder).frontier.entries
    }


OLD, NEW = ("here", "onnxruntime 1.9.0 CPU"), ("here", "onnxruntime 1.30.2 CPU")
OTHER, NOWHERE = ("there", "onnxruntime 1.30.2 CPU"), ("nowhere", "onnxruntime 1 CPU")


@pytest.mark.parametrize(("places", "device", "here", "expected"), [
    ([OLD, NEW], None, NOWHERE, NEW),  # as numbers, not as text
    ([OLD, NEW], "here", OLD, OLD),
    ([NEW, OTHER], None, NOWHERE, None),
    ([NEW, OTHER], None, OTHER, OTHER),
    ([OLD, NEW, OTHER], "here", OTHER, NEW),
    ([NEW], "there", NEW, None),
])  # fmt: skip
def test_of_several_versions_the_installed_one_or_the_newest_counts(places, device, here, expected):
    assert chosen_place(places, device, here) == expected


def test_embeddings_compete_by_their_bytes_and_not_by_time():
    entries = [
        replace(entry("large", correct=BAD, speed=900.0), embedding_bytes=2048),
        replace(entry("small", sha256="b" * 64, correct=GOOD), embedding_bytes=1024),
        replace(entry("smaller", sha256="c" * 64, correct=BAD), embedding_bytes=512),
    ]
    values = {"large": BAD, "small": GOOD, "smaller": BAD}
    marked = {entry.variant: entry.dominated_by for entry in mark_dominated(entries, values)}
    # Of two that dominate the better one is named, though the other saves more.
    assert marked == {"large": "small", "small": None, "smaller": None}


@pytest.mark.parametrize("higher", [True, False])
def test_any_values_compete_in_the_direction_of_their_score(higher):
    rng = np.random.default_rng(0)
    low = rng.gamma(2.0, 0.2, 300)
    high = low + rng.normal(0.3, 0.1, 300)
    entries = [
        entry("slow", correct=GOOD),
        entry("fast", sha256="b" * 64, correct=GOOD, speed=200.0),
    ]
    entries = [
        replace(entry, score=replace(entry.score, higher_is_better=higher)) for entry in entries
    ]
    best, worst = (high, low) if higher else (low, high)
    marked = mark_dominated(entries, {"slow": worst, "fast": best})
    assert [entry.dominated_by for entry in marked] == ["fast", None]
    marked = mark_dominated(entries, {"slow": best, "fast": worst})
    assert [entry.dominated_by for entry in marked] == [None, None]


def test_another_device_dominates_nobody():
    entries = (
        entry("slow", correct=BAD),
        entry("fast", sha256="b" * 64, correct=GOOD, speed=900.0, device="elsewhere"),
    )
    marked = mark_dominated(entries, {"slow": BAD, "fast": GOOD})
    assert [entry.dominated_by for entry in marked] == [None, None]


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
    only_router = replace(plain, grpc={"router_concurrency_1": POINT})
    assert (only_router.speed, only_router.p95_ms) == (100.0, 2.0)
    routed = replace(served, grpc={**served.grpc, "router_concurrency_1": {**POINT, "p95_ms": 5.0}})
    assert (routed.speed, routed.p95_ms) == (300.0, 5.0)


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A folder with the manifests of the tiny model, to be measured."""
    for path in tiny_folder.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    return tmp_path


def measured(folder, name, **changes) -> FrontierEntry:
    manifest = json.loads((folder / f"{name}.manifest.json").read_text())
    return entry(name, sha256=manifest["file"]["sha256"], **changes)


def test_merge_replaces_the_same_and_keeps_the_rest(folder):
    full, half = (measured(folder, f"nac-b{mille}-fp32") for mille in ("1000", "0500"))
    ArtefactFolder(folder).merge([full, half])
    elsewhere, again = replace(full, device="elsewhere"), replace(half, top5=0.5)
    frontier = ArtefactFolder(folder).merge([elsewhere, again])
    assert read_frontier(folder / FILE_NAME) == frontier
    assert sorted(
        (entry.variant, entry.device, entry.top5) for entry in frontier.entries
    ) == sorted((entry.variant, entry.device, entry.top5) for entry in (full, elsewhere, again))


def test_merge_drops_what_was_measured_of_other_bytes(folder):
    path = folder / FILE_NAME
    ArtefactFolder(folder).merge([measured(folder, "nac-b1000-fp32")])
    path.write_text(path.read_text().replace(measured(folder, "nac-b1000-fp32").sha256, "f" * 64))
    frontier = ArtefactFolder(folder).merge([measured(folder, "nac-b0500-fp32")])
    assert [entry.variant for entry in frontier.entries] == ["nac-b0500-fp32"]


def test_merge_refuses_another_model(folder):
    ArtefactFolder(folder).merge([])
    path = folder / FILE_NAME
    path.write_text(path.read_text().replace('"nac"', '"vit"'))
    with pytest.raises(SaccadeError, match=r"frontier of 'vit', expected 'nac'"):
        ArtefactFolder(folder).merge([])


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
    "a word for a number": (lambda _, one: one.update(budget="all"), "budget: found 'all'"),
    "a truth for a number": (lambda _, one: one["score"].update(value=True), "value: found True"),
    "no number": (lambda _, one: one["score"].update(value=float("nan")), "NaN is not a number"),
    "more than any number": (lambda _, one: one["score"].update(value=10**400), "found 1000"),
    "a number for a name": (lambda _, one: one.update(dominated_by=1), "dominated_by: found 1"),
    "a point without p95": (lambda _, one: one["in_process"]["batch_1"].pop("p95_ms"), "p95_ms"),
    "an unmeasured best batch": (lambda _, one: one["in_process"].update(best_batch=3), "batch_3"),
    "text for bytes": (lambda _, one: one.update(embedding_bytes="1"), "found '1'"),
    "a component without p95": (
        lambda _, one: one["in_process"].update(text={"batch_1": {}}), "in_process: text: batch_1",
    ),
    "an unknown component": (lambda _, one: one["in_process"].update(speech={}), "'speech'"),
    "twice the same": (lambda file, one: file["entries"].append(one), "twice"),
}  # fmt: skip


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text(broken(lambda file, one: None))
    assert read_frontier(path).entries == (entry(),)
    # Files of before hold no bytes of embeddings.
    path.write_text(broken(lambda file, one: one.pop("embedding_bytes")))
    assert read_frontier(path).entries == (entry(),)


@pytest.mark.parametrize("case", WRONG)
def test_refuses_a_file_that_says(case, tmp_path):
    change, words = WRONG[case]
    path = tmp_path / FILE_NAME
    path.write_text(broken(change))
    with pytest.raises(SaccadeError, match="rite it again with: saccade bench") as caught:
        read_frontier(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense"])
def test_refuses_what_is_no_frontier(text, tmp_path):
    path = tmp_path / FILE_NAME
    path.write_text(text)
    with pytest.raises(SaccadeError, match=r"cannot be read as JSON|, expected"):
        read_frontier(path)
