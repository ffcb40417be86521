# SPDX-License-Identifier: Apache-2.0
"""The ONNX file: readable, the one that was proved, of formats that the server reads, finite."""

from collections.abc import Iterator

from saccade.errors import SaccadeError, require
from saccade.export.artefact.manifest import SUFFIX, read_manifest
from saccade.files import sha256_of
from saccade.serving.repository.model_config import MODEL_FILE
from saccade.serving.repository.preflight.opened import OpenedModel
from saccade.serving.repository.preflight.report import NotChecked
from saccade.serving.repository.preflight.target import Target

OPSET, IR_VERSION = 20, 10  # that both servers read
_DOMAINS = {"", "ai.onnx", "saccade", "pkg.onnxscript.torch_lib.common"}


def check_manifest(model: OpenedModel, target: Target) -> Iterator[str]:
    """The manifest can be read, is this model's, and passed its gate."""
    try:
        manifest = read_manifest(model.folder / (model.name + SUFFIX))
    except SaccadeError as error:
        yield str(error)
        return
    if manifest.variant.name != model.name:
        yield f"its manifest is of {manifest.variant.name}."
    if not manifest.parity.passed:
        yield "its manifest says that it did not pass the parity gate."


def check_model(model: OpenedModel, target: Target) -> Iterator[str]:
    """The manifest's ONNX file, of formats that every server named reads, with ops that it has."""
    if not model.model.is_file():
        return
    expected = model.manifest.file.sha256
    if (found := sha256_of(model.model)) != expected:
        yield (
            f"{MODEL_FILE} has the SHA-256 {found[:12]}..., its manifest says "
            f"{expected[:12]}...: it is another model's file."
        )
    try:
        proto = model.proto
    except NotChecked as error:
        yield f"{error}."
        return
    opsets = {each.domain: each.version for each in proto.opset_import}
    opset = opsets.get("", opsets.get("ai.onnx", 0))
    if (opset, proto.ir_version) != (OPSET, IR_VERSION):
        yield (
            f"{MODEL_FILE} is of opset {opset} and IR version {proto.ir_version}, expected "
            f"{OPSET} and {IR_VERSION}."
        )
    functions = {(each.domain, each.name) for each in proto.functions}
    for node in proto.graph.node:
        own = (node.domain, node.op_type) in functions
        if node.domain not in _DOMAINS and not own:
            yield f"{MODEL_FILE} calls {node.domain}::{node.op_type}, which no server here has."
            break


def check_weights(model: OpenedModel, target: Target) -> Iterator[str]:
    """No weight is NaN or infinite, apart from masks that are meant to be."""
    onnx = require("onnx", extra="export")
    numpy = require("numpy", extra="export")
    for each in model.proto.graph.initializer:
        values = onnx.numpy_helper.to_array(each)
        if values.dtype.kind != "f":
            continue
        # -inf is what a mask of an attention holds; NaN and +inf are never meant.
        if bool(numpy.isnan(values).any() or (values == numpy.inf).any()):
            yield f"weight {each.name!r} of {MODEL_FILE} contains NaN or infinity."


def check_tensors(model: OpenedModel, target: Target) -> Iterator[str]:
    """The file's tensors are those of the manifest."""
    onnx = require("onnx", extra="export")
    weights = {each.name for each in model.proto.graph.initializer}
    for kind in ("input", "output"):
        promised = {each.name: each for each in getattr(model.manifest, f"{kind}s")}
        found = {
            each.name: each for each in getattr(model.proto.graph, kind) if each.name not in weights
        }
        for name in sorted(set(found) ^ set(promised)):
            where = MODEL_FILE if name in found else "manifest"
            yield f"{kind} {name!r} is in its {where} only."
        for name in sorted(set(found) & set(promised)):
            tensor = found[name].type.tensor_type
            dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
            sizes = [each.dim_value or each.dim_param or "?" for each in tensor.shape.dim]
            fixed = [axis for axis in promised[name].shape if isinstance(axis, int)]
            if dtype != promised[name].dtype or [s for s in sizes if isinstance(s, int)] != fixed:
                yield (
                    f"{kind} {name!r} of {MODEL_FILE} is {dtype} {sizes}, its manifest says "
                    f"{promised[name].dtype} [{promised[name].axes}]."
                )
