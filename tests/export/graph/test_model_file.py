# SPDX-License-Identifier: Apache-2.0
"""Weights leave the graph while it is worked on; the file is the same, or has a data file."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import external_data
import numpy as np
import onnx
import pytest
import torch
from half_typed import half_typed
from tiny_artefacts import onnx_model

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.manifest import FileEntry
from saccade.exporter.graph.canonical import tidy
from saccade.exporter.graph.half_graph import (
    activation_ranges,
    fold_casts,
    widened_session,
)
from saccade.exporter.graph.limits import check_graph
from saccade.exporter.graph.model_file import (
    Weights,
    location_of,
    read_model,
    without_values,
    write_model,
)
from saccade.exporter.graph.tracing import fold_constants, trace_module
from saccade.exporter.graph.trial import Trial, Verdict, main
from saccade.exporter.runtimes.runners import onnx_session

X = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
IMAGE = {"image": np.random.default_rng(0).integers(0, 256, (3, 4, 4, 1), dtype=np.uint8)}


class Layers(torch.nn.Module):
    """Weights that are shared, transposed, cast, sliced, and read by an op with a body."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 12)
        self.same = torch.nn.Parameter(self.first.weight.detach().clone())
        self.table = torch.nn.Parameter(torch.randn(32, 16))

    def forward(self, x):
        x = self.first(x) @ self.same + self.table[:16].T[0]
        x = (x.half() @ self.first.weight.half().T).float()
        return torch.ops.saccade.sparsemax(self.last(x[:, None]).squeeze(1))


def traced(weights: Weights | None = None) -> onnx.ModelProto:
    proto = trace_module(Layers(), {"x": torch.from_numpy(X)}, ["y"], weights=weights)
    fold_casts(proto, weights)
    return tidy(fold_constants(proto, weights))


def placeholders(proto: onnx.ModelProto) -> list[str]:
    return [tensor.name for tensor in proto.graph.initializer if location_of(tensor)]


def test_a_graph_without_its_weights_gives_the_same_bytes(tmp_path: Path) -> None:
    whole, weights = traced(), {}
    with external_data.small_limits(one_file_bytes=10**6):
        light = traced(weights)
        assert len(placeholders(light)) == 3 and len(light.SerializeToString()) < 6_000
        entry = write_model(light, weights, tmp_path / "light.onnx")
    data = whole.SerializeToString(deterministic=True)
    assert (tmp_path / "light.onnx").read_bytes() == data
    assert (entry.bytes, entry.sha256) == (len(data), sha256_of(tmp_path / "light.onnx"))
    assert write_model(whole, {}, tmp_path / "whole.onnx").sha256 == entry.sha256


def test_a_traced_model_is_not_kept() -> None:
    model = Layers()
    weights = weakref.ref(model.table)
    trace_module(model, {"x": torch.from_numpy(X)}, ["y"], weights={})
    del model
    gc.collect()
    assert weights() is None, "the exporter keeps the weights of the last model"


def test_weights_of_a_large_model_are_in_a_data_file(tmp_path: Path) -> None:
    weights: Weights = {}
    with external_data.small_limits():
        light = traced(weights)
        entry = write_model(light, weights, tmp_path / "model.onnx")
    assert entry.data and entry.data.name == "model.onnx.data"
    assert [file.bytes for file in entry.files] == [
        (tmp_path / file.name).stat().st_size for file in entry.files
    ]
    assert entry.data.sha256 == sha256_of(tmp_path / entry.data.name)
    assert entry.total_bytes == entry.bytes + entry.data.bytes
    expected = onnx_session(traced().SerializeToString()).run(None, {"x": X})
    actual = onnx_session(tmp_path / "model.onnx").run(None, {"x": X})
    np.testing.assert_array_equal(actual, expected)
    proto, loads = read_model(tmp_path / "model.onnx", entry)
    onnx.checker.check_model(proto, full_check=True)
    for name, load in loads.items():
        assert any(np.array_equal(load(), other()) for other in weights.values()), name
    whole = onnx.load(tmp_path / "model.onnx")  # by the library's own reader
    assert len(whole.graph.initializer) == len(light.graph.initializer)


def test_values_that_are_dropped_leave_what_a_check_needs() -> None:
    proto = traced()
    sizes = {tensor.name: tensor.dims for tensor in proto.graph.initializer}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saccade.exporter.graph.model_file.LARGE_BYTES", 256)
        proto = without_values(proto)
    assert placeholders(proto) and not any(len(t.raw_data) >= 256 for t in proto.graph.initializer)
    assert {tensor.name: tensor.dims for tensor in proto.graph.initializer} == sizes
    onnx.checker.check_model(proto, full_check=True)
    broken = traced()
    broken.graph.initializer[0].raw_data = broken.graph.initializer[0].raw_data[:-4]
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(without_values(broken), full_check=True)


@pytest.mark.parametrize("data_file", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_file_is_tried_without_a_copy_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: bool, data_file: bool
) -> None:
    proto = half_typed(onnx_model(), "fp16") if half else onnx_model()
    path, checked, check = tmp_path / "m.onnx", [], onnx.checker.check_model
    with external_data.small_limits(one_file_bytes=0 if data_file else 2**20):
        entry = write_model(proto, {}, path)
        monkeypatch.setattr(
            onnx.checker,
            "check_model",
            lambda given, **options: (checked.append(given), check(given, **options)),
        )
        done = main(Trial(str(path), entry))
    assert done == Verdict(entry.sha256) and bool(entry.data) == data_file
    (light,) = checked
    assert placeholders(light) and not any(len(t.raw_data) >= 128 for t in light.graph.initializer)


def test_the_hash_of_the_model_is_also_one_of_its_weights(tmp_path: Path) -> None:
    first, second = (
        external_data.written(onnx_model(seed), tmp_path / f"{seed}.onnx") for seed in (1, 2)
    )
    assert first.data and second.data and first.data.sha256 != second.data.sha256
    (tmp_path / "2.onnx").write_bytes((tmp_path / "1.onnx").read_bytes())
    with pytest.raises(SaccadeError, match=r"expected '2\.onnx\.data'"):
        read_model(tmp_path / "2.onnx", second)
    other = replace(first, data=replace(first.data, sha256=second.data.sha256))
    with pytest.raises(SaccadeError, match="was written with a data file of SHA-256"):
        read_model(tmp_path / "1.onnx", other)


def half_model() -> onnx.ModelProto:
    proto = half_typed(onnx_model(), "fp16")
    fold_casts(proto)
    return proto


def test_half_precision_files_with_a_data_file_are_widened(tmp_path: Path) -> None:
    entry = external_data.written(half_model(), tmp_path / "half.onnx")
    assert entry.data
    (tmp_path / "one.onnx").write_bytes(data := half_model().SerializeToString())
    whole = FileEntry("one.onnx", "", len(data))
    answers = [
        widened_session(tmp_path / file.name, file).run(None, IMAGE) for file in (entry, whole)
    ]
    for one, other in zip(*answers, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)


def test_ranges_are_those_of_the_tensors() -> None:
    proto = half_model()
    weights = {
        tensor.name: onnx.numpy_helper.to_array(tensor).astype(np.float32)
        for tensor in proto.graph.initializer
    }
    pixels = IMAGE["image"].reshape(3, 16).astype(np.float32)
    embedding = pixels @ weights["embedding/in1"]
    logits = embedding @ weights["logits/in1"]
    expected = {
        "embedding/in0": pixels.max(),
        "embedding/out": np.abs(embedding).max(),
        "logits/in0": np.abs(embedding).max(),
        "logits/out": np.abs(logits).max(),
    }
    ranges = activation_ranges(proto, IMAGE)
    assert ranges == {
        name: pytest.approx(float(value), rel=1e-5) for name, value in expected.items()
    }


def reference(**changes: str | None) -> Callable[[onnx.TensorProto], None]:
    """Change one entry of a reference to a data file; None removes it."""

    def change(tensor: onnx.TensorProto) -> None:
        entries = {entry.key: entry.value for entry in tensor.external_data} | changes
        del tensor.external_data[:]
        for key, value in entries.items():
            if value is not None:
                tensor.external_data.add(key=key, value=value)

    return change


def two_locations(tensor: onnx.TensorProto) -> None:
    tensor.external_data.add(key="location", value="other")


def values_too(tensor: onnx.TensorProto) -> None:
    tensor.raw_data = bytes(256)


def packed(tensor: onnx.TensorProto) -> None:
    tensor.data_type = onnx.TensorProto.INT4


REFERENCES = {
    "out of the folder": (reference(location="../data"), "another file, '../data', expected 'd'"),
    "absolute": (reference(location="/etc/passwd"), "another file, '/etc/passwd'"),
    "none": (reference(location=None), "another file, ''"),
    "in memory": (reference(location="#1"), "another file, '#1'"),
    "behind the end": (reference(offset="1"), "ends at byte 257 of 'd', which has 256"),
    "far behind": (reference(offset="9" * 18), "which has 256"),
    "no offset": (reference(offset=None), "has the keys"),
    "no length": (reference(length=None), "has the keys"),
    "negative": (reference(offset="-1"), "expected numbers of bytes"),
    "no number": (reference(length="lots"), "expected numbers of bytes"),
    "too many digits": (reference(offset="9" * 19), "expected numbers of bytes"),
    "shorter": (reference(length="255"), "has 255 bytes, expected 256"),
    "another key": (reference(checksum="0"), "has the keys"),
    "twice": (two_locations, "another file, 'other'"),
    "values as well": (values_too, "has 256 bytes in two places"),
    "less than a byte": (packed, "another file, 'd'"),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_references_to_anything_else_are_refused(case: str, tmp_path: Path) -> None:
    external_data.written(onnx_model(), tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    (tensor,) = (one for one in proto.graph.initializer if location_of(one))
    reference(location="d")(tensor)
    check_graph(proto, "it", {"d": 256})
    change, message = REFERENCES[case]
    change(tensor)
    with pytest.raises(SaccadeError) as refused:
        check_graph(proto, "it", {"d": 256})
    assert message in str(refused.value)


def test_only_weights_of_the_whole_model_are_in_a_data_file(tmp_path: Path) -> None:
    external_data.written(onnx_model(), tmp_path / "m.onnx")
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    (tensor,) = (one for one in proto.graph.initializer if location_of(one))
    node = onnx.helper.make_node("Constant", [], ["c"], name="c")
    node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
    proto.graph.node.append(node)
    with pytest.raises(SaccadeError, match=r"another file, 'm\.onnx\.data', expected them in this"):
        check_graph(proto, "it", {"m.onnx.data": 10**6})
