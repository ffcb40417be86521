# SPDX-License-Identifier: Apache-2.0
"""Code that runs inside the server, without one: the backend's refusals, its runs, and its ops."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from one_node import one_node_model
from ops_implementations import built_library
from places import PACKAGE, module_at
from router_code import backend_module
from support.serving.routers import src

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.plugins.ops import OPS
from saccade.serving.repository.model_config import (
    RUN_BATCH,
    parse_config,
    variant_config,
)
from saccade.serving.repository.runtimes.onnxruntime import config_fields

SOURCES = PACKAGE / "model_repository"


def request(pb, pixels, *outputs):
    return SimpleNamespace(
        inputs={"image": pb.Tensor("image", pixels)},
        requested_output_names=lambda: outputs or ("logits", "probabilities", "embedding"),
    )


@pytest.fixture
def config(tiny_folder):
    """The config of the full variant, as the server hands it to a backend."""
    from google.protobuf.json_format import MessageToDict

    manifest, fields = ArtefactFolder(tiny_folder).manifests[0], config_fields(None, False, 8)
    message = parse_config(variant_config(manifest, fields, run_batch=8))
    content = MessageToDict(message, preserving_proto_field_name=True)
    for tensor in (*content["input"], *content["output"]):
        tensor["dims"] = [int(size) for size in tensor["dims"]]
    return content


@pytest.fixture
def start(pb, tiny_folder, tmp_path):
    """Start the backend on the full variant with a config."""
    pytest.importorskip("onnxruntime")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").hardlink_to(tiny_folder / "nac-b1000-fp32.onnx")

    def run(config, kind="CPU"):
        model = backend_module("onnxruntime").TritonPythonModel()
        place = {"model_repository": str(tmp_path), "model_version": "1"}
        model.initialize({"model_config": json.dumps(config), "model_instance_kind": kind, **place})
        return model

    return run


UNKNOWN = {
    "a field": ({"batch_input": [{"kind": "BATCH_ELEMENT_COUNT"}]}, "batch_input"),
    "sequences": ({"sequence_batching": {"max_sequence_idle_microseconds": 1}}, "sequence_batch"),
    "an accelerator": (
        {"optimization": {"execution_accelerators": {"cpu_execution_accelerator": [{"name": 1}]}}},
        "execution_accelerators",
    ),
    "a parameter": ({"parameters": {"cudnn_conv_algo": {"string_value": "0"}}}, "cudnn_conv"),
    "no number": ({"parameters": {"intra_op_thread_count": {"string_value": "x"}}}, "'x'"),
    "several answers": ({"model_transaction_policy": {"decoupled": True}}, "decoupled"),
    "a reshaped input": (
        {"input": [{"name": "image", "dims": [64], "reshape": {"shape": [8, 8]}}]}, "reshape",
    ),
    "a level": ({"optimization": {"graph": {"level": 5}}}, "level is 5"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_the_backend_refuses_what_it_does_not_know(pb, start, config, case):
    change, words = UNKNOWN[case]
    with pytest.raises(pb.TritonError, match=f"nac-b1000-fp32.*{words}"):
        start({**config, **change})


def test_the_backend_runs_on_cpus_only(pb, start, config):
    with pytest.raises(pb.TritonError, match="KIND_CPU"):
        start(config, kind="GPU")


@pytest.mark.parametrize("run_batch", [1, 3, 8, 64])
def test_a_batch_of_any_size_is_answered_row_by_row(pb, start, config, run_batch):
    config["parameters"][RUN_BATCH] = {"string_value": str(run_batch)}
    model = start(config)
    pixels = np.random.default_rng(0).integers(0, 256, (21, 8, 8, 1), dtype=np.uint8)
    alone = np.concatenate(
        [model.variant.run(["logits"], {"image": row[None]})[0] for row in pixels]
    )
    sizes = []
    plain, model.variant.run = (
        model.variant.run,
        lambda names, feed: sizes.append(len(feed["image"])) or plain(names, feed),
    )
    answers = model.execute([request(pb, part) for part in np.split(pixels, (1, 8, 10))])
    logits = np.concatenate([answer.tensors["logits"] for answer in answers])
    np.testing.assert_allclose(logits, alone, rtol=1e-4, atol=1e-5)
    assert sum(sizes) == 21 and max(sizes) <= run_batch and max(sizes) - min(sizes) <= 1


def test_one_bad_request_is_its_own_failure_and_leaks_nothing(pb, start, config):
    model = start(config)
    good, bad = np.zeros((2, 8, 8, 1), np.uint8), np.zeros((2, 9, 9, 1), np.uint8)
    first, second, third = model.execute([request(pb, each) for each in (good, bad, good)])
    assert first.error is None and third.error is None and len(first.tensors["logits"]) == 2
    assert second.error.message() == (
        "variant 'nac-b1000-fp32' could not run this request; see the server's log"
    )
    assert any("request failed" in line for line in pb.log)


def test_an_empty_batch_is_refused_alone(pb, start, config):
    good, empty = np.zeros((2, 8, 8, 1), np.uint8), np.zeros((8, 8, 1), np.uint8)  # as it arrives
    first, second = start(config).execute([request(pb, each) for each in (good, empty)])
    assert first.error is None and len(first.tensors["logits"]) == 2
    assert second.error.code() == "invalid"
    assert "found a batch of 0 in 'image', expected at least 1" in second.error.message()


def test_only_what_is_asked_for_is_sent(pb, start, config):
    (answer,) = start(config).execute([request(pb, np.zeros((1, 8, 8, 1), np.uint8), "embedding")])
    assert set(answer.tensors) == {"embedding"}


FAILURES = {
    "Model x - Error when running inference: Exceeds maximum queue size": ("queue_full", "full"),
    "Request timeout expired": ("timeout", "timeout ran out"),
    "Stub process 'x_0_0' is not healthy.": ("unavailable", "has died or is being loaded"),
    "Failed for execute the inference request. Model 'x' is not ready.": ("unavailable", "loaded"),
    "Model x - Error when running inference: Server not ready": ("unavailable", "loaded"),
    "Error at /opt/secret/model.py(7): <module>": ("failed", "failed"),
}


@pytest.mark.parametrize("words", FAILURES)
def test_a_variants_failure_names_it_and_keeps_the_servers_words(pb, words):
    reason, expected = FAILURES[words]
    refused = module_at(SOURCES / "router" / "calls.py").failure(
        "nac-b0250-fp32", pb.TritonError(words)
    )
    assert refused.reason == reason
    assert src.metrics.code_of(reason) == ("internal" if reason == "failed" else "unavailable")
    assert expected in str(refused) and "'nac-b0250-fp32'" in str(refused)
    assert "secret" not in str(refused) and any(words in line for line in pb.log)


@pytest.fixture
def open_session(pb):
    """The backend's own function."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    variant = backend_module("onnxruntime", "runtime").VARIANT
    return partial(variant.open, variant.__new__(variant))


def open_repository(open_session, folder, *, body, library=None):
    axes = {"Z": "b 4 4", "P": "b 4 4", "error": "b"}
    model = one_node_model(OPS["TVMax"], attributes={"lam": 0.1}, axes=axes, body=body)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    names = {"op_library_filename": [str(library)]} if library else {}
    return open_session({"model_operations": names}, folder / "model.onnx")


def test_config_names_the_library(open_session, tmp_path):
    z = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
    (exact, _) = OPS["TVMax"].reference(z, lam=0.1)
    # Without a body only the kernel can answer.
    run = open_repository(open_session, tmp_path, body=False, library=built_library())
    p, error = run(None, {"Z": z})
    np.testing.assert_allclose(p, exact, atol=1e-5)
    assert (error <= 1e-6).all()
    p, error = open_repository(open_session, tmp_path, body=True)(None, {"Z": z})
    np.testing.assert_allclose(p, exact, atol=1e-5)
    assert (error <= 1e-5).all()


def test_without_library_and_body_the_model_is_refused(open_session, tmp_path):
    with pytest.raises(Exception, match="saccade"):
        open_repository(open_session, tmp_path, body=False)
