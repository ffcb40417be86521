# SPDX-License-Identifier: Apache-2.0
"""Run a repository's router and its variants in this process, with the code of the server.

Requests take the same path as in the server, including decoding. The bundled server's own backend
runs ONNX files on CPUs, so answers are the same bit for bit. Plans and files on GPUs, which that
backend does not run, are loaded by their runtime as functions.

This file has the part of the server's module that the router and the backend use; metrics and
cancellation do nothing.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError, missing_package
from saccade.exporter.runtimes.runners import Runner, run_in_batches
from saccade.models.interface import Arrays
from saccade.serving.client.router_view import RouterView, view_of
from saccade.serving.local.server_code import SERVER_MODULE, ServerCode, backend_files
from saccade.serving.repository.model_config import LABELS_FILE, on_gpu, read_config
from saccade.serving.repository.preflight.report import NotChecked
from saccade.serving.repository.preflight.repository import RepositoryModel, open_repository

VERSION = "1"
_LOGGER = logging.getLogger("saccade.local")


class TritonError(Exception):
    """Error that a model sends instead of an answer: a message and the protocol's code."""

    INVALID_ARG, UNAVAILABLE = "INVALID_ARG", "UNAVAILABLE"
    INTERNAL, CANCELLED = "INTERNAL", "CANCELLED"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        super().__init__(message)
        self._code = code

    def message(self) -> str:
        """Return the message."""
        return str(self)

    def code(self) -> str:
        """Return the code, one of the names above."""
        return self._code


class TritonModelException(Exception):
    """Raised by a model that cannot be loaded."""


class Tensor:
    """An array and its name."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        """Return the name."""
        return self._name

    def shape(self) -> list[int]:
        """Return the sizes of the axes."""
        return list(self._array.shape)

    def as_numpy(self) -> np.ndarray:
        """Return the array."""
        return self._array


class InferenceResponse:
    """An answer: tensors, or an error."""

    def __init__(
        self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None
    ) -> None:
        self.tensors = {tensor.name(): tensor for tensor in output_tensors}
        self._error = error

    def has_error(self) -> bool:
        """Return whether the answer is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {name: tensor.as_numpy() for name, tensor in self.tensors.items()}


class Request:
    """A request as a model sees it. `on_answer` is called with the answer, from any thread."""

    def __init__(
        self,
        inputs: Mapping[str, np.ndarray],
        outputs: Sequence[str],
        parameters: Mapping[str, str],
        on_answer: Callable[[InferenceResponse], None] | None = None,
    ) -> None:
        self._inputs, self._outputs = dict(inputs), list(outputs)
        self._parameters, self._on_answer = json.dumps(dict(parameters)), on_answer

    def inputs(self) -> list[Tensor]:
        """Return all inputs."""
        return [Tensor(name, array) for name, array in self._inputs.items()]

    def requested_output_names(self) -> list[str]:
        """Return the names of the requested outputs."""
        return self._outputs

    def parameters(self) -> str:
        """Return the request's parameters as JSON."""
        return self._parameters

    def request_id(self) -> str:
        """Return an empty id."""
        return ""

    def timeout(self) -> int:
        """Return 0: the caller waits without a limit."""
        return 0

    def get_response_sender(self) -> "Request":
        """Return the object with which a decoupled model sends its answer."""
        return self

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Receive the answer."""
        if response is not None and self._on_answer is not None:
            self._on_answer(response)

    def is_cancelled(self) -> bool:
        """Return False: requests are never cancelled."""
        return False


class _Forgotten:
    """A family of metrics, and each of its metrics; values are discarded."""

    COUNTER = "counter"

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def Metric(self, *_: object, **__: object) -> "_Forgotten":  # noqa: N802 - the server's name
        """Return a metric of the family."""
        return _Forgotten()

    def increment(self, value: float) -> None:
        """Discard the value."""


class InputRefused(SaccadeError):
    """Raised for an input that the model refuses, and would refuse again."""


class InProcessRouter:
    """The router of a repository, for one request at a time; variants load when first called.

    `find` returns the folder of a model in front of its first call.
    """

    def __init__(self, router: Path, find: Callable[[str], RepositoryModel]) -> None:
        self._find = find
        self._variants: dict[str, _Variant] = {}
        self._error: SaccadeError | None = None  # a variant's error in the last request
        self._unloaded: SaccadeError | None = None  # why a variant of the last request did not load
        self._log, self._name = _Log(), router.name
        folder = router / VERSION
        self._code = ServerCode(folder, server_module(self._run, self._log))
        self._router = self._code.module("model").TritonPythonModel()
        with _settings_kept():
            self._router.initialize({"model_name": router.name})

    def ask(
        self,
        inputs: Mapping[str, np.ndarray],
        outputs: Sequence[str],
        parameters: Mapping[str, str],
    ) -> dict[str, np.ndarray]:
        """Return the outputs of one request, by name.

        Raises: InputRefused if the request is at fault, SaccadeError if the model is.
        """
        answers: SimpleQueue[InferenceResponse] = SimpleQueue()
        self._log.last, self._error, self._unloaded = "", None, None
        request = Request(inputs, outputs, parameters, answers.put)
        (refusal,) = self._router.execute([request])
        response = answers.get() if refusal is None else refusal
        if self._unloaded is not None:
            # With a policy, the router answers with the previous variant. But here a model that
            # cannot be loaded is an error in the files, which does not go away by itself.
            raise self._unloaded
        error = response.error()
        if error is None:
            return response.arrays
        if isinstance(self._error, ShapeError):
            raise InputRefused(str(self._error)) from self._error
        if self._error is not None:
            raise self._error
        if error.code() == TritonError.INVALID_ARG:
            raise InputRefused(error.message())
        # A service refers its callers to its log; here the caller may read the log itself.
        said = f" ({self._log.last})" if self._log.last else ""
        raise SaccadeError(
            f"A request could not be answered: {error.message()}{said}. Try the model with: "
            "saccade verify ARTEFACT"
        )

    def close(self) -> None:
        """Stop the router's threads and close the sessions before the process exits."""
        self._router.finalize()
        self._variants.clear()

    def _run(self, name: str, inputs: Arrays, outputs: Sequence[str]) -> InferenceResponse:
        if name == self._name:
            return InferenceResponse()  # a probe of the server's queue, which is not here
        try:
            if name not in self._variants:
                self._variants[name] = self._opened(name)
            arrays = self._variants[name].answer(inputs)
        except SaccadeError as error:
            self._error = error  # it has more details than the router's error
            return InferenceResponse(error=TritonError(str(error)))
        except Exception as error:
            self._log.log_error(f"{name}: a request failed: {error!r}")
            return InferenceResponse(error=TritonError(f"'{name}' could not run this request"))
        return InferenceResponse([Tensor(wanted, arrays[wanted]) for wanted in outputs])

    def _opened(self, name: str) -> "_Variant":
        try:
            return self._load(name)
        except Exception as error:
            self._unloaded = _why_not_opened(name, error)
            raise self._unloaded from error

    def _load(self, name: str) -> "_Variant":
        from google.protobuf import json_format

        model = self._find(name)
        config = json_format.MessageToDict(model.parsed_config(), preserving_proto_field_name=True)
        if model.served.bundled and not on_gpu(model.config):
            return _Variant(_backend(self._code, model, config), config)
        try:
            run = model.served.runner(model)
        except NotChecked as error:
            raise SaccadeError(f"{model.folder}: {error}. Run the command again.") from error
        return _Variant(in_parts(run, int(config["max_batch_size"])), config)


def in_parts(run: Runner, most_rows: int) -> Runner:
    """Return a runner that takes any number of rows: the router's caption search may send more."""
    return lambda inputs: run_in_batches(run, inputs, most_rows)


class _Variant:
    """A model that the router calls, with the changes of shape that the server makes."""

    def __init__(self, run: Runner, config: dict[str, Any]) -> None:
        self._run = run
        self._to_model = _reshaped(config["input"], "reshape")
        self._to_caller = _reshaped(config["output"], "dims")

    def answer(self, inputs: Arrays) -> Arrays:
        """Return the model's outputs."""
        return _with_shapes(self._run(_with_shapes(inputs, self._to_model)), self._to_caller)


def _with_shapes(arrays: Arrays, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Give arrays new sizes after the batch axis, by name."""
    return {
        name: array.reshape(len(array), *shapes[name]) if name in shapes else array
        for name, array in arrays.items()
    }


@contextmanager
def _settings_kept() -> Iterator[None]:
    """Keep settings of the process that a router changes, since in a server it has its own."""
    from PIL import Image

    most_pixels, interval = Image.MAX_IMAGE_PIXELS, sys.getswitchinterval()
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = most_pixels
        sys.setswitchinterval(interval)


def _why_not_opened(name: str, error: Exception) -> SaccadeError:
    if isinstance(error, SaccadeError):
        return error
    return missing_package(error) or SaccadeError(
        f"{name}: cannot be opened ({error!r:.300}). Check the file with: saccade verify ARTEFACT"
    )


def models_of(repository: Path) -> Callable[[str], RepositoryModel]:
    """Return the function that finds a model's folder in a repository by name."""

    def find(name: str) -> RepositoryModel:
        (model,) = (one for one in open_repository(repository).models if one.name == name)
        return model

    return find


def view_in(router: Path) -> RouterView:
    """Return the description that a router in this folder gives its callers."""
    config = read_config(router / "config.pbtxt")
    return view_of(SimpleNamespace(config=config), router.name)


def outputs_in(router: Path) -> tuple[str, ...]:
    """Return the names of all outputs that a request may ask a router for."""
    return tuple(output.name for output in read_config(router / "config.pbtxt").output)


def labels_in(router: Path) -> tuple[str, ...]:
    """Return the labels of a router's answers; empty if it has none."""
    path = router / LABELS_FILE
    return tuple(path.read_text("utf-8").splitlines()) if path.exists() else ()


def _backend(code: ServerCode, model: RepositoryModel, config: dict[str, Any]) -> Runner:
    """Return a function that runs a model with the bundled server's backend."""
    name = model.served.backend
    files = backend_files(name)
    with ExitStack() as stack:
        for module, file in (
            ("backend_model", "backend_model.py"), (f"saccade_{name}_backend", "model.py")
        ):  # fmt: skip
            path = stack.enter_context(resources.as_file(files[file]))
            loaded = code.module(module, path)
    backend = loaded.TritonPythonModel()
    backend.initialize(
        {
            "model_config": json.dumps(config),
            "model_instance_kind": "CPU",
            "model_repository": str(model.folder),
            "model_version": VERSION,
        }
    )

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        outputs = backend.run_in_parts([inputs[name] for name in backend.inputs])
        return dict(zip(backend.outputs, outputs, strict=True))

    return run


def _reshaped(tensors: list[dict[str, Any]], to: str) -> dict[str, tuple[int, ...]]:
    """Return the sizes after the batch axis of tensors with `reshape`, inside or outside."""
    return {
        tensor["name"]: tuple(
            map(int, tensor["dims"] if to == "dims" else tensor["reshape"].get("shape", ()))
        )
        for tensor in tensors
        if "reshape" in tensor
    }


def server_module(
    run: Callable[[str, Arrays, Sequence[str]], InferenceResponse], log: "_Log"
) -> ModuleType:
    """Return the server's module; `run` answers a model's calls of another model."""

    class InferenceRequest:
        """A call of another model by a model."""

        def __init__(
            self,
            model_name: str,
            inputs: Sequence[Tensor],
            requested_output_names: Sequence[str],
            **_: object,
        ) -> None:
            self._model, self._outputs = model_name, requested_output_names
            self._inputs = {tensor.name(): tensor.as_numpy() for tensor in inputs}

        def exec(self) -> InferenceResponse:
            """Return the answer."""
            return run(self._model, self._inputs, self._outputs)

    module: Any = ModuleType(SERVER_MODULE)
    module.TritonError, module.TritonModelException = TritonError, TritonModelException
    module.Tensor, module.InferenceResponse = Tensor, InferenceResponse
    module.InferenceRequest, module.MetricFamily = InferenceRequest, _Forgotten
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    module.get_output_tensor_by_name = lambda response, name: response.tensors.get(name)
    module.Logger = log
    made: ModuleType = module
    return made


class _Log:
    """The server's log; the last error is kept for the caller."""

    def __init__(self) -> None:
        self.last = ""

    def log_error(self, text: str) -> None:
        """Keep an error."""
        self.last = text[:1000]

    def log_warn(self, text: str) -> None:
        """Pass a warning to Python's logging."""
        _LOGGER.debug(text)
