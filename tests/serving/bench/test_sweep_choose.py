# SPDX-License-Identifier: Apache-2.0
"""`choose` says what the router does, and its reasons are true; frontiers by each cost."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from router_code import router_module
from support.serving.frontiers import frontier_entry, point

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FrontierEntry
from saccade.serving.bench.load import LoadResult, StreamResult
from saccade.serving.bench.measurement import Figure, Measurement, by_cost
from saccade.serving.bench.sweep import choice
from saccade.serving.bench.sweep.choice import Choice, ChooseOptions, choose
from saccade.serving.commands.cli import run
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions

# score, lower bound, inferences per second, p95
FIGURES = {
    "nac-b1000-fp32": (0.95, 0.93, 500.0, 9.0),
    "nac-b0500-fp32": (0.94, 0.92, 900.0, 5.0),
    "nac-b0250-fp32": (0.94, 0.915, 1800.0, 5.0),
    "nac-b0125-fp32": (0.80, 0.78, 3600.0, 2.0),
}
BYTES = 2**26


def entry(name: str, sha256: str, budget: float) -> FrontierEntry:
    score, bound, rate, p95 = FIGURES[name]
    load = point(rate, p95, rounds=(0.9 * rate, 1.1 * rate))
    grpc = {"concurrency_1": load, "router_concurrency_1": load}
    grpc["router_concurrency_4"] = {**point(rate, 4 * p95), "p99_ms": 6 * p95}
    known = {"budget": float(budget), "memory_bytes": BYTES, "inside": load, "grpc": grpc}
    return frontier_entry(name, sha256, score, (bound, 1.0), **known)


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    place = Path(shutil.copytree(tiny_folder, tmp_path_factory.mktemp("choose") / "nac"))
    entries = [
        entry(manifest.variant.name, manifest.file.sha256, manifest.variant.budget)
        for manifest in ArtefactFolder(place).manifests
    ]
    ArtefactFolder(place).merge(entries)
    return place


@pytest.fixture(scope="module")
def router(folder, tmp_path_factory):
    """Answer of the router over that folder: its code on the file that was written for it."""
    place = tmp_path_factory.mktemp("router") / "repository"
    deploy(folder, RepositoryOptions(place))
    rules = router_module("choose")
    routes = router_module("routes").read_routes(place / "nac" / "1" / "routes.json")

    def answer(parameter: str, value: float) -> str | None:
        try:
            return str(rules.choose(routes, {parameter: value}).name)
        except rules.RequestRefused:
            return None

    return answer


VALUES = {
    "budget": (0.01, 0.1, 0.125, 0.2, 0.25, 0.49, 0.5, 0.9, 1.0),
    "min_score": (0.0, 0.5, 0.78, 0.8, 0.9, 0.915, 0.92, 0.925, 0.93, 0.94, 1.0),
    "max_latency_ms": (0.5, 1.9, 2.0, 3.0, 5.0, 7.0, 9.0, 100.0),
}


def beside(parameter: str, value: float, towards: float) -> float:
    """The nearest number that the rule tells apart: of budgets it reads six digits."""
    if parameter != "budget":
        return math.nextafter(value, towards)
    return round(value + math.copysign(1e-6, towards - value), 6)


@pytest.mark.parametrize("parameter", VALUES)
def test_it_chooses_what_the_router_chooses_and_knows_when_that_changes(parameter, folder, router):
    for value in VALUES[parameter]:
        given = str(value) if parameter == "budget" else value
        choice = choose(folder, ChooseOptions(**{parameter: given}))
        assert choice.chosen == router(parameter, value)
        for change in choice.changes:
            step, up = change["value"], change["when"] in ("at least", "above")
            at = beside(parameter, step, math.inf if up else -math.inf)
            at = step if change["when"] in ("at least", "at most") else at
            if parameter == "min_score" and at > 1:
                continue
            assert router(parameter, at) == change["variant"] != choice.chosen
            between = beside(parameter, at, value)
            assert up == (at > value) and router(parameter, between) == choice.chosen


def chosen(folder: Path, **asked: Any) -> Choice:
    return choose(folder, ChooseOptions(**asked))


def test_the_reasons_name_the_runner_up_and_the_figures(folder):
    choice = chosen(folder, min_score=0.9)
    assert (choice.chosen, choice.runner_up) == ("nac-b0250-fp32", "nac-b0500-fp32")
    assert choice.why == (
        "the fastest of 3 variants with a top-1 whose lower 95 % bound is at least 0.9"
    )
    assert choice.changes == (
        {"when": "at most", "value": 0.78, "variant": "nac-b0125-fp32"},
        {"when": "above", "value": 0.915, "variant": "nac-b0500-fp32"},
    )
    figures = {variant["variant"]: variant for variant in choice.to_dict()["variants"]}
    assert figures["nac-b0250-fp32"]["inferences_per_second"] == 1800
    assert figures["nac-b0250-fp32"]["memory_bytes"] == BYTES
    # Of equal scores the faster; a budget's name is a budget.
    assert chosen(folder, max_latency_ms=5).chosen == "nac-b0250-fp32"
    assert chosen(folder, budget="b0500").chosen == "nac-b0500-fp32"


def test_a_loss_is_a_score_below_the_best(folder):
    assert chosen(folder, max_loss=3).chosen == "nac-b0500-fp32"  # at least 0.92
    choice = chosen(folder, max_loss=4)
    assert (choice.chosen, choice.parameter) == ("nac-b0250-fp32", "min_score")
    assert choice.value == pytest.approx(0.91)


def test_a_loss_smaller_than_the_intervals_says_how_many_samples_show_it(folder):
    choice = chosen(folder, max_loss=1)
    assert choice.chosen is None
    # 1.96^2 * 0.95 * 0.05 / 0.01^2 = 1,825
    assert choice.why.endswith("About 1,800 samples show a loss of 1 point")


@pytest.mark.parametrize("loss", [0.0, -1.0, math.nan])
def test_a_loss_that_is_none_is_refused(folder, loss):
    with pytest.raises(SaccadeError, match="--max-loss: found"):
        chosen(folder, max_loss=loss)


def test_the_latency_of_several_callers_is_what_was_measured_with_them(folder):
    alone = chosen(folder, max_latency_ms=10)
    loaded = chosen(folder, max_latency_ms=10, concurrency=4)
    slowest = chosen(folder, max_latency_ms=10, concurrency=4, percentile=99)
    assert [one.chosen for one in (alone, loaded, slowest)] == [
        "nac-b1000-fp32", "nac-b0125-fp32", None,
    ]  # fmt: skip
    assert "a p99 of at most 10 ms with 4 callers" in slowest.why
    row = {one["variant"]: one for one in slowest.variants}["nac-b0250-fp32"]
    assert row["latency_ms"] == 6 * FIGURES["nac-b0250-fp32"][3]
    assert slowest.latency == "p99 ms x4"
    with pytest.raises(SaccadeError, match=r"measured: 1, 4.*--concurrency 1,8"):
        chosen(folder, max_latency_ms=10, concurrency=8)


def test_speeds_that_the_rounds_do_not_tell_apart_choose_by_the_graph(folder, tmp_path):
    place = Path(shutil.copytree(folder, tmp_path / "nac"))
    path = place / "frontier.json"
    content = json.loads(path.read_text())
    # The quarter was faster in a noisy window, and the eighth scores as well.
    for one in content["entries"]:
        if one["variant"] in ("nac-b0250-fp32", "nac-b0125-fp32"):
            own = [1900.0, 1700.0] if "0250" in one["variant"] else [1600.0, 1800.0]
            one["grpc"]["concurrency_1"]["inferences_per_second"] = sum(own) / 2
            one["grpc"]["concurrency_1"]["inferences_per_second_rounds"] = own
            one["score"]["interval"] = [0.915, 1.0]
    path.write_text(json.dumps(content))
    choice = chosen(place, min_score=0.9)
    assert choice.chosen == "nac-b0125-fp32"
    assert "does not differ significantly from that of nac-b0250-fp32" in choice.why
    for one in content["entries"]:  # without rounds, as older releases measured: the figure decides
        one["grpc"]["concurrency_1"].pop("inferences_per_second_rounds")
    path.write_text(json.dumps(content))
    assert chosen(place, min_score=0.9).chosen == "nac-b0250-fp32"


def test_the_command_says_why_and_none_is_exit_1(folder, capsys):
    assert run(["choose", str(folder), "--max-latency-ms", "4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("nac-b0125-fp32: the best score (if tied, the fastest) of 1 variant wi")
    assert "With --max-latency-ms at least 5: nac-b0250-fp32." in said and "3,600" in said
    assert "Measured on a CPU, 2 cores, onnxruntime 1.31.1 CPU, one thread." in said
    assert "Scored on 100 samples of digits." in said
    assert "top-1 %  at least %" in said and "80.00       78.00" in said
    assert "bytes" not in said
    assert run(["choose", str(folder), "--min-score", "0.99", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["variant"] is None and len(answer["variants"]) == 4
    assert answer["changes"] == [{"when": "at most", "value": 0.93, "variant": "nac-b1000-fp32"}]


def rewritten(folder: Path, place: Path, change: Any) -> Path:
    """A copy whose measurements were changed."""
    shutil.copytree(folder, place)
    content = json.loads((place / "frontier.json").read_bytes())
    for one in content["entries"]:
        change(one)
    (place / "frontier.json").write_text(json.dumps(content))
    return place


def test_figures_that_are_not_to_be_trusted_are_marked(folder, tmp_path, monkeypatch):
    assert not chosen(folder, min_score=0.9).caution

    def wild(one: dict[str, Any]) -> None:
        one["grpc"]["concurrency_1"]["inferences_per_second_rounds"] = [1.0, 3.0]

    noisy = rewritten(folder, tmp_path / "noisy", wild)
    words = "Measure again before you trust the speeds: rounds of one variant differ by up to 3.0"
    assert chosen(noisy, min_score=0.9).caution.startswith(words)
    here = SimpleNamespace(device="a CPU, 2 cores", runtime="onnxruntime 2.0.0 CPU")
    monkeypatch.setattr(choice, "this_machine", lambda _: here)
    assert "onnxruntime 2.0.0 CPU is installed now" in chosen(folder, min_score=0.9).caution


def test_a_faster_variant_that_scores_as_well_is_named(folder):
    assert chosen(folder, max_latency_ms=9).chosen == "nac-b1000-fp32"
    words = (
        "; the score of nac-b0250-fp32 is within its 95 % interval, with 3.6 times as many answers"
    )
    assert words in chosen(folder, max_latency_ms=9).why
    assert "within" not in chosen(folder, max_latency_ms=4).why


def test_columns_without_figures_are_left_out(folder, tmp_path, capsys):
    def lean(one: dict[str, Any]) -> None:
        one["memory_bytes"] = None

    assert run(["choose", str(folder), "--budget", "1"]) == 0
    assert "MiB" in capsys.readouterr().out
    assert run(["choose", str(rewritten(folder, tmp_path / "lean", lean)), "--budget", "1"]) == 0
    assert "MiB" not in capsys.readouterr().out


def test_a_budget_is_shown_as_it_is_asked_for():
    assert choice.budget_text("b0667", 2 / 3) == "0.666667"
    assert choice.budget_text("fast", 2 / 3) == "fast (0.67)"


WRONG = {
    "nothing asked": (
        [],
        "Pass exactly one of --budget, --min-score, --max-latency-ms and --max-loss.",
    ),
    "two asked": (["--budget", "1", "--min-score", "1"], "(found --budget and --min-score)."),
    "a score in per cent": (
        ["--min-score", "95"],
        "--min-score is 95, expected a number from 0 to 1, such as 0.9",
    ),
    "no number": (["--max-latency-ms", "nan"], "found nan, expected a finite number"),
    "an unknown budget": (["--budget", "half"], "or a budget's name (b1000, b0500, b0250, b0125)"),
    "another device": (["--min-score", "0.5", "--device", "a GPU"], "a CPU, 2 cores"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_questions_are_refused(case, folder, capsys):
    words, message = WRONG[case]
    assert run(["choose", str(folder), *words]) == 2
    assert message in capsys.readouterr().err


def test_without_figures_only_a_budget_can_be_asked(tiny_folder):
    assert chosen(tiny_folder, budget="0.3").chosen == "nac-b0250-fp32"
    with pytest.raises(SaccadeError, match="--min-score needs measured scores, and it has none"):
        chosen(tiny_folder, min_score=0.5)
    with pytest.raises(SaccadeError, match="latency-ms needs measured latencies, and it has none"):
        chosen(tiny_folder, max_latency_ms=5)
    with pytest.raises(SaccadeError, match="--max-latency-ms is -5, expected"):
        chosen(tiny_folder, max_latency_ms=-5)  # no measurement would help


def test_latencies_need_a_server(folder, tmp_path):
    place = Path(shutil.copytree(folder, tmp_path / "nac"))
    content = json.loads((place / "frontier.json").read_bytes())
    for entry in content["entries"]:
        entry["grpc"] = None
    (place / "frontier.json").write_text(json.dumps(content))
    with pytest.raises(SaccadeError, match=r"found none in frontier.json.*without --no-server"):
        chosen(place, max_latency_ms=5)


def test_embeddings_are_shown_with_their_bytes(folder, tmp_path, capsys):
    place = Path(shutil.copytree(folder, tmp_path / "nac"))
    content = json.loads((place / "frontier.json").read_bytes())
    for entry in content["entries"]:
        entry["embedding_bytes"] = 4096
    (place / "frontier.json").write_text(json.dumps(content))
    assert run(["choose", str(place), "--budget", "1"]) == 0
    said = capsys.readouterr().out
    assert "bytes" in said and said.count("4,096") == 4


def test_a_sweep_that_has_not_ended_is_no_frontier(folder, tmp_path):
    place = Path(shutil.copytree(folder, tmp_path / "swept" / "artefacts"))
    (tmp_path / "swept" / "sweep.json").write_text("{}")
    assert chosen(tmp_path / "swept", budget="0.5").chosen == "nac-b0500-fp32"
    (place / "frontier.json").unlink()
    with pytest.raises(SaccadeError, match="is not finished"):
        chosen(tmp_path / "swept", budget="0.5")


def test_what_single_rounds_say_holds_what_all_say_together():
    name = "nac-b1000-fp32"
    # Each round's p95 is 0.55 of its slowest; of both together it is the slowest itself.
    window = LoadResult(1.0, {"one": StreamResult((0.0,) * 9 + (8.0,))}, 0.0, {}, {})
    variant: Any = SimpleNamespace(main=SimpleNamespace(outputs=()))
    memory = [{"resident_bytes": 2**26, "batch": 8}] * 2
    given = replace(entry(name, "a" * 64, 1.0), grpc={"router_concurrency_1": point(10.0, 8.0)})
    unscored: Any = None
    served = {("", "router_concurrency_1"): [window] * 2}
    by_name = Measurement(variant, unscored, {}, unscored, None, served, memory).costs(given)
    latency = by_name["latency"]
    assert (latency.value, latency.least, latency.most) == (8.0, pytest.approx(4.4), 8.0)
    assert latency.of == "95th percentile of a request through the router, one client"
    assert by_name["throughput"].of == "through the router, concurrency 1"


def test_each_cost_has_a_frontier_of_its_own():
    good, bad = np.ones(400), np.zeros(400)
    bad[:200] = 1
    names = list(FIGURES)[:3]
    entries = [entry(name, name[-1] * 64, 1.0) for name in names]
    values = dict(zip(names, (bad, good, good), strict=True))

    def costs(rate: float, mib: float) -> dict[str, Figure]:
        return {
            "throughput": Figure(rate, rate, rate, "inferences per second", "gRPC", (rate, rate)),
            "memory": Figure(mib, mib, mib, "bytes", "resident", (mib, mib)),
        }

    by_variant = dict(zip(names, (costs(100, 5), costs(90, 4), costs(95, 6)), strict=True))
    marked, rivals = by_cost(entries, by_variant, values)
    worse, small, quick = names
    # The worse one is the fastest; of the two with the same answers each wins where it is cheaper.
    assert rivals["throughput"] == {worse: None, small: quick, quick: None}
    assert rivals["memory"] == {worse: small, small: None, quick: small}
    del by_variant[quick]["memory"]
    assert set(by_cost(entries, by_variant, values)[1]) == {"throughput"}
    # The table's own word is about the speed in the entries, where the last is the fastest.
    assert [entry.dominated_by for entry in marked] == [quick, quick, None]
