# SPDX-License-Identifier: Apache-2.0
"""Libraries load, and every variant gives the stored sample the stored answer."""

import ctypes
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from saccade.errors import MissingPackage, SaccadeError
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.gate.metrics import one_minus_cosine, relative_error, thresholds_of
from saccade.exporter.runtimes.runners import onnx_runner, onnx_session
from saccade.files import sha256_of
from saccade.models.interface import Arrays
from saccade.plugins.native.library import built_library
from saccade.serving.repository.preflight.report import NotChecked
from saccade.serving.repository.preflight.repository import RepositoryModel
from saccade.serving.repository.preflight.target import Target
from saccade.serving.repository.stored_sample import FOLDER, read_sample

_ENTRY = "RegisterCustomOps"


def check_library(model: RepositoryModel, target: Target) -> Iterator[str]:
    """The library of custom ops is saccade's, loads here, and has ONNX Runtime's entry.

    It is compared before it is loaded: loading runs what is in it.
    """
    for path in libraries(model):
        if not path.is_file():
            yield f"{path.name} is missing from the version's folder."
        elif fault := _foreign_library(path):
            yield fault
        else:
            try:
                has_entry = hasattr(ctypes.CDLL(str(path)), _ENTRY)
            except OSError as error:
                yield f"{path.name} cannot be loaded ({error})."
                continue
            if not has_entry:
                yield f"{path.name} has no {_ENTRY}, by which ONNX Runtime takes its ops."


def _foreign_library(path: Path) -> str | None:
    """Why a library must not be loaded; None for the one that saccade has here."""
    own = built_library()
    if own is None:
        return (
            f"{path.name} is code, and there is no library here to compare it with, so that it was "
            "not loaded. Build that with: saccade ops --build"
        )
    if (digest := sha256_of(path)) == (expected := sha256_of(own)):
        return None
    return (
        f"{path.name} has the SHA-256 {digest[:12]}..., the library of saccade here "
        f"{expected[:12]}...: it is other code and was not loaded. Write the repository again with "
        "the saccade that is here, or check it with the one that wrote it."
    )


def libraries(model: RepositoryModel) -> list[Path]:
    """The libraries that the configuration names, inside the version's folder."""
    names = model.config.model_operations.op_library_filename
    return [model.version / name for name in names if name == Path(name).name]


def check_sample(model: RepositoryModel, target: Target) -> Iterator[str]:
    """The stored sample is there and fits."""
    if not model.sampled:
        raise NotChecked("no sample was stored: write the repository where ONNX Runtime is")
    try:
        sample = read_sample(model.sample)
    except SaccadeError as error:
        yield str(error)
        return
    for spec in model.manifest.inputs:
        array = sample.inputs.get(spec.name)
        if array is None or str(array.dtype) != spec.dtype or array.ndim != len(spec.shape):
            yield f"the stored sample has no {spec.name!r} of {spec.dtype} [{spec.axes}]."
    if odd := set(sample.answers) - {spec.name for spec in model.manifest.outputs}:
        yield f"the stored answer has {min(odd)!r}, which the model does not answer."


def check_warmup(model: RepositoryModel, target: Target) -> Iterator[str]:
    """The data of the warm-up has as many bytes as the configuration says of it.

    The server refuses to load a model whose warm-up fails.
    """
    types = {spec.name: np.dtype(spec.dtype) for spec in model.manifest.inputs}
    for warmup in model.config.model_warmup[:1]:
        for name, tensor in sorted(warmup.inputs.items()):
            path = model.folder / FOLDER / name
            if tensor.input_data_file and name in types and path.is_file():
                needed = math.prod(tensor.dims) * types[name].itemsize
                if (size := path.stat().st_size) != needed:
                    yield f"the warm-up takes {needed} bytes of {name!r}, its file has {size}."


def check_answer(model: RepositoryModel, target: Target) -> Iterator[str]:
    """The model loads and answers the stored sample as it did when the repository was written."""
    kernels = libraries(model)
    if any(check_library(model, target)):
        raise NotChecked("its library of ops cannot be loaded")
    with suppress(MissingPackage):  # without onnx the limits of this process hold alone
        assert model.proto.graph.node, "a file beyond the limits of graphs is not loaded"
    try:
        session = onnx_session(model.model, kernels=kernels[0] if kernels else None)
    except MissingPackage:
        raise
    except Exception as error:  # of a library it raises its own classes, which share no parent
        yield str(error)
        return
    if not model.sampled:
        raise NotChecked("it loads; no sample was stored to ask it")
    try:
        sample = read_sample(model.sample)
        answers = onnx_runner(session)(sample.inputs)
        apart = list(differences(answers, sample.answers, model.manifest))
    except SaccadeError as error:
        yield str(error)
        return
    yield from apart


def differences(answers: Arrays, stored: Arrays, manifest: Manifest) -> Iterator[str]:
    """In what answers depart from the stored ones by more than the gate allowed the file.

    Shapes: both [1 ...] by output.
    Raises: SaccadeError if the manifest overrides what is no threshold.
    """
    limits = thresholds_of(manifest.variant.precision, manifest.parity.overrides)
    for name, expected in stored.items():
        if name not in answers or answers[name].shape != expected.shape:
            yield f"output {name!r} has another shape than the stored answer's."
        elif not np.isfinite(answers[name]).all():
            yield f"output {name!r} contains NaN or infinity."
        else:
            yield from _apart(name, answers[name], expected, limits, manifest.parity.floor)


def _apart(
    name: str,
    actual: np.ndarray,
    expected: np.ndarray,
    limits: Mapping[str, float],
    floor: float,
) -> Iterator[str]:
    if (limit := limits.get("relative_error")) is not None:
        error = relative_error(actual, expected, floor)
        if error > limit:
            yield f"output {name!r} is {error:.2g} from the stored answer, expected {limit:g}."
    elif expected.ndim > 1:
        error = one_minus_cosine(actual, expected).max()
        if error > limits["one_minus_cosine"]:
            yield f"output {name!r} is {error:.2g} (1 - cosine) from the stored answer."
