# SPDX-License-Identifier: Apache-2.0
"""An artefact folder that answers in this process: the client's methods, without a server."""

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.leftovers import temporary_folder
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.graph.trial import refuse_untried
from saccade.exporter.runtimes.runtime import DEFAULT
from saccade.serving.client import operations
from saccade.serving.client.answers import best_first
from saccade.serving.client.connection import refusal
from saccade.serving.client.request_sizes import UNWATCHED, Pacing, Watch
from saccade.serving.client.router_view import LANES, RouterView
from saccade.serving.client.texts import read_labelling
from saccade.serving.client.wire import Call, Steps
from saccade.serving.local.in_process import (
    InProcessRouter,
    InputRefused,
    labels_in,
    outputs_in,
    view_in,
)
from saccade.serving.repository.deploy import RepositoryPlan, plan_repository, write_component
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.repository import RepositoryModel
from saccade.serving.repository.router_folder import write_router
from saccade.serving.repository.runtimes.registry import ServedName
from saccade.serving.repository.stored_sample import Sample

_T = TypeVar("_T")
_P = ParamSpec("_P")
_NO_SAMPLE = Sample({}, {}, real=False)


def load_artefact(
    folder: ArtefactFolder | Path | str,
    *,
    runtime: ServedName = DEFAULT,
    engines: Sequence[str] = (),
    instances: Literal["cpu", "gpu"] | None = None,
    precisions: Sequence[str] = (),
    device: str | None = None,
    threads: int | None = None,
    max_images: int | None = None,
    labels: Path | str | None = None,
    templates: Path | str | None = None,
    policies: bool = True,
) -> "LoadedArtefact":
    """Open an artefact folder in this process, with the methods of `Client` and no server.

    The options are those of `saccade repository`, so answers are those of a server with the same
    options. `threads` is the number of threads of one run; by default all cores, or fewer if more
    were measured not to be faster. Without `policies`, those of the folder are not read, which
    requires SciPy. A variant is opened when a request first
    needs it, after its file was compared with its manifest and tried in a separate process.

    Raises: SaccadeError if the folder has no artefacts, or one router cannot serve all of them.
    """
    options = RepositoryOptions(
        out=Path(),
        runtime=runtime,
        engines=tuple(engines),
        instances=instances,
        precisions=tuple(precisions),
        device=device,
        threads=threads,
        max_images=max_images,
        labels=None if labels is None else Path(labels),
        templates=None if templates is None else Path(templates),
        policies=policies,
    )
    return LoadedArtefact(ArtefactFolder.open(folder), options)


def _here(operation: Callable[_P, Steps[_T]]) -> Callable[Concatenate["LoadedArtefact", _P], _T]:
    """Turn an operation into a method that answers its calls in this process."""

    def method(self: "LoadedArtefact", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self.run(operation(*args, **kwargs))

    return operations.as_method(method, operation)


class LoadedArtefact:
    """An artefact folder that answers in this process; `load_artefact` opens it.

    Threads may share it: requests run one after the other. `close`, or the end of a `with` block,
    frees the models.

    Raises: every method raises SaccadeError if the request is wrong, or a file of the folder has
        changed since its export.
    """

    def __init__(self, folder: ArtefactFolder, options: RepositoryOptions) -> None:
        self._folder, self._pacing = folder, Pacing()
        self._one_at_a_time = threading.Lock()
        labelling = read_labelling(options.labels, options.templates)
        if labelling:  # its class vectors are computed with every variant
            refuse_untried(folder, folder.manifests)
        plan = plan_repository(folder, options, labelling)
        # Requests run one after the other, so no other variant needs a core meanwhile.
        threads = {name: replace(rule, alone=True) for name, rule in plan.threads.items()}
        plan = replace(plan, threads=threads)
        with ExitStack() as stack:
            place = stack.enter_context(temporary_folder("artefact"))
            router = place / plan.router.model
            write_router(router, plan.router)
            self._view, self._labels = view_in(router), labels_in(router)
            self._outputs = outputs_in(router)
            self._router = InProcessRouter(router, partial(_component, plan, place))
            stack.callback(self._router.close)
            # It refers to nothing of this object, which may be dropped without `close`.
            self._release = weakref.finalize(self, stack.pop_all().close)

    def __enter__(self) -> "LoadedArtefact":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LoadedArtefact {self.model} in {self._folder}>"

    def close(self) -> None:
        """Free the models when the running request is answered. Later requests are refused."""
        with self._one_at_a_time:
            self._release()

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._view.model

    classify = _here(operations.classify)
    embed = _here(operations.embed)
    embed_text = _here(operations.embed_text)
    segment = _here(operations.segment)
    edit = _here(operations.edit)
    answer = _here(operations.answer)
    caption = _here(operations.caption)
    infer = _here(operations.infer)

    def run(self, steps: Steps[_T], watch: Watch = UNWATCHED) -> _T:
        """Run an operation, one of `operations`; `watch` is called on the way."""
        return operations.finished(self._pacing.requests(steps, watch), self.view, self._infer)

    def view(self) -> RouterView:
        """Return the description that the model's router gives its callers."""
        return self._view

    def _infer(self, call: Call) -> "_Answer":
        where = f"{self._folder}: {self.model}"
        if unknown := [name for name in call.outputs if name not in self._outputs]:
            known = ", ".join(name for name in self._outputs if name != LANES)
            raise refusal(where, f"unexpected output '{unknown[0]}', expected one of {known}")
        with self._one_at_a_time:
            if not self._release.alive:
                raise SaccadeError(f"{where} was closed. Open it again with load_artefact.")
            try:
                outputs = call.outputs or self._outputs
                arrays = self._router.ask(call.inputs, outputs, call.parameters)
            except InputRefused as error:
                raise refusal(where, str(error)) from error
        if call.top and "probabilities" in arrays:
            arrays["probabilities"] = _classes(arrays["probabilities"], self._labels, call.top)
        return _Answer(arrays)


def _component(plan: RepositoryPlan, place: Path, name: str) -> RepositoryModel:
    """Return the folder of a component, which refers to the artefact's own file.

    Raises: SaccadeError if the file does not match its manifest, or must not be opened.
    """
    (manifest,) = (one for one in plan.folder.manifests if one.variant.name == name)
    refuse_untried(plan.folder, [manifest])
    write_component(place / name, plan, _NO_SAMPLE, refer=True)
    return RepositoryModel(place / name, plan.options.runtime)


class _Answer:
    """The part of an answer of NVIDIA's client that operations read."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays

    def as_numpy(self, name: str) -> np.ndarray | None:
        """Return an output, or None if the answer does not have it."""
        return self._arrays.get(name)

    def get_response(self) -> Any:
        """Return an object with the names of the outputs."""
        return SimpleNamespace(outputs=[SimpleNamespace(name=name) for name in self._arrays])


def _classes(probabilities: np.ndarray, labels: Sequence[str], top: int) -> np.ndarray:
    """Return the most probable labels, in the text of the server's classification extension.

    Shapes: [b classes] -> object [b top] of bytes, `probability:index:label` each.
    """
    order = best_first(probabilities, top)
    rows = [
        [_class_text(row[index], index, labels) for index in best]
        for row, best in zip(probabilities, order.tolist(), strict=True)
    ]
    return np.array(rows, dtype=object)


def _class_text(probability: float, index: int, labels: Sequence[str]) -> bytes:
    label = f":{labels[index]}" if labels else ""
    return f"{probability:f}:{index}{label}".encode()
