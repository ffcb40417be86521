# SPDX-License-Identifier: Apache-2.0
"""Answers as columns: which outputs are asked for, and the table that comes of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from saccade.errors import SaccadeError
from saccade.models.families import entry_of
from saccade.serving.client.router_view import RouterView
from saccade.serving.client.wire import as_texts

Ask = Literal["classify", "embed", "caption", "segment", "answer"]
Precision = Literal["float32", "float16"]
NAMES = ("variant", "variant_sha256")
STEPS = "steps"  # variants that were asked: an output of a request with a policy, else 1
_LABELLED = ("classify", "answer")
_SEGMENTS = ("slots", "positions", "scales")


@dataclass(frozen=True)
class Form:
    """The form of the answers: what was asked, and how it is written down."""

    ask: str
    outputs: tuple[str, ...]  # of the router
    shapes: dict[str, tuple[int, ...]]  # of one answer's arrays, where every answer has the same
    top: int = 3
    dtype: str = "float32"  # of embeddings

    def schema(self) -> Any:
        """The columns of the answers."""
        import pyarrow as pa

        number = pa.float16() if self.dtype == "float16" else pa.float32()
        own: dict[str, list[Any]] = {
            "embed": [("embedding", self._list("embedding", number))],
            "caption": [("caption", pa.string())],
            "segment": [
                ("owners", self._list("owners", pa.uint8())),
                *(
                    (name, self._list(name, pa.float32()))
                    for name in _SEGMENTS
                    if name in self.outputs
                ),
            ],
        }
        labels = [("labels", pa.list_(pa.string())), ("probabilities", pa.list_(pa.float32()))]
        names = [("id", pa.string()), *((name, pa.string()) for name in NAMES)]
        return pa.schema([*names, (STEPS, pa.int32()), *own.get(self.ask, labels)])

    def columns(
        self, arrays: Mapping[str, np.ndarray], labels: Sequence[str]
    ) -> dict[str, list[Any]]:
        """The columns of some answers but for their ids.

        Shapes: each array has an answer as its row.
        """
        columns: dict[str, list[Any]] = {name: _texts(arrays[name]) for name in NAMES}
        steps = arrays.get(STEPS, np.ones((len(columns["variant"]), 1), np.int32))
        columns[STEPS] = steps[:, 0].tolist()
        if self.ask in _LABELLED:
            return columns | _best(arrays["probabilities"], labels, self.top)
        if self.ask == "embed":
            vectors = arrays["embedding"].astype(self.dtype)
            return columns | {"embedding": list(vectors)}
        if self.ask == "caption":
            return columns | {"caption": _texts(arrays["caption"])}
        owners = arrays["masks"].argmax(axis=1).astype(np.uint8)
        flat = {name: arrays[name] for name in _SEGMENTS if name in arrays} | {"owners": owners}
        return columns | {name: list(array.reshape(len(array), -1)) for name, array in flat.items()}

    def _list(self, name: str, kind: Any) -> Any:
        import pyarrow as pa

        shape = self.shapes.get(name)
        return pa.list_(kind, math.prod(shape)) if shape else pa.list_(kind)


def form_of(
    view: RouterView, ask: Ask | None, top: int, dtype: Precision, *, by_policy: bool = False
) -> Form:
    """The form of the answers of this model; without `ask` of what it is for.

    Raises: SaccadeError if the model does not answer that.
    """
    outputs = {spec["name"]: spec["axes"] for spec in view.components[main_role(view)]["outputs"]}
    entry = entry_of(view.family)
    classifies = "probabilities" in outputs or (view.labels and "embedding" in outputs)
    able: list[str] = [call for call in ("caption", "segment", "answer") if call in entry.calls]
    able += ["classify"] if classifies and "answer" not in able else []
    able += ["embed"] if "embedding" in outputs else []
    chosen: str | None = ask or next(iter(able), None)
    if chosen not in able:
        raise SaccadeError(
            f"--ask {chosen}: {view.model} is a model of family {view.family} that answers "
            f"{' or '.join(able) or 'nothing in bulk'}. Leave --ask out, or name another model."
        )
    wanted = {
        "embed": ("embedding",),
        "caption": ("caption",),
        "segment": ("masks", *(name for name in _SEGMENTS if name in outputs)),
    }.get(chosen, ("probabilities",))
    shapes = {name: _fixed(outputs[name]) for name in wanted if name in outputs}
    if shapes.get("masks"):
        shapes["owners"] = shapes["masks"][1:]
    known = {name: shape for name, shape in shapes.items() if shape}
    names = (*NAMES, STEPS) if by_policy else NAMES
    return Form(chosen, (*wanted, *names), known, top, dtype)


def _texts(rows: np.ndarray) -> list[str]:
    return [text.decode() for text in as_texts(rows)[:, 0]]


def _best(probabilities: np.ndarray, labels: Sequence[str], top: int) -> dict[str, list[Any]]:
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, :top]
    named = [[labels[i] if labels else str(i) for i in best] for best in order]
    return {
        "labels": named,
        "probabilities": list(np.take_along_axis(probabilities, order, axis=1)),
    }


def main_role(view: RouterView) -> str:
    """The component that takes an image, or the first."""
    return next(
        (role for role, part in view.components.items() if part["encoded"]),
        next(iter(view.components)),
    )


def _fixed(axes: str) -> tuple[int, ...]:
    """Sizes behind the batch, where all are numbers; else none."""
    sizes = axes.split()[1:]
    return tuple(map(int, sizes)) if all(size.isdigit() for size in sizes) else ()
