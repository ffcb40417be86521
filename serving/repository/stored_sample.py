# SPDX-License-Identifier: Apache-2.0
"""The sample of each component that a repository stores, with the expected answer.

The server warms up with the sample. `saccade preflight` runs it and compares the answer. ONNX
Runtime computes the stored answer from the exported file with its function bodies, whatever
runtime serves the component.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core import limits
from saccade.core.errors import MissingPackage, SaccadeError, require
from saccade.core.files import read_regular
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest, by_parent
from saccade.exporter.runtimes.onnxruntime import ONNXRUNTIME
from saccade.exporter.runtimes.runners import Runner, onnx_runner
from saccade.models.checkpoint import Checkpoint
from saccade.models.data.calibration import sized
from saccade.models.interface import Arrays, TensorSpec, component_named

FOLDER = "warmup"  # the server looks for warm-up data in a folder with this name
FILE = "sample.safetensors"
MAX_BYTES = 4 << 20  # limit of a component's answers; the largest are left out first
_INPUT, _OUTPUT = "input/", "output/"


@dataclass(frozen=True)
class Sample:
    """One input of a component and its answer.

    Shapes: inputs [1 ...]; answers [1 ...], empty if nothing here could compute them.
    """

    inputs: dict[str, np.ndarray]
    answers: dict[str, np.ndarray]
    real: bool  # from the checkpoint's own data; else zeros

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs of a real sample; empty for zeros, which need no files."""
        return {name: array.shape for name, array in self.inputs.items()} if self.real else {}


def samples(folder: ArtefactFolder) -> dict[str, Sample]:
    """Return a sample per component, by name: the first calibration sample of the checkpoint.

    The sample is zeros if the checkpoint is not in the folder, or if torch is not installed.

    Raises: SaccadeError if the folder has a different checkpoint, or ONNX Runtime refuses a file.
    """

    def load(manifest: Manifest) -> Runner:
        if manifest.variant.precision != "bf16":
            return ONNXRUNTIME.load(folder, manifest, "bodies")
        require("onnx", extra="export")
        from saccade.exporter.graph.half_graph import widened_session

        # ONNX Runtime's CPU provider has no kernels for the type.
        return onnx_runner(widened_session(folder.file(manifest), manifest.file))

    samples: dict[str, Sample] = {}
    for manifests in by_parent(folder.manifests):
        try:
            there = (folder.path / manifests[0].parent.name).exists()
            drawn = _Drawn(folder.parent_of(manifests[0])) if there else None
        except MissingPackage:
            drawn = None
        for manifest in manifests:
            real = drawn.inputs(manifest) if drawn else None
            inputs = real or {spec.name: _zeros(spec) for spec in manifest.inputs}
            answers = _answers(partial(load, manifest), inputs)
            samples[manifest.variant.name] = Sample(inputs, answers, real is not None)
    return samples


def write_sample(place: Path, sample: Sample) -> None:
    """Write a model's sample into its folder: once for the server, once with the answers."""
    from safetensors.numpy import save

    target = place / FOLDER
    if sample.real or sample.answers:
        target.mkdir()
    if sample.real:
        for name, array in sample.inputs.items():
            (target / name).write_bytes(array.tobytes())
    if not sample.answers:
        return
    arrays = {_INPUT + name: array for name, array in sample.inputs.items()}
    arrays |= {_OUTPUT + name: array for name, array in sample.answers.items()}
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    # One metadata key only: safetensors writes several in the order of a random hash.
    kind = "real" if sample.real else "zeros"
    (target / FILE).write_bytes(save(kept, metadata={"saccade": kind}))


def read_sample(path: Path) -> Sample:
    """Read a sample that `write_sample` wrote. Nothing in it is executed.

    Raises: SaccadeError if the file is missing or is not a stored sample.
    """
    from safetensors.numpy import load

    try:
        arrays = load(read_regular(path, limits.WEIGHTS_BYTES))
    except Exception as error:  # NumPy raises many classes for an unknown type or shape
        raise SaccadeError(f"{path}: is not a stored sample ({error}).") from error
    parts = {
        prefix: {
            name.removeprefix(prefix): array
            for name, array in arrays.items()
            if name.startswith(prefix)
        }
        for prefix in (_INPUT, _OUTPUT)
    }
    if not all(parts.values()) or any(
        not array.ndim or len(array) != 1 for array in arrays.values()
    ):
        raise SaccadeError(f"{path}: does not contain exactly one sample with its answer.")
    return Sample(parts[_INPUT], parts[_OUTPUT], real=True)


class _Drawn:
    """The checkpoint's samples. Its model is built once, and only if it is needed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._model: Any = None

    def inputs(self, manifest: Manifest) -> dict[str, np.ndarray] | None:
        """Return the inputs of a component's sample, or None if the checkpoint has none.

        Shapes: each [1 ...].
        """
        first = {name: array[:1] for name, array in self._checkpoint.calibration.items()}
        first = {**sized(first, manifest.preprocessing)}
        for source in (lambda: first, lambda: self._made(manifest, first)):
            given = source()
            if all(_fits(given.get(spec.name), spec) for spec in manifest.inputs):
                return {
                    spec.name: np.ascontiguousarray(given[spec.name]) for spec in manifest.inputs
                }
        return None

    def _made(self, manifest: Manifest, first: Arrays) -> Mapping[str, np.ndarray]:
        """Return inputs that the model computes from a sample, such as slots for a decoder."""
        if self._model is None:
            self._model = self._checkpoint.build()
        component = component_named(self._model, manifest.variant.role)
        return component.real(first) if component.real else {}


def _fits(array: np.ndarray | None, spec: TensorSpec) -> bool:
    if array is None or array.dtype != spec.dtype or array.ndim != len(spec.shape):
        return False
    pairs = zip(spec.shape, array.shape, strict=True)
    return all(isinstance(axis, str) or axis == size for axis, size in pairs)


def _zeros(spec: TensorSpec) -> np.ndarray:
    return np.zeros([axis if isinstance(axis, int) else 1 for axis in spec.shape], spec.dtype)


def _answers(load: Callable[[], Runner], inputs: Arrays) -> dict[str, np.ndarray]:
    try:
        answers = load()(inputs)
    except MissingPackage:
        return {}
    finite = {
        name: array
        for name, array in answers.items()
        if array.dtype.kind != "f" or bool(np.isfinite(array).all())
    }
    kept: dict[str, np.ndarray] = {}
    for name in sorted(finite, key=lambda name: (finite[name].nbytes, name)):
        if sum(array.nbytes for array in kept.values()) + finite[name].nbytes <= MAX_BYTES:
            kept[name] = finite[name]
    return {name: kept[name] for name in answers if name in kept}
