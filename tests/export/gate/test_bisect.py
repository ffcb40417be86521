# SPDX-License-Identifier: Apache-2.0
"""`saccade verify --bisect`: the node at which a variant departs, and none where none does."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from half_typed import add_variant, half_typed
from tiny_artefacts import FULL, artefacts, onnx_model

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.gate.bisect import Departure, departure
from saccade.exporter.gate.metrics import WHOLE, relative_error
from saccade.exporter.runtimes.runners import onnx_session
from saccade.serving.commands import cli

IMAGES = {"image": np.random.default_rng(0).integers(0, 256, (4, 4, 4, 1), dtype=np.uint8)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return artefacts(tmp_path / "artefact", checkpoint=False)


def manifest_named(folder: Path, name: str) -> Manifest:
    return next(
        manifest for manifest in ArtefactFolder(folder).manifests if manifest.variant.name == name
    )


def departed(folder: Path, manifest: Manifest) -> Departure:
    artefacts = ArtefactFolder(folder)
    return departure(artefacts, manifest, artefacts.manifests, IMAGES)


def spoiled(weight: str) -> onnx.ModelProto:
    """The model with one weight a third larger."""
    proto = onnx_model()
    for tensor in proto.graph.initializer:
        if tensor.name == weight:
            values = onnx.numpy_helper.to_array(tensor) * np.float32(4 / 3)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, weight))
    return proto


@pytest.mark.parametrize(("weight", "node"), [("embed", "embedding"), ("classify", "logits")])
def test_names_the_first_node_that_departs(folder: Path, weight: str, node: str) -> None:
    name = add_variant(folder, FULL, "fp16", half_typed(spoiled(weight), "fp16")).variant.name
    row = departed(folder, manifest_named(folder, name))
    assert (row.departs, row.node, row.operator) == (True, node, "MatMul")
    assert row.error == pytest.approx(1 / 6, rel=0.05)  # of its largest number, which is off
    assert f"at {node} (MatMul), by a relative error of 0.17" in row.to_text()


def test_finds_none_in_a_graph_that_was_only_rounded(folder: Path) -> None:
    name = add_variant(folder, FULL, "fp16", half_typed(onnx_model(), "fp16")).variant.name
    for variant in (name, FULL):
        row = departed(folder, manifest_named(folder, variant))
        assert not row.departs
        assert row.error < 2e-3
        assert row.compared == 4
        assert f"the largest relative error is {row.error:.2g}, at " in row.to_text()


def chain(operators: list[str]) -> onnx.ModelProto:
    """The model with a chain of nodes before its end, named step/0, step/1 ..."""
    proto = onnx_model()
    last = proto.graph.node.pop()
    proto.graph.node[-1].output[0] = "step0"
    for index, operator in enumerate(operators):
        step = onnx.helper.make_node(
            operator, [f"step{index}"], [f"step{index + 1}"], name=f"step/{index}"
        )
        proto.graph.node.append(step)
    back = onnx.helper.make_node("Identity", [f"step{len(operators)}"], ["logits"], name="back")
    proto.graph.node.extend([back, last])
    return proto


def test_a_long_graph_is_searched_whole(folder: Path) -> None:
    steps = ["Neg"] * 60
    add_variant(folder, FULL, "fp32", chain(steps))
    wrong = chain([*steps[:40], "Abs", *steps[41:]])
    name = add_variant(folder, FULL, "fp16", half_typed(wrong, "fp16")).variant.name
    row = departed(folder, manifest_named(folder, name))
    # The node itself is another operator in the other graph: its reader is the first of both.
    assert (row.departs, row.node) == (True, "step/41")


def test_a_name_that_went_to_another_node_is_no_departure(folder: Path) -> None:
    steps = chain(["Neg"] * 4)
    add_variant(folder, FULL, "fp32", steps)
    renamed = {"step/1": "step/2", "step/2": "step/1"}
    for node in steps.graph.node:
        node.name = renamed.get(node.name, node.name)
    name = add_variant(folder, FULL, "fp16", half_typed(steps, "fp16")).variant.name
    found = departed(folder, manifest_named(folder, name))
    assert not found.departs
    assert found.compared == 4 + 2  # with step/0 and back, without the two and the one after them


def test_what_is_no_number_is_equal_to_itself_alone() -> None:
    one = np.array([1.0, -4.0, 0.0])
    assert relative_error(np.array([1.0, -4.0, 1.0]), one, WHOLE) == 0.25
    assert relative_error(np.array([1.0, -5.0, 0.0]), one, WHOLE) == 0.125
    assert relative_error(np.array([1.0, -4.0, 1.0]), one, 0.1) == 2.5
    assert relative_error(one, one, WHOLE) == 0
    infinite = np.array([np.inf, -4.0, np.nan])
    assert relative_error(infinite, infinite, WHOLE) == 0
    assert relative_error(infinite + np.array([0, 1, 0]), infinite, WHOLE) == 0.125
    assert relative_error(one, infinite, WHOLE) == np.inf
    assert relative_error(infinite, one, WHOLE) == np.inf
    assert relative_error(one[:2], one, WHOLE) == np.inf
    assert relative_error(one, one[:0], WHOLE) == np.inf
    assert relative_error(np.zeros(2), np.zeros(2), WHOLE) == 0
    assert relative_error(np.float32(2), np.float32(1), WHOLE) == 0.5


def test_a_broken_file_does_not_keep_the_others_from_it(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(
        tiny_folder, tmp_path / "nac", ignore=shutil.ignore_patterns("*b1000*", "*b0500*")
    )
    broken = folder / "nac-b0250-fp32.onnx"
    broken.write_bytes(broken.read_bytes()[:1000])
    assert cli.run(["verify", str(folder), "--bisect", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [row["passed"] for row in answer["variants"]] == [False, True]
    assert [row["name"] for row in answer["bisect"]] == ["nac-b0125-fp32"]


def test_the_command_needs_the_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", str(folder), "--bisect"]) == 2
    assert "checkpoint" in capsys.readouterr().err.lower()


def test_a_provider_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(SaccadeError, match=r"has no RockExecutionProvider, only .*\S+\[gpu\]"):
        onnx_session(folder / f"{FULL}.onnx", provider="RockExecutionProvider")
