# SPDX-License-Identifier: Apache-2.0
"""Run a repository's router and its variants in this process, with the code of the server.

Requests are read, decoded and answered by the router's own files, but without its lanes: here they
run one after the other. The bundled server's own backend runs ONNX files on CPUs, so answers are
the same bit for bit. Plans and files on GPUs, which that backend does not run, are loaded by their
runtime as functions.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError, missing_package
from saccade.exporter.runtimes.runners import Runner, run_in_batches
from saccade.models.interface import Arrays
from saccade.serving.client.router_view import RouterView, view_of
from saccade.serving.local.server_code import ServerCode, backend_files
from saccade.serving.repository.model_config import LABELS_FILE, on_gpu, read_config
from saccade.serving.repository.preflight.repository import (
    NotChecked,
    RepositoryModel,
    open_repository,
)

SURE = 0.9  # share of its objective that a request may need: the estimate may be wrong
GOES_ON = 0.5  # share of rows that go on to the next step of a policy, as the router guesses


class InputRefused(SaccadeError):
    """Raised for an input that the model refuses, and would refuse again."""


class _Caller:
    """The caller of a request and the lane that decodes its images, which nobody else waits for."""

    def is_cancelled(self) -> bool:
        return False

    def decoded(self, *_: float) -> None:
        pass

    def step(self) -> None:
        pass


class InProcessRouter:
    """The router of a repository, for one request at a time; variants load when first called.

    `find` returns the folder of a model in front of its first call.
    """

    def __init__(self, router: Path, find: Callable[[str], RepositoryModel]) -> None:
        self._find = find
        self._variants: dict[str, _Variant] = {}
        self._backends: dict[str, Any] = {}
        self._row_s: dict[str, float] = {}  # seconds for a row in the fastest run of a model
        code = ServerCode({file.name: file for file in (router / "1").glob("*.py")})
        self._choose, self._chain = code.module("choose"), code.module("chain")
        self._refusals = (self._choose.RequestRefused, code.module("outcomes").Refused, ShapeError)
        self._code = code.module("answering")
        self._answering = self._code.Answering(router / "1")

    def ask(
        self,
        inputs: Mapping[str, np.ndarray],
        outputs: Sequence[str],
        parameters: Mapping[str, str],
    ) -> dict[str, np.ndarray]:
        """Return the outputs of one request, by name.

        Raises: InputRefused if the request is at fault, SaccadeError if the model is.
        """
        try:
            return self._answer(dict(inputs), tuple(outputs), json.dumps(dict(parameters)))
        except self._refusals as error:
            raise InputRefused(str(error)) from error

    def close(self) -> None:
        """Close the sessions before the process exits."""
        self._variants.clear()

    def _answer(
        self, inputs: dict[str, np.ndarray], outputs: tuple[str, ...], parameters: str
    ) -> dict[str, np.ndarray]:
        answering, caller = self._answering, _Caller()
        choice = answering.choice(parameters, outputs)
        role, choice = answering.component(choice, {*inputs}, outputs)
        of_caller = {"sender": caller, "deadline_s": None, "arrived_s": time.monotonic()}
        ticket = answering.ticket(choice, role, inputs, outputs, **of_caller)
        route, followed = choice.route, choice.followed
        if choice.wish:
            candidate, ticket = self._adapted(choice.wish, ticket)
            route, strict = candidate.routes[0], bool(followed and followed.strict)
            followed = candidate.policy and self._choose.Followed(candidate.policy, strict)
        if followed is None:
            return self._single(answering.on_route(ticket, route), route)
        routes = answering.chain(ticket, followed)
        if len(routes) == 1:
            return self._single(ticket._replace(policy=followed.policy.name), routes[0])
        chain = self._chain.RequestChain(ticket, followed.policy, routes, answering.family)
        return self._follow(chain, ticket, strict=followed.strict)

    def _single(self, ticket: Any, route: Any) -> dict[str, np.ndarray]:
        _, arrays = self._run(ticket, route)
        answer: dict[str, np.ndarray] = self._code.answer_of(ticket, arrays, route)
        return answer

    def _follow(self, chain: Any, ticket: Any, *, strict: bool) -> dict[str, np.ndarray]:
        inputs, unsure = ticket.inputs, chain.open
        while len(unsure):
            # A model that cannot be loaded is an error in the files: it does not go away by itself.
            self._loaded(chain.route.parts[ticket.role])
            step = ticket._replace(inputs=inputs, rows=len(unsure), wanted=chain.needed)
            try:
                inputs, arrays = self._run(step, chain.route)
            except SaccadeError:
                if chain.at == 0 or strict:
                    raise
                chain.give_up()
                break
            unsure = chain.take(arrays)
            inputs = chain.left(inputs, unsure) if len(unsure) else inputs
        answer: dict[str, np.ndarray] = chain.answer()
        return answer

    def _adapted(self, wish: Any, ticket: Any) -> tuple[Any, Any]:
        """Return who answers a request in time, and the request with what its answer says of that.

        Raises: InputRefused if nobody does.
        """
        for at, candidate in enumerate(self._choose.candidates_of(self._answering.routes, wish)):
            models = [route.parts[ticket.role] for route in candidate.routes]
            rows_s = [self._row_s.get(model, 0.0) for model in models]
            needs_s = sum(GOES_ON**step * row_s for step, row_s in enumerate(rows_s)) * ticket.rows
            if needs_s <= SURE * wish.slo_s:
                marks = SimpleNamespace(degraded=at > 0, certified=candidate.certified)
                return candidate, ticket._replace(adapted=marks)
        raise InputRefused(
            f"found no way to answer this request within {1e3 * wish.slo_s:.3g} ms; send less in "
            "one request, or allow more time"
        )

    def _run(self, ticket: Any, route: Any) -> tuple[dict[str, np.ndarray], Any]:
        """Return the inputs and outputs of a variant's run."""
        self._answering.decode(route, ticket.sender, ticket)
        ready = self._answering.ready(route, ticket)
        (arrays,) = self._answering.answers(route, ticket.role, [ready], self._call)
        return ready.inputs, arrays

    def _call(self, name: str, inputs: Arrays, outputs: Sequence[str]) -> dict[str, np.ndarray]:
        variant, began_s = self._loaded(name), time.monotonic()
        try:
            arrays = variant.answer(inputs)
        except SaccadeError:
            raise
        except Exception as error:
            raise SaccadeError(
                f"A request could not be answered: {name} failed ({error!r:.1000}). Try the model "
                "with: saccade verify ARTEFACT"
            ) from error
        row_s = (time.monotonic() - began_s) / len(next(iter(inputs.values())))
        self._row_s[name] = min(row_s, self._row_s.get(name, row_s))
        return {output: arrays[output] for output in outputs}

    def _loaded(self, name: str) -> "_Variant":
        if name not in self._variants:
            try:
                self._variants[name] = self._load(name)
            except Exception as error:
                raise _why_not_opened(name, error) from error
        return self._variants[name]

    def _load(self, name: str) -> "_Variant":
        from google.protobuf import json_format

        model = self._find(name)
        config = json_format.MessageToDict(model.parsed_config(), preserving_proto_field_name=True)
        if model.served.bundled and not on_gpu(model.config):
            return _Variant(self._backend(model, config), config)
        try:
            run = model.served.runner(model)
        except NotChecked as error:
            raise SaccadeError(f"{model.folder}: {error}. Run the command again.") from error
        return _Variant(in_parts(run, int(config["max_batch_size"])), config)

    def _backend(self, model: RepositoryModel, config: dict[str, Any]) -> Runner:
        """Return a function that runs a model with the bundled server's backend."""
        name = model.served.backend
        if name not in self._backends:
            self._backends[name] = ServerCode(backend_files(name)).module("runtime")
        variant = self._backends[name].VARIANT(config, model.version, "CPU")

        def run(inputs: Arrays) -> dict[str, np.ndarray]:
            outputs = variant.run_in_parts([inputs[name] for name in variant.inputs])
            return dict(zip(variant.outputs, outputs, strict=True))

        return run


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


def _reshaped(tensors: list[dict[str, Any]], to: str) -> dict[str, tuple[int, ...]]:
    """Return the sizes after the batch axis of tensors with `reshape`, inside or outside."""
    return {
        tensor["name"]: tuple(
            map(int, tensor["dims"] if to == "dims" else tensor["reshape"].get("shape", ()))
        )
        for tensor in tensors
        if "reshape" in tensor
    }
