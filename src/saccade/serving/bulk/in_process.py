# SPDX-License-Identifier: Apache-2.0
"""A repository's router and its variants in this process: the code that a server would run.

Requests take the same way as in the server, decoding included, so that answers are the same bit
for bit. The router's files import one another, and the server's module, by bare names: this is for
a process of its own, one repository in its life. Of that module what the router and the backend
use is here; metrics and cancellation are nobody's, and forgotten.
"""

import importlib.util
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.serving.repository.config_text import read_config

SERVER_MODULE = "triton_python_backend_utils"
VERSION = "1"
_LOGGER = logging.getLogger("saccade.bulk")


class TritonError(Exception):
    """Error that a model sends in place of an answer: a text and the protocol's code."""

    INVALID_ARG, UNAVAILABLE = "INVALID_ARG", "UNAVAILABLE"
    INTERNAL, CANCELLED = "INTERNAL", "CANCELLED"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        super().__init__(message)
        self._code = code

    def message(self) -> str:
        """The text."""
        return str(self)

    def code(self) -> str:
        """One of the names above."""
        return self._code


class TritonModelException(Exception):
    """A model that cannot be loaded."""


class Tensor:
    """An array and its name."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        """The name."""
        return self._name

    def as_numpy(self) -> np.ndarray:
        """The array."""
        return self._array


class InferenceResponse:
    """An answer: tensors, or an error."""

    def __init__(
        self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None
    ) -> None:
        self.tensors = {tensor.name(): tensor for tensor in output_tensors}
        self._error = error

    def has_error(self) -> bool:
        """True if it is one."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error."""
        return self._error

    def reshape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Give tensors other sizes behind the batch, by name."""
        for name in shapes.keys() & self.tensors.keys():
            array = self.tensors[name].as_numpy()
            self.tensors[name] = Tensor(name, array.reshape(len(array), *shapes[name]))

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {name: tensor.as_numpy() for name, tensor in self.tensors.items()}


class Request:
    """A request as a model sees it; the answer comes by `on_answer`, from any thread."""

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
        """All inputs."""
        return [Tensor(name, array) for name, array in self._inputs.items()]

    def input(self, name: str) -> Tensor:
        """One input."""
        return Tensor(name, self._inputs[name])

    def reshape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Give inputs other sizes behind the batch, by name."""
        for name, shape in shapes.items():
            self._inputs[name] = self._inputs[name].reshape(len(self._inputs[name]), *shape)

    def requested_output_names(self) -> list[str]:
        """The outputs that are asked for."""
        return self._outputs

    def parameters(self) -> str:
        """Request parameters as JSON."""
        return self._parameters

    def request_id(self) -> str:
        """None."""
        return ""

    def timeout(self) -> int:
        """None: who asks waits."""
        return 0

    def get_response_sender(self) -> "Request":
        """By which a decoupled model answers."""
        return self

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Take the answer."""
        if response is not None and self._on_answer is not None:
            self._on_answer(response)

    def is_cancelled(self) -> bool:
        """Never."""
        return False


class _Forgotten:
    """A family of metrics, and each of its metrics: what is told to them goes nowhere."""

    COUNTER = "counter"

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def Metric(self, *_: object, **__: object) -> "_Forgotten":  # noqa: N802 - the server's name
        """A metric of the family."""
        return _Forgotten()

    def increment(self, value: float) -> None:
        """Forget it."""


class InputRefused(SaccadeError):
    """An input that the model refuses, and would refuse again."""


class InProcess:
    """The router of a repository, asked one request at a time; variants load when first called."""

    def __init__(self, repository: Path, model: str) -> None:
        self._repository = repository
        self._variants: dict[str, _Variant] = {}
        install(self._run)
        folder = repository / model / VERSION
        sys.path.insert(0, str(folder))
        module = _module("saccade_router", folder / "model.py")
        self._router = module.TritonPythonModel()
        self._router.initialize({"model_name": model})

    def ask(
        self,
        inputs: Mapping[str, np.ndarray],
        outputs: Sequence[str],
        parameters: Mapping[str, str],
    ) -> dict[str, np.ndarray]:
        """The outputs of one request, by name.

        Raises: InputRefused where the request is at fault, SaccadeError where the model is.
        """
        answers: SimpleQueue[InferenceResponse] = SimpleQueue()
        _Log.last = ""
        self._router.execute([Request(inputs, outputs, parameters, answers.put)])
        response = answers.get()
        error = response.error()
        if error is None:
            return response.arrays
        if error.code() == TritonError.INVALID_ARG:
            raise InputRefused(error.message())
        # Callers of a service are told to look into its log; here are they who may read it.
        said = f" ({_Log.last})" if _Log.last else ""
        raise SaccadeError(
            f"A request could not be answered: {error.message()}{said}. Try the model with: "
            "saccade verify ARTEFACT"
        )

    def close(self) -> None:
        """End the router's threads and close the sessions, before the process ends."""
        self._router.finalize()
        self._variants.clear()

    def _run(self, name: str, request: Request) -> InferenceResponse:
        if name not in self._variants:
            self._variants[name] = self._load(name)
        return self._variants[name].answer(request)

    def _load(self, name: str) -> "_Variant":
        from google.protobuf import json_format

        backend = resources.files("saccade.model_repository") / "onnxruntime_backend" / "model.py"
        with resources.as_file(backend) as path:
            model = _module("saccade_onnxruntime_backend", path).TritonPythonModel()
        config = json_format.MessageToDict(
            read_config(self._repository / name / "config.pbtxt"), preserving_proto_field_name=True
        )
        model.initialize(
            {
                "model_config": json.dumps(config),
                "model_instance_kind": "CPU",
                "model_repository": str(self._repository / name),
                "model_version": VERSION,
            }
        )
        return _Variant(model, config)


class _Variant:
    """A model behind the router, and what the server makes of the shapes on the way to it."""

    def __init__(self, model: Any, config: dict[str, Any]) -> None:
        self._model = model
        self._to_model = _reshaped(config["input"], "reshape")
        self._to_caller = _reshaped(config["output"], "dims")

    def answer(self, request: Request) -> InferenceResponse:
        """Its answer to a request."""
        request.reshape(self._to_model)
        response: InferenceResponse = self._model.execute([request])[0]
        response.reshape(self._to_caller)
        return response


def _reshaped(tensors: list[dict[str, Any]], to: str) -> dict[str, tuple[int, ...]]:
    """Sizes behind the batch of tensors with `reshape`: as the model, or as a caller has them."""
    return {
        tensor["name"]: tuple(
            map(int, tensor["dims"] if to == "dims" else tensor["reshape"].get("shape", ()))
        )
        for tensor in tensors
        if "reshape" in tensor
    }


def _module(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(run: Callable[[str, Request], InferenceResponse]) -> None:
    """Make it importable in this process; `run` answers what a model asks of another one."""

    class InferenceRequest:
        """A call of another model."""

        def __init__(
            self,
            model_name: str,
            inputs: Sequence[Tensor],
            requested_output_names: Sequence[str],
            **_: object,
        ) -> None:
            self._model = model_name
            arrays = {tensor.name(): tensor.as_numpy() for tensor in inputs}
            self._request = Request(arrays, requested_output_names, {})

        def exec(self) -> InferenceResponse:
            """The answer."""
            return run(self._model, self._request)

    module: Any = ModuleType(SERVER_MODULE)
    module.TritonError, module.TritonModelException = TritonError, TritonModelException
    module.Tensor, module.InferenceResponse = Tensor, InferenceResponse
    module.InferenceRequest, module.MetricFamily = InferenceRequest, _Forgotten
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    module.get_input_tensor_by_name = lambda request, name: request.input(name)
    module.get_output_tensor_by_name = lambda response, name: response.tensors.get(name)
    module.Logger = _Log
    sys.modules[SERVER_MODULE] = module


class _Log:
    """The server's log: what went wrong last is kept for who asked."""

    last = ""

    @classmethod
    def log_error(cls, text: str) -> None:
        """Keep it."""
        cls.last = text[:1000]

    @staticmethod
    def log_warn(text: str) -> None:
        """Leave it to who listens."""
        _LOGGER.debug(text)
