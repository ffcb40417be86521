# SPDX-License-Identifier: Apache-2.0
"""The reference and the artefact as the same kind of function: named arrays in and out."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.plugins.errors import SaccadeError, require

if TYPE_CHECKING:
    from torch import nn

Runner = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


def torch_runner(model: "nn.Module") -> Runner:
    """The model's named outputs, in the model's own type.

    Shapes: image [b h w c] uint8 -> logits [b k], probabilities [b k], embedding [b d].
    """
    torch = require("torch", extra="export")

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            outputs: dict[str, Any] = model.outputs(torch.from_numpy(inputs["image"]))  # type: ignore[operator]
        return {name: value.numpy() for name, value in outputs.items()}

    return run


def onnx_runner(session: Any) -> Runner:
    """An ONNX Runtime session as a function."""
    names = [output.name for output in session.get_outputs()]

    def run(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        try:
            return dict(zip(names, session.run(names, inputs), strict=True))
        except Exception as error:  # ONNX Runtime's own classes share no parent but this one
            shapes = {name: value.shape for name, value in inputs.items()}
            raise SaccadeError(f"ONNX Runtime cannot run the file on {shapes}: {error}") from error

    return run


def onnx_session(model: Path | str | bytes, threads: int = 1, spinning: bool = False) -> Any:
    """An ONNX Runtime session on the CPU that takes no more cores than it is given.

    Raises: SaccadeError if ONNX Runtime refuses the file, MissingPackage if it is not installed.
    """
    onnxruntime = require("onnxruntime", extra="cpu")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
    source = model if isinstance(model, bytes) else str(model)
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own classes share no parent but this one
        where = "the ONNX file" if isinstance(model, bytes) else f"{model}"
        raise SaccadeError(
            f"{where}: ONNX Runtime {onnxruntime.__version__} cannot load it ({error}). "
            "Export it again with: saccade export CHECKPOINT"
        ) from error


def run_in_batches(
    run: Runner, image: np.ndarray, batch: int, order: Iterable[int] | None = None
) -> dict[str, np.ndarray]:
    """The answers for all images, asked `batch` at a time in the given order.

    Shapes: image [n h w c] -> each output [n ...], in the order of the images.
    """
    indices = np.arange(len(image)) if order is None else np.fromiter(order, dtype=np.int64)
    answers = [
        run({"image": image[indices[start : start + batch]]})
        for start in range(0, len(indices), batch)
    ]
    back = np.argsort(indices, kind="stable")
    return {name: np.concatenate([each[name] for each in answers])[back] for name in answers[0]}
