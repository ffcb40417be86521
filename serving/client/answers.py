# SPDX-License-Identifier: Apache-2.0
"""Answers that the client returns: labels, captions and segmentations, each with its variant."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from saccade.serving.client.wire import output, texts

BY_POLICY = ("steps", "certified")  # outputs of a request with a policy
BY_LOAD = (*BY_POLICY, "degraded")  # outputs of a request that adapts to the load
_MARKS: dict[str, Callable[[Any], Any]] = {"steps": int, "certified": bool, "degraded": bool}


@dataclass(frozen=True)
class Classification:
    """The most probable labels of one image, best first, and the variant that answered.

    With a policy, `steps` is the number of variants that ran. `certified` is False if the next
    variant could not answer, so that the policy's certificate does not cover this answer.
    `degraded` is True if a better variant or policy answers without load; it is None if the request
    does not adapt to the load.
    """

    labels: tuple[tuple[str, float], ...]
    variant: str
    steps: int | None = None
    certified: bool | None = None
    degraded: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        labels = [{"label": label, "probability": value} for label, value in self.labels]
        return {"labels": labels, "variant": self.variant, **_marks_of(self)}


def answers_csv(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return answers as a table in CSV: UTF-8, a header, one row each.

    Labels are pairs of columns, best first: `label`, `probability`, `label_2`, `probability_2`.
    """
    flat = [dict(_cells(row)) for row in rows]
    text = io.StringIO()
    names = dict.fromkeys(name for row in flat for name in row)
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    table.writerows(flat)
    # Names of files that are not UTF-8 get their own bytes.
    return text.getvalue().encode("utf-8", "surrogateescape")


def _cells(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if name == "labels":
            for place, label in enumerate(value, 1):
                end = f"_{place}" if place > 1 else ""
                yield from ((f"{key}{end}", cell) for key, cell in label.items())
        else:
            yield name, " ".join(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Caption:
    """The caption of one image, and where the model looked for each word.

    Shapes: attention float32 [words h w].
    """

    text: str
    attention: np.ndarray
    variant: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the attention."""
        return {"caption": self.text, "steps": len(self.attention), "variant": self.variant}


@dataclass(frozen=True)
class Segmentation:
    """The slots of one image: their content, their positions, and the pixels of each.

    With a policy, `steps` and `certified` are as in a `Classification`.
    Shapes: masks float32 [k h w], which sum to 1 over the slots; slots [k d]; positions and
            scales [k 2]; reconstruction [h w c]. Each is present if the model has it.
    Units:  positions are in [-1, 1], y before x, as in the model's grid.
    """

    masks: np.ndarray
    slots: np.ndarray
    positions: np.ndarray | None
    scales: np.ndarray | None
    reconstruction: np.ndarray | None
    variant: str
    steps: int | None = None
    certified: bool | None = None

    @property
    def owners(self) -> np.ndarray:
        """Return the slot of each pixel.

        Shapes: -> uint8 [h w].
        """
        return self.masks.argmax(axis=0).astype(np.uint8)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: each slot's share of the image, position and scale."""
        counts = np.bincount(self.owners.ravel(), minlength=len(self.masks))
        slots = [
            {
                "slot": index,
                "share": float(count) / self.owners.size,
                "position": None if self.positions is None else self.positions[index].tolist(),
                "scale": None if self.scales is None else self.scales[index].tolist(),
            }
            for index, count in enumerate(counts)
        ]
        return {"slots": slots, "variant": self.variant, **_marks_of(self)}


_Answer = TypeVar("_Answer", Classification, Segmentation)


def with_marks(answers: list[_Answer], result: Any, marks: Sequence[str]) -> list[_Answer]:
    """Return answers with these of `BY_LOAD`, outputs of the same request."""
    columns = [output(result, name).reshape(-1).tolist() for name in marks]
    rows = zip(answers, *columns, strict=True)
    return [
        replace(one, **{name: _MARKS[name](mark) for name, mark in zip(marks, row, strict=True)})
        for one, *row in rows
    ]


def classifications(result: Any, marks: Sequence[str] = ()) -> list[Classification]:
    """Read the answer to a request for labels, with these of `BY_LOAD`."""
    rows = output(result, "probabilities")
    answers = [
        Classification(tuple(_label(entry) for entry in row), variant)
        for row, variant in zip(rows, texts(result, "variant"), strict=True)
    ]
    return with_marks(answers, result, marks)


def best_first(probabilities: np.ndarray, top: int) -> np.ndarray:
    """Return the indices of the largest numbers of each row; ties keep their order.

    Shapes: [n labels] -> int [n top].
    """
    return np.argsort(-probabilities, axis=1, kind="stable")[:, :top]


def ranked(
    probabilities: np.ndarray, labels: tuple[str, ...], top: int, variant: str
) -> list[Classification]:
    """Return the best labels of each row.

    Shapes: probabilities [n labels].
    """
    order = best_first(probabilities, top)
    return [
        Classification(tuple((labels[i], float(row[i])) for i in best), variant)
        for row, best in zip(probabilities, order, strict=True)
    ]


def segmentations(result: Any, names: tuple[str, ...]) -> list[Segmentation]:
    """Read the answer to a request for slots; `names` are the requested outputs."""
    arrays = {name: output(result, name) for name in names}
    answers = [
        Segmentation(
            masks=arrays["masks"][index],
            slots=arrays["slots"][index],
            positions=_row(arrays.get("positions"), index),
            scales=_row(arrays.get("scales"), index),
            reconstruction=_row(arrays.get("reconstruction"), index),
            variant=variant,
        )
        for index, variant in enumerate(texts(result, "variant"))
    ]
    return with_marks(answers, result, [name for name in BY_POLICY if name in names])


def captions(result: Any) -> list[Caption]:
    """Read the answer to a request for captions."""
    rows = zip(
        texts(result, "caption"), output(result, "attention"), texts(result, "variant"), strict=True
    )
    answers = []
    for text, attention, variant in rows:
        # After the end of a caption, the steps up to the longest caption are zeros.
        steps = int(attention.any(axis=(1, 2)).sum())
        answers.append(Caption(text, attention[:steps], variant))
    return answers


def _marks_of(answer: Classification | Segmentation) -> dict[str, Any]:
    marks = {name: getattr(answer, name, None) for name in BY_LOAD}
    return {name: mark for name, mark in marks.items() if mark is not None}


def _row(array: np.ndarray | None, index: int) -> np.ndarray | None:
    return None if array is None else array[index]


def _label(entry: bytes) -> tuple[str, float]:
    # `probability:index:label`; there is no label if the model has none.
    probability, index, *label = entry.decode().split(":", 2)
    return (label[0] if label else index), float(probability)
