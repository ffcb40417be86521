# SPDX-License-Identifier: Apache-2.0
"""Check the ONNX file: that it is verified, in a format the server reads, and gives its answer."""

import ctypes
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from saccade.core.errors import MissingPackage
from saccade.core.files import sha256_of
from saccade.exporter.artefact.manifest import SUFFIX, Manifest, read_manifest
from saccade.exporter.gate.metrics import one_minus_cosine, relative_error, thresholds_of
from saccade.exporter.runtimes.runners import Runner, onnx_runner, onnx_session
from saccade.models.interface import Arrays
from saccade.plugins.native.library import built_library
from saccade.serving.repository.model_config import MODEL_FILE
from saccade.serving.repository.preflight.repository import NotChecked, RepositoryModel, Target
from saccade.serving.repository.stored_sample import FOLDER, read_sample

OPSET, IR_VERSION = 20, 10  # both servers read these
_ENTRY = "RegisterCustomOps"


def check_manifest(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the manifest is readable, belongs to this model, and passed the gate."""
    manifest = read_manifest(model.folder / (model.name + SUFFIX))
    if manifest.variant.name != model.name:
        yield f"its manifest is the manifest of {manifest.variant.name}."
    if not manifest.parity.passed:
        yield "according to its manifest, it did not pass the parity gate. Export it again."


def check_model(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the ONNX file matches its manifest and that the server can read it.

    Whether it runs is for `check_answer`, which loads it.
    """
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


def check_library(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the library of custom ops is saccade's, loads here, and has the entry point.

    The library is compared before it is loaded, because loading runs its code.
    """
    for path in libraries(model):
        if not path.is_file():
            yield f"{path.name} is missing from the version folder."
        elif fault := _foreign_library(path):
            yield fault
        else:
            try:
                has_entry = hasattr(ctypes.CDLL(str(path)), _ENTRY)
            except OSError as error:
                yield f"{path.name} cannot be loaded ({error})."
                continue
            if not has_entry:
                yield f"{path.name} has no {_ENTRY}, the entry point that ONNX Runtime calls."


def _foreign_library(path: Path) -> str | None:
    """Return why a library must not be loaded; None if it is saccade's own library."""
    own = built_library()
    if own is None:
        return (
            f"{path.name} is code and was not loaded: there is no library here to compare it with. "
            "Build one with: saccade ops --build"
        )
    if (digest := sha256_of(path)) == (expected := sha256_of(own)):
        return None
    return (
        f"{path.name} has the SHA-256 {digest[:12]}..., but saccade's library here has "
        f"{expected[:12]}...: it is different code and was not loaded. Write the repository again "
        "with this installation of saccade, or check it with the one that wrote it."
    )


def libraries(model: RepositoryModel) -> list[Path]:
    """Return the libraries that the configuration names, in the version folder."""
    names = model.config.model_operations.op_library_filename
    return [model.version / name for name in names if name == Path(name).name]


def check_sample(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the stored sample exists and fits the manifest."""
    if not model.sampled:
        raise NotChecked(
            "no sample was stored. To have one, write the repository on a machine with ONNX Runtime"
        )
    sample = read_sample(model.sample)
    for spec in model.manifest.inputs:
        array = sample.inputs.get(spec.name)
        if array is None or str(array.dtype) != spec.dtype or array.ndim != len(spec.shape):
            yield f"the stored sample has no input {spec.name!r} of {spec.dtype} [{spec.axes}]."
    if odd := set(sample.answers) - {spec.name for spec in model.manifest.outputs}:
        yield f"the stored answer has {min(odd)!r}, which is not an output of the model."


def check_warmup(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the warm-up data has as many bytes as the configuration requires.

    The server refuses to load a model whose warm-up fails.
    """
    types = {spec.name: np.dtype(spec.dtype) for spec in model.manifest.inputs}
    for warmup in model.config.model_warmup[:1]:
        for name, tensor in sorted(warmup.inputs.items()):
            path = model.folder / FOLDER / name
            if tensor.input_data_file and name in types and path.is_file():
                needed = math.prod(tensor.dims) * types[name].itemsize
                if (size := path.stat().st_size) != needed:
                    yield f"the warm-up takes {needed} bytes of {name!r}, but its file has {size}."


def check_answer(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the model loads and gives the stored answer for the stored sample."""
    kernels = libraries(model)
    if any(check_library(model, target)):
        raise NotChecked("its library of ops cannot be loaded")
    with suppress(MissingPackage):  # without onnx, only the limits of this process apply
        assert model.proto.graph.node, "a file beyond the limits of graphs is not loaded"
    try:
        session = onnx_session(model.model, kernels=kernels[0] if kernels else None)
    except MissingPackage:
        raise
    except Exception as error:  # ONNX Runtime raises its own classes, which share no base class
        yield str(error)
        return
    yield from answer_differences(model, onnx_runner(session))


def answer_differences(model: RepositoryModel, run: Runner) -> Iterator[str]:
    """Report how a loaded model's answer for the stored sample differs from the stored one."""
    if not model.sampled:
        raise NotChecked("the model loads, but no sample was stored to compare answers")
    sample = read_sample(model.sample)
    yield from differences(run(sample.inputs), sample.answers, model.manifest)


def differences(answers: Arrays, stored: Arrays, manifest: Manifest) -> Iterator[str]:
    """Report each output that differs from the stored answer by more than the gate allows.

    Shapes: both [1 ...], by output.
    Raises: SaccadeError if the manifest overrides a threshold that does not exist.
    """
    limits = thresholds_of(manifest.variant.precision, manifest.parity.overrides)
    for name, expected in stored.items():
        if name not in answers or answers[name].shape != expected.shape:
            yield f"output {name!r} has a different shape than the stored answer."
        elif not np.isfinite(answers[name]).all():
            yield f"output {name!r} contains NaN or infinity."
        else:
            yield from _apart(name, answers[name], expected, limits, manifest.parity.floor)


def _apart(
    name: str, actual: np.ndarray, expected: np.ndarray, limits: Mapping[str, float], floor: float
) -> Iterator[str]:
    if (limit := limits.get("relative_error")) is not None:
        error = relative_error(actual, expected, floor)
        if error > limit:
            yield (
                f"output {name!r} is {error:.2g} from the stored answer, expected at most "
                f"{limit:g}."
            )
    elif expected.ndim > 1:
        error = one_minus_cosine(actual, expected).max()
        if error > limits["one_minus_cosine"]:
            limit = limits["one_minus_cosine"]
            yield (
                f"output {name!r} is {error:.2g} (1 - cosine) from the stored answer, expected at "
                f"most {limit:g}."
            )
