# SPDX-License-Identifier: Apache-2.0
"""Policies in a benchmark: run row by row, compared with the full model, left out with a reason."""

import itertools
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from half_typed import add_variant
from policy_files import write_policy
from policy_tables import LABELS, LARGE, SMALL, chain, entry
from report_figures import measured_policy
from support.serving.frontiers import ROUNDS, frontier_entry, point
from tiny_artefacts import FULL, HALF, artefacts, onnx_model

pytest.importorskip("scipy", reason="scipy is missing: pip install '.[bench]'")

from saccade.core.errors import SaccadeError
from saccade.core.schema import typed
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import (
    FILE_NAME,
    FrontierEntry,
    PolicyEntry,
    Ratio,
    read_frontier,
)
from saccade.exporter.evaluation import calibrate as calibration
from saccade.exporter.evaluation.decisions import Decider
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.exporter.policy.certify import MissingCertificate
from saccade.exporter.policy.policy import texts_sha256
from saccade.exporter.runtimes.runtime import runtime_named
from saccade.models.data.datasets import HELD_OUT
from saccade.models.data.samples.images import at_size
from saccade.models.preprocessing import Preprocessing
from saccade.serving.bench import in_process, policies, running
from saccade.serving.bench.figures import words
from saccade.serving.bench.in_process import Calls, sample
from saccade.serving.bench.measurement import ratio
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.policies import PolicyWorks, class_answers, ends_of, policy_works
from saccade.serving.client.texts import Labelling
from saccade.serving.commands import demo
from saccade.serving.commands.explore.frontier_chart import chart, measured
from saccade.serving.commands.inspection import inspect
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions

ORT = runtime_named("onnxruntime")


def test_rows_that_are_sure_leave_and_only_the_others_go_on():
    seen: list[int] = []
    work = chain(seen)
    given = work.run({"row": np.array([4, 0, 3, 1])})
    assert seen == [4, 2]
    assert given["step"].tolist() == [1, 0, 1, 0] and given["class"].tolist() == [1, 0, 1, 1]
    ends = ends_of(work, class_answers({HALF: SMALL, FULL: LARGE}, LABELS, "d", "s"))
    assert ends.tolist() == [0, 0, 0, 1, 1]
    seen.clear()
    work.run({"row": np.array([0, 1])})
    assert seen == [2]  # the large variant does not run for nobody


def test_only_classes_that_were_certified_end_early():
    seen: list[int] = []
    work = chain(seen)
    work = replace(work, policy=replace(work.policy, early=(1,)))
    given = work.run({"row": np.array([4, 0, 3, 1])})
    assert seen == [4, 3] and given["step"].tolist() == [1, 1, 1, 0]
    ends = ends_of(work, class_answers({HALF: SMALL, FULL: LARGE}, LABELS, "d", "s"))
    assert ends.tolist() == [1, 0, 1, 1, 1]


def test_calls_go_on_through_the_inputs(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(in_process.time, "perf_counter", lambda: float(next(clock)))
    rows: list[list[int]] = []
    calls = Calls(2)
    for _ in range(2):
        sample(
            lambda given: rows.append(given["row"].tolist()) or {}, {"row": np.arange(5)}, calls,
            seconds=3, varied=True,
        )  # fmt: skip
    # Two calls each; the first one of all warms up.
    assert rows == [[0, 1], [0, 1], [2, 3], [4, 0], [1, 2]]


def test_the_figures_are_the_hand_count():
    found = entry()
    # The small variant answers 0, 1, 0, the large one 1, 1: they differ from the large one once.
    assert [step.share for step in found.steps] == [0.6, 0.4]
    assert found.agreement == 0.8 and found.score.value == 0.6 and found.score.n == 5
    assert found.gain == pytest.approx(-0.2) and found.gain_interval[0] <= -0.2
    assert not found.calibrated and entry(data_sha256="d" * 64).calibrated
    assert entry(data_sha256="c" * 64).calibrated  # of the data that chose
    assert found.times_full.times == pytest.approx(math.sqrt(2 * 2.2), abs=1e-3)
    low, high = found.times_full.interval or (0.0, 0.0)
    assert low < found.times_full.times < high
    assert ratio([2.0], [1.0]) == Ratio(2.0, None)
    assert ratio([2.0, 8.0], [1.0, 1.0]) == Ratio(4.0, None)  # 0.0006 to 27,000
    assert ratio([3.5, 4.0, 4.5], [1.0, 1.0, 1.0]).interval is not None
    assert typed(PolicyEntry, json.loads(json.dumps(asdict(found))), "") == found


@pytest.fixture
def folder(tmp_path):
    return artefacts(tmp_path / "tiny", checkpoint=False)


def of_folder(folder: Path, models: Any, options: EvaluateOptions) -> PolicyWorks:
    return policy_works(ArtefactFolder(folder), models, ORT, options, {})


def left_out(folder: Path) -> dict[str, str]:
    works = of_folder(folder, [], EvaluateOptions("digits"))
    assert works.works == ()
    return dict(works.left_out)


def test_a_folder_without_policies_has_none(folder):
    assert left_out(folder) == {}


def test_a_policy_of_other_variants_is_left_out_with_the_reason(folder):
    write_policy(folder)
    add_variant(folder, HALF, "fp32", onnx_model(7))
    assert HALF in left_out(folder)["auto.policy.json"]


def test_an_edited_threshold_or_another_runtime_leaves_a_policy_out(folder):
    write_policy(folder, "web", runtime="tensorrt 10.16")
    assert "calibrated with tensorrt 10.16, not with onnxruntime" in left_out(folder)["web"]
    path = folder / "web.policy.json"
    content = json.loads(path.read_text())
    content["policies"][0]["bound"] = 0.001
    path.write_text(json.dumps(content))
    assert "changed after its calibration" in left_out(folder)["web"]


def test_what_answers_in_another_way_follows_no_policy(folder, monkeypatch):
    write_policy(folder)
    model: Any = SimpleNamespace(family="nac", name=FULL, components={"": None})
    ((name, reason),) = of_folder(folder, [model], EvaluateOptions(task="knn")).left_out
    assert name == "auto" and "the task knn does not score" in reason
    assert reason.endswith("Measure with --task top1")


def test_a_chain_gives_each_variant_images_of_its_own_size(folder, monkeypatch):
    write_policy(folder)
    large = Preprocessing(8, 8, 3, (0.5,) * 3, (0.5,) * 3)
    sizes = {FULL: large, HALF: large.at_height(4)}
    models: Any = [
        SimpleNamespace(family="nac", name=name, components={"": None}, preprocessing=taken)
        for name, taken in sizes.items()
    ]
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    images = {FULL: pixels, HALF: at_size(pixels, sizes[HALF])}

    def run_of(model: Any) -> Any:
        every = [image.tobytes() for image in images[model.name]]

        def run(given: Any) -> np.ndarray:
            """Answer images of this size, and no others."""
            rows = [every.index(image.tobytes()) for image in given["image"]]
            return {FULL: LARGE, HALF: SMALL}[model.name][rows]

        return run

    def decide(model: Any, *_: Any) -> Decider:
        inputs = {"image": images[model.name]}
        return Decider(run_of(model), run_of, inputs, LABELS, name="d", digest=lambda: "s")

    monkeypatch.setattr(policies, "imported", lambda _: decide)
    (work,) = of_folder(folder, models, EvaluateOptions("d")).works
    order = [[*map(bytes, pixels)].index(bytes(image)) for image in work.sent["image"]]
    rows = {name: array[1:4] for name, array in work.inputs.items()}
    for run, served, table in zip(work.runs, work.served, (SMALL, LARGE), strict=True):
        assert run(rows).tolist() == table[order[1:4]].tolist()
        # A caller sends files of one size, of which the router makes those of the variant.
        assert served(work.sent).tolist() == table[order].tolist()


def test_a_policy_of_other_labels_is_left_out_with_the_reason(folder, monkeypatch):
    """Zero-shot: in process, the labels of the data are the classes."""
    labels, templates = ("one", "two", "three"), ("a {}",)
    hashes = {"labels_sha256": texts_sha256(labels), "templates_sha256": texts_sha256(templates)}
    write_policy(folder, **hashes)
    models: Any = [
        SimpleNamespace(
            family="sparo",
            name=name,
            components={"image": None, "text": None},
            preprocessing=None,
        )
        for name in (FULL, HALF)
    ]
    tables = {FULL: LARGE, HALF: SMALL}

    def run_of(model: Any) -> Any:
        return lambda given: tables[model.name][given["row"]]

    def of_labels(found: tuple[str, ...]) -> PolicyWorks:
        decider = Decider(
            run_of(models[0]),
            run_of,
            {"row": np.arange(5)},
            LABELS,
            labelling=(found, templates),
            name="d",
            digest=lambda: "s",
        )

        def decide(*given: Any) -> Decider:
            assert given[2] == HELD_OUT  # the samples that were scored, which are loaded already
            return decider

        monkeypatch.setattr(policies, "imported", lambda _: decide)
        return of_folder(folder, models, EvaluateOptions("d"))

    works = of_labels(labels[::-1])
    assert [work.policy.name for work in works.works] == ["auto"] and not works.left_out
    assert works.answers is not None and works.answers.labelling == Labelling(
        labels[::-1], templates
    )
    works = of_labels(("one", "two", "four"))
    assert not works.works
    ((name, reason),) = works.left_out
    assert name == "auto" and "calibrated with labels of SHA-256" in reason


def test_independent_rows_are_for_the_certificate_alone():
    def run(given: Any) -> np.ndarray:
        return SMALL[given["row"]]

    rows = {"row": np.arange(5)}
    decider = Decider(
        run, lambda _: run, rows, LABELS, np.array([1, 4]), name="d", digest=lambda: "s"
    )
    assert decider.logits().tolist() == SMALL.tolist()
    few = decider.decisions()
    assert few.logits.tolist() == SMALL[[1, 4]].tolist() and few.labels.tolist() == [1, 0]


def entries_of(there: ArtefactFolder, **changes: Any) -> list[FrontierEntry]:
    """Measurements of its variants on the machine of the policies, the full one first."""
    known = {"runtime": "onnxruntime 1", "device": "here", **changes}
    return [frontier_entry(one.name, one.sha256, **known) for one in there.variants]


def frontier_of(folder: Path, *found: PolicyEntry) -> Path:
    """Write the file as a benchmark does, with policies of this folder's variants."""
    there = ArtefactFolder(folder)
    hashes = {variant.name: variant.sha256 for variant in there.variants}
    own = [
        replace(
            one,
            full_sha256=hashes[FULL],
            steps=tuple(replace(step, sha256=hashes[step.variant]) for step in one.steps),
        )
        for one in found
    ]
    there.merge([], policies=own)
    return folder / FILE_NAME


def test_the_file_has_policies_only_if_there_are_any(folder):
    path = frontier_of(folder)
    assert "policies" not in json.loads(path.read_text())
    path = frontier_of(folder, entry())
    content = json.loads(path.read_text())
    assert content["version"] == 1 and content["policies"]["version"] == 1
    assert [one.policy for one in read_frontier(path).policies] == ["auto"]
    # Those of a later version decide nothing, so the rest of the file can be used.
    content["policies"] = {"version": 2, "other": []}
    path.write_text(json.dumps(content))
    assert read_frontier(path).policies == ()
    content["policies"] = {"version": 1, "entries": [{"policy": "auto"}]}
    path.write_text(json.dumps(content))
    with pytest.raises(SaccadeError, match=r"policies: entries\[0\].*missing keys"):
        read_frontier(path)


def test_policies_go_with_their_files_and_are_replaced_in_their_place(folder):
    frontier_of(folder, entry(), entry(policy="other", device="elsewhere"))
    there = ArtefactFolder(folder)
    (here, _) = entries_of(there)
    # Measurements without policies, such as those of a sweep, leave them as they are.
    assert {one.policy for one in there.merge([here]).policies} == {"auto", "other"}
    assert {one.policy for one in there.merge([here], policies=()).policies} == {"other"}
    frontier_of(folder, entry())
    add_variant(folder, HALF, "fp32", onnx_model(7))
    assert ArtefactFolder(folder).merge([]).policies == ()


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "faster": (
        {"times_full": {"times": 2.44, "interval": [2.1, 2.8]}},
        ("auto: 2.4 times the throughput of the full model (95 %: 2.1 to 2.8) at the same answer",
         "on 99.20 % of 500 test samples", "at most 1 % of the answers differ"),
        ("more than certified", "not shown", "in process"),
    ),
    "the same answers": (
        {"times_full": {"times": 12.3, "interval": [11.0, 13.0]}, "agreement": 1.0},
        ("12.3 times the throughput", "at the same answers on all 500 test samples"), (),
    ),
    "not shown": (
        {"times_full": {"times": 1.4, "interval": [0.9, 2.2]}},
        ("auto is not shown to be faster than the full model: 1.40 times its throughput "
         "(95 %: 0.90 to 2.2), at the same answer",),
        ("throughput of the full model",),
    ),
    "one round": (
        {"times_full": {"times": 3.0, "interval": None}},
        ("not shown to be faster", "3.0 times its throughput (too few rounds for an interval)"), (),
    ),
    "slower": (
        {"times_full": {"times": 0.8, "interval": [0.7, 0.9]}},
        ("auto is slower than the full model: 0.80 times its throughput",), ("not shown",),
    ),
    "other data": (
        {"agreement": 0.9, "agreement_interval": [0.87, 0.92]},
        ("10.00 % are lost, more than certified: they are harder",), ("chance",),
    ),
    "by chance": (
        {"agreement": 0.988, "agreement_interval": [0.975, 0.995]},
        ("1.20 % are lost, more than certified, which can be chance",), ("harder",),
    ),
    "calibrated on the same": (
        {"calibrated": True, "agreement": 0.9, "agreement_interval": [0.87, 0.92]},
        ("include those that calibrated it",), ("more than certified",),
    ),
    "against labels": (
        {"against": "labels", "gain": 0.002, "agreement": 0.9, "agreement_interval": [0.87, 0.92]},
        ("the accuracy is at most 1 points lower",), ("more than certified",),
    ),
    "segmentations": (
        {"min_ari": 0.9}, ("same segmentation on 99.20 % of 500 test samples (ARI of 0.9 or",), (),
    ),
    "one variant": (
        {"steps": [{"variant": HALF, "sha256": "a" * 64, "threshold": None, "share": 1.0}]},
        (f"The policy is {HALF} alone.",), (),
    ),
    "served": (
        {"times_full_served": {"times": 1.5, "interval": [1.2, 1.9]}},
        ("Through the router with 16 clients: 1.50 times the throughput (95 %: 1.20 to 1.90).",
         "the full model in process"),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_sentence_says_what_was_measured_and_no_more(case):
    changes, said, unsaid = CASES[case]
    text = words("policy", {**measured_policy(), **changes})
    assert all(part in text for part in said), text
    assert not any(part in text for part in unsaid), text


class FakeClient:
    """A running server's router with two variants and a policy, which answers by budget."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []

    def view(self) -> Any:
        return SimpleNamespace(
            model="nac", variants=(FULL, HALF), policies=("auto",),
            budget=lambda name: {FULL: "1", HALF: "0.5"}[name], require_output=lambda *_: None,
        )  # fmt: skip

    def infer(self, inputs: Any, outputs: Any, parameters: dict[str, str]) -> dict[str, np.ndarray]:
        self.asked.append(parameters)
        table = SMALL if parameters.get("budget") == "0.5" else LARGE
        return {"probabilities": table}


def test_the_policies_of_a_running_server_are_measured_too():
    client: Any = FakeClient()
    images = np.zeros((5, 2, 2, 3), np.uint8)
    answers = running.answers_of(client, images)
    assert client.asked == [{"budget": "1"}, {"budget": "0.5"}, {"policy": "auto"}]
    view = client.view()
    streams = running.running_streams(view, images, BenchOptions(Path("out"), concurrency=(1, 4)))
    points = [("policy auto", "", f"router_concurrency_{count}") for count in (1, 4)]
    assert list(streams)[-2:] == points
    assert b"policy" in streams[points[1]].requests[0]
    measured = {
        name: {"points": {str(count): {ROUNDS: [rate * count, rate * count]} for count in (1, 4)}}
        for name, rate in ((FULL, 10.0), (HALF, 40.0), ("policy auto", 25.0))
    }
    (policy,) = running.policy_figures(view, measured, answers)
    assert policy["times_full"] == {"times": 2.5, "interval": (2.5, 2.5)}
    assert policy["agreement"]["value"] == 1 and (answers["policy auto"] == LABELS).mean() == 0.8
    assert running.policy_text(policy) == (
        "Policy auto: 2.5 times (95 %: 2.5 to 2.5) the throughput of tiny-b1000-fp32; same answer "
        "on 100.00 % of 5 images."
    )


def test_the_explorer_draws_policies_where_they_were_measured_alike(folder):
    there = ArtefactFolder(folder)
    there.merge(entries_of(there)[:1])
    assert "legend" not in chart(measured(folder), FULL)
    frontier_of(folder, entry())
    drawn = chart(measured(folder), FULL)
    *_, stars = drawn["series"]
    assert stars["name"] == "policy" and drawn["legend"]["data"] == ["fixed budget", "policy"]
    (star,) = stars["data"]
    assert star["value"] == [200.0, 0.6] and star["label"] == {
        "formatter": "auto",
        "offset": [0, 0],
    }
    # The variants through a server, the policy in process: not on one axis.
    there.merge(entries_of(there, grpc={"concurrency_1": point()})[:1])
    assert "legend" not in chart(measured(folder), FULL)


def test_a_repository_has_the_figures_of_the_policies_that_it_serves(folder, tmp_path):
    there = ArtefactFolder(folder)
    there.merge(entries_of(there, runtime="onnxruntime 1.31.1 CPU"))
    write_policy(folder)
    deploy(folder, RepositoryOptions(tmp_path / "before", policies=False))
    frontier_of(folder, entry(), entry(policy="gone"))
    for name, policies_served in (("served", ["auto"]), ("none", [])):
        deploy(folder, RepositoryOptions(tmp_path / name, policies=bool(policies_served)))
        found = read_frontier(tmp_path / name / FILE_NAME).policies
        assert [one.policy for one in found] == policies_served
    bytes_of = [(tmp_path / name / FILE_NAME).read_bytes() for name in ("before", "none")]
    assert bytes_of[0] == bytes_of[1]


def test_a_demo_without_a_certificate_continues(monkeypatch, capsys):
    refused = calibration.Calibration(None, None, (MissingCertificate(0.02, 0.2, None),))
    monkeypatch.setattr(calibration, "calibrate", lambda *_: refused)
    demo._certify(Path("nowhere"))
    assert "no policy: risk 0.02: not certified" in capsys.readouterr().err


def test_inspect_lists_the_policies_of_a_frontier(folder):
    path = frontier_of(folder, entry())
    (line,) = inspect(path).facts["policies"]
    assert line == f"auto: 2.10 times the throughput of {FULL}, same answer on 80.00 % of 5 samples"
