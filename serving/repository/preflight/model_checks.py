# SPDX-License-Identifier: Apache-2.0
"""Check the ONNX file: that it is readable, verified, finite, and in a format the server reads."""

from collections.abc import Iterator

from saccade.core.errors import SaccadeError, require
from saccade.core.files import sha256_of
from saccade.exporter.artefact.manifest import SUFFIX, read_manifest
from saccade.serving.repository.model_config import MODEL_FILE
from saccade.serving.repository.preflight.report import NotChecked
from saccade.serving.repository.preflight.repository import RepositoryModel
from saccade.serving.repository.preflight.target import Target

OPSET, IR_VERSION = 20, 10  # both servers read these
_DOMAINS = {"", "ai.onnx", "saccade", "pkg.onnxscript.torch_lib.common"}


def check_manifest(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the manifest is readable, belongs to this model, and passed the gate."""
    try:
        manifest = read_manifest(model.folder / (model.name + SUFFIX))
    except SaccadeError as error:
        yield str(error)
        return
    if manifest.variant.name != model.name:
        yield f"its manifest is the manifest of {manifest.variant.name}."
    if not manifest.parity.passed:
        yield "according to its manifest, it did not pass the parity gate. Export it again."


def check_model(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the ONNX file matches its manifest and that the server can read and run it."""
    if not model.model.is_file():
        return
    for name, file in zip(model.files, model.manifest.file.files, strict=True):
        if not (path := model.version / name).is_file():
            yield f"{name} is missing, but the manifest lists it."
            return
        if (digest := sha256_of(path)) != file.sha256:
            yield (
                f"{name} has the SHA-256 {digest[:12]}..., expected {file.sha256[:12]}... from its "
                "manifest: it is another model's file."
            )
    try:
        proto = model.proto
    except NotChecked as error:
        yield f"{error}."
        return
    opsets = {opset.domain: opset.version for opset in proto.opset_import}
    opset = opsets.get("", opsets.get("ai.onnx", 0))
    if (opset, proto.ir_version) != (OPSET, IR_VERSION):
        yield (
            f"{MODEL_FILE} has opset {opset} and IR version {proto.ir_version}, expected opset "
            f"{OPSET} and IR version {IR_VERSION}."
        )
    functions = {(function.domain, function.name) for function in proto.functions}
    for node in proto.graph.node:
        own = (node.domain, node.op_type) in functions
        if node.domain not in _DOMAINS and not own:
            op = f"{node.domain}::{node.op_type}"
            yield f"{MODEL_FILE} calls {op}, an op that the server does not have."
            break


def check_weights(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that no weight is NaN or infinite, except for -inf in masks."""
    require("onnx", extra="export")
    numpy = require("numpy", extra="export")
    from saccade.exporter.graph.weights import loader

    proto, weights = model.graph
    for tensor in proto.graph.initializer:
        values = loader(tensor, weights)()
        if values.dtype.kind != "f":
            continue
        # Attention masks contain -inf; NaN and +inf are always faults.
        if bool(numpy.isnan(values).any() or (values == numpy.inf).any()):
            yield f"weight {tensor.name!r} of {MODEL_FILE} contains NaN or infinity."


def check_tensors(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the file's tensors are those of the manifest."""
    onnx = require("onnx", extra="export")
    weights = {tensor.name for tensor in model.proto.graph.initializer}
    for kind in ("input", "output"):
        expected = {spec.name: spec for spec in getattr(model.manifest, f"{kind}s")}
        tensors = {
            value.name: value
            for value in getattr(model.proto.graph, kind)
            if value.name not in weights
        }
        for name in sorted(set(tensors) ^ set(expected)):
            where = MODEL_FILE if name in tensors else "manifest"
            yield f"{kind} {name!r} is only in its {where}."
        for name in sorted(set(tensors) & set(expected)):
            tensor = tensors[name].type.tensor_type
            dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
            sizes = [size.dim_value or size.dim_param or "?" for size in tensor.shape.dim]
            fixed = [axis for axis in expected[name].shape if isinstance(axis, int)]
            if dtype != expected[name].dtype or [s for s in sizes if isinstance(s, int)] != fixed:
                yield (
                    f"{kind} {name!r} of {MODEL_FILE} is {dtype} {sizes}, expected "
                    f"{expected[name].dtype} [{expected[name].axes}] from its manifest."
                )
