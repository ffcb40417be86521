# SPDX-License-Identifier: Apache-2.0
"""Run the reference and an artefact in the same way: as functions of named arrays."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, install, require
from saccade.core.schema import AGAIN
from saccade.models.interface import Arrays, component_named

Runner = Callable[[Arrays], dict[str, np.ndarray]]
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
# Otherwise the provider computes float32 products in TF32, with three decimal digits.
CUDA_OPTIONS = {"use_tf32": "0"}


def torch_runner(model: Any, role: str = "", outputs: Sequence[str] | None = None) -> Runner:
    """Return one component of a model as a function; float inputs are cast to the model's type.

    Shapes: as declared by the component. `outputs` selects outputs; default: the usual ones.
    """
    torch = require("torch", extra="export")
    component = component_named(model, role)
    kind = next(
        (tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()),
        torch.float32,
    )

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        given = {}
        for spec in component.inputs:
            tensor = torch.from_numpy(np.ascontiguousarray(inputs[spec.name]))
            given[spec.name] = tensor.to(kind) if tensor.is_floating_point() else tensor
        with torch.no_grad():
            answers = component.run(**given)
        return {name: answers[name].numpy() for name in outputs or component.outputs}

    return run


def half_runner(model: Any, role: str, outputs: Sequence[str], precision: str) -> Runner:
    """Return one component of a float32 model with products rounded to a half type, as in its file.

    Shapes: as `torch_runner`.
    """
    from saccade.exporter.runtimes.half_products import half_products

    run = torch_runner(model, role, outputs)
    products = half_products(model, precision, accumulate=True)

    def rounded(inputs: Arrays) -> dict[str, np.ndarray]:
        with products:
            return run(inputs)

    return rounded


def onnx_runner(session: Any) -> Runner:
    """Return an ONNX Runtime session as a function."""
    names = [output.name for output in session.get_outputs()]
    wanted = [value.name for value in session.get_inputs()]

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        if missing := [name for name in wanted if name not in inputs]:
            raise SaccadeError(
                f"the ONNX file has an input {missing[0]!r:.80}, but its manifest has only "
                f"{', '.join(inputs)}. {AGAIN}"
            )
        given = {name: inputs[name] for name in wanted}
        try:
            return dict(zip(names, session.run(names, given), strict=True))
        except Exception as error:  # the only common base of ONNX Runtime's errors
            shapes = {name: value.shape for name, value in inputs.items()}
            raise SaccadeError(f"ONNX Runtime failed on inputs {shapes}: {error}") from error

    return run


def onnx_session(
    model: Path | str | bytes,
    threads: int = 1,
    spinning: bool = False,
    kernels: Path | None = None,
    optimized: bool = True,
    provider: str = CPU,
    initializers: Mapping[str, np.ndarray] | None = None,
    in_order: bool = False,
) -> Any:
    """Create an ONNX Runtime session that uses at most `threads` cores.

    With `kernels`, the library of custom ops, the ops run as kernels, otherwise as function bodies.
    Without `optimized`, each node runs exactly as in the file. `provider` (such as CUDA) computes
    what it can, and the CPU the rest. CUDA computes float32 products in float32, not in TF32.
    `initializers` are values of weights that the model itself only refers to. With `in_order`, the
    nodes run in the order of the file.

    Raises: SaccadeError if ONNX Runtime refuses the file or lacks the provider, MissingPackage if
        it is not installed.
    """
    onnxruntime = require("onnxruntime", extra="cpu")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if in_order:
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(array)
        for name, array in (initializers or {}).items()
    }
    if values:
        options.add_external_initializers([*values], [*values.values()])
    if kernels is not None:
        options.register_custom_ops_library(str(kernels))
    source = model if isinstance(model, bytes) else str(model)
    check_provider(provider)
    if provider == CUDA:
        # The loader does not search the folders of NVIDIA's Python packages. This call prints.
        with redirect_stdout(sys.stderr):
            onnxruntime.preload_dlls()
    try:
        session = onnxruntime.InferenceSession(
            source, options, providers=[(CUDA, CUDA_OPTIONS), CPU] if provider == CUDA else [CPU]
        )
    except Exception as error:  # the only common base of ONNX Runtime's errors
        where = "the ONNX file" if isinstance(model, bytes) else f"{model}"
        raise SaccadeError(
            f"{where}: ONNX Runtime {onnxruntime.__version__} cannot load it ({error}). {AGAIN}"
        ) from error
    session.saccade_initializers = values  # it reads them where they are
    if provider not in session.get_providers():
        # ONNX Runtime itself would silently fall back to the CPU.
        raise SaccadeError(f"ONNX Runtime could not start {provider}. Check the GPU and driver.")
    return session


def check_provider(provider: str) -> None:
    """Check that the installed ONNX Runtime was built with this provider.

    Raises: SaccadeError if it was not, MissingPackage if there is none.
    """
    onnxruntime = require("onnxruntime", extra="cpu")
    if provider not in (known := onnxruntime.get_available_providers()):
        raise SaccadeError(
            f"ONNX Runtime {onnxruntime.__version__} has no {provider}, only {', '.join(known)}. "
            f"For an NVIDIA GPU, replace it: pip uninstall onnxruntime && {install('gpu')}"
        )


def batches(samples: Arrays, size: int, most: int | None = None) -> Iterator[dict[str, np.ndarray]]:
    """Yield the first samples, at most `most`, a batch at a time."""
    count = len(next(iter(samples.values())))
    for start in range(0, min(count, most or count), size):
        yield {name: array[start : start + size] for name, array in samples.items()}


def run_in_batches(
    run: Runner,
    inputs: Arrays,
    batch: int,
    order: Iterable[int] | None = None,
    done: Callable[[int], None] | None = None,
) -> dict[str, np.ndarray]:
    """Run all samples in batches of `batch`, in the given order.

    `done` is called after each batch with its number of samples.
    Shapes: inputs [n ...] -> each output [n ...], in the order of the samples.
    """
    count = len(next(iter(inputs.values())))
    indices = np.arange(count) if order is None else np.fromiter(order, dtype=np.int64)
    answers = []
    for start in range(0, count, batch):
        chosen = indices[start : start + batch]
        answers.append(run({name: array[chosen] for name, array in inputs.items()}))
        if done is not None:
            done(len(chosen))
    back = np.argsort(indices, kind="stable")
    return {name: np.concatenate([answer[name] for answer in answers])[back] for name in answers[0]}
