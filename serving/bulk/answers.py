# SPDX-License-Identifier: Apache-2.0
"""Answers as columns: the outputs to request, and the table of answers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.serving.client.answers import best_first
from saccade.serving.client.router_view import RouterView
from saccade.serving.client.wire import as_texts

Ask = Literal["classify", "embed", "caption", "segment", "answer"]
Precision = Literal["float32", "float16"]
NAMES = ("variant", "variant_sha256")
STEPS = "steps"  # how many variants ran: an output of a request with a policy, else 1
_LABELLED = ("classify", "answer")
_SEGMENTS = ("slots", "positions", "scales")


@dataclass(frozen=True)
class AnswerForm:
    """The form of the answers: the kind of answer, and its columns."""

    ask: str
    outputs: tuple[str, ...]  # requested outputs of the router
    shapes: dict[str, tuple[int, ...]]  # shapes of an answer's arrays, if all answers share them
    top: int = 3
    dtype: str = "float32"  # type of embeddings
    csv: bool = False  # whether each file is also written as CSV

    def csv_rows(self, columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
        """Return the rows of `answers_csv` for columns that include `id`."""
        rows = [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
        if self.ask in _LABELLED:
            rows = [{"id": row.pop("id"), "labels": _pairs(row), **row} for row in rows]
        return rows

    def schema(self) -> Any:
        """Return the columns of the answers."""
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
        """Return the columns of some answers, without their ids.

        Shapes: each array has one row per answer.
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
    view: RouterView,
    ask: Ask | None,
    top: int,
    dtype: Precision,
    *,
    csv: bool = False,
    by_policy: bool = False,
) -> AnswerForm:
    """Return the form of this model's answers; without `ask`, of its main kind of answer.

    Raises: SaccadeError if the model does not give this kind of answer, or `csv` has none for it.
    """
    outputs = {spec["name"]: spec["axes"] for spec in view.components[view.main_role]["outputs"]}
    able = view.tasks
    chosen: str | None = ask or next(iter(able), None)
    if chosen not in able:
        raise SaccadeError(
            f"--ask is {chosen}, but {view.model} is a model of family {view.family}, which "
            f"answers {' or '.join(able) or 'nothing in bulk'}. Leave --ask out, or choose another "
            "model."
        )
    if csv and chosen not in (*_LABELLED, "caption"):
        raise SaccadeError(
            f"--csv: found --ask {chosen}, whose answers are arrays, expected labels or captions. "
            "Drop --csv: the Parquet files contain the arrays."
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
    return AnswerForm(chosen, (*wanted, *names), known, top, dtype, csv)


def _pairs(row: dict[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(row.pop("labels"), row.pop("probabilities"), strict=True)
    return [{"label": label, "probability": share} for label, share in pairs]


def _texts(rows: np.ndarray) -> list[str]:
    return [text.decode() for text in as_texts(rows)[:, 0]]


def _best(probabilities: np.ndarray, labels: Sequence[str], top: int) -> dict[str, list[Any]]:
    order = best_first(probabilities, top)
    named = [[labels[i] if labels else str(i) for i in best] for best in order]
    return {
        "labels": named,
        "probabilities": list(np.take_along_axis(probabilities, order, axis=1)),
    }


def _fixed(axes: str) -> tuple[int, ...]:
    """Return the sizes after the batch axis if all are numbers, else an empty tuple."""
    sizes = axes.split()[1:]
    return tuple(map(int, sizes)) if all(size.isdigit() for size in sizes) else ()
