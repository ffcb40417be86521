# SPDX-License-Identifier: Apache-2.0
"""The reference and the artefact as the same kind of function: named arrays in and out."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saccade.errors import SaccadeError, install, require
from saccade.models.interface import Arrays, component_named

Runner = Callable[[Arrays], dict[str, np.ndarray]]
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def torch_runner(model: Any, role: str = "", outputs: Sequence[str] | None = None) -> Runner:
    """One component of a model as a function; what comes in as floats is brought to its type.

    Shapes: as the component says; `outputs` chooses, none are those always exported.
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
    """One component of a float32 model whose products are rounded to a half type, as in its file.

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
    """An ONNX Runtime session as a function."""
    names = [output.name for output in session.get_outputs()]
    wanted = [value.name for value in session.get_inputs()]

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        if missing := [name for name in wanted if name not in inputs]:
            raise SaccadeError(
                f"the ONNX file takes {missing[0]!r:.80}, and its manifest names only "
                f"{', '.join(inputs)}. Export it again with: saccade export CHECKPOINT"
            )
        given = {name: inputs[name] for name in wanted}
        try:
            return dict(zip(names, session.run(names, given), strict=True))
        except Exception as error:  # ONNX Runtime's own classes share no parent but this one
            shapes = {name: value.shape for name, value in inputs.items()}
            raise SaccadeError(f"ONNX Runtime cannot run the file on {shapes}: {error}") from error

    return run


def onnx_session(
    model: Path | str | bytes,
    threads: int = 1,
    spinning: bool = False,
    kernels: Path | None = None,
    optimized: bool = True,
    provider: str = CPU,
) -> Any:
    """An ONNX Runtime session that takes no more cores than it is given.

    With `kernels`, the library of custom ops, the ops run as kernels, else as their bodies.
    Where it is not `optimized`, each node is run as it stands in the file. `provider` computes
    what it can, such as CUDA, and the CPU the rest.

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
    if kernels is not None:
        options.register_custom_ops_library(str(kernels))
    source = model if isinstance(model, bytes) else str(model)
    if provider not in (known := onnxruntime.get_available_providers()):
        raise SaccadeError(
            f"ONNX Runtime {onnxruntime.__version__} has no {provider}, only {', '.join(known)}. "
            f"For an NVIDIA GPU install it with: {install('gpu')}"
        )
    try:
        session = onnxruntime.InferenceSession(
            source, options, providers=list(dict.fromkeys((provider, CPU)))
        )
    except Exception as error:  # ONNX Runtime's own classes share no parent but this one
        where = "the ONNX file" if isinstance(model, bytes) else f"{model}"
        raise SaccadeError(
            f"{where}: ONNX Runtime {onnxruntime.__version__} cannot load it ({error}). "
            "Export it again with: saccade export CHECKPOINT"
        ) from error
    if provider not in session.get_providers():
        # ONNX Runtime itself would go on with the processor, in silence.
        raise SaccadeError(f"ONNX Runtime could not start {provider}: look at its driver and GPU.")
    return session


def run_in_batches(
    run: Runner, inputs: Arrays, batch: int, order: Iterable[int] | None = None
) -> dict[str, np.ndarray]:
    """The answers for all samples, asked `batch` at a time in the given order.

    Shapes: inputs [n ...] -> each output [n ...], in the order of the samples.
    """
    count = len(next(iter(inputs.values())))
    indices = np.arange(count) if order is None else np.fromiter(order, dtype=np.int64)
    answers = []
    for start in range(0, count, batch):
        chosen = indices[start : start + batch]
        answers.append(run({name: array[chosen] for name, array in inputs.items()}))
    back = np.argsort(indices, kind="stable")
    return {name: np.concatenate([answer[name] for answer in answers])[back] for name in answers[0]}
