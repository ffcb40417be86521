# SPDX-License-Identifier: Apache-2.0
"""Sample answers in a report's JSON object: text, and images as small PNG files."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from saccade.exporter.evaluation.evaluated_model import EvaluatedModel
from saccade.exporter.evaluation.examples import Example, examples_of
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.scores.results import EvaluationResult
from saccade.serving.bench.load_requests import png_files

_MOST_PX = 160  # longer side: a page has hundreds of images
_DIM = 0.22  # brightness of pixels where the model did not look
# Colors of slots, distinguishable with all common kinds of color vision (Okabe and Ito 2008).
_COLOURS = (
    (86, 180, 233), (230, 159, 0), (0, 158, 115), (240, 228, 66), (0, 114, 178),
    (213, 94, 0), (204, 121, 167), (150, 150, 150),
)  # fmt: skip


def shown_examples(
    models: Sequence[EvaluatedModel],
    asked: EvaluateOptions,
    results: Mapping[str, EvaluationResult],
) -> dict[str, Any]:
    """Return some samples with each variant's answer, and how many samples scored differently."""
    values = {model.name: results[model.name].samples for model in models}
    examples = examples_of(models, asked, values)
    stacked = np.stack(list(values.values()))
    return {
        "samples": stacked.shape[1],
        "disagreements": int(np.sum(stacked.max(0) > stacked.min(0))),
        "shown": [_example(example, values) for example in examples],
    }


def _example(example: Example, values: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {
        "index": example.index,
        "question": example.question,
        "truth": example.truth,
        "image": None if example.image is None else _png(example.image),
        "answers": {
            variant: {
                "text": answer.text,
                "confidence": answer.confidence,
                "score": round(float(scores[example.index]), 4),
                "focus": None
                if answer.focus is None or example.image is None
                else _png(focused(example.image, answer.focus)),
            }
            for (variant, scores), answer in zip(values.items(), example.answers, strict=True)
        },
    }


def focused(image: np.ndarray, focus: np.ndarray) -> np.ndarray:
    """Return the image, darkened where the model did not look; each slot has its own color.

    Shapes: image uint8 [h w c], focus [rows columns] -> uint8 [h w 3].
    """
    height, width, _ = image.shape
    rows = np.arange(height) * focus.shape[0] // height
    columns = np.arange(width) * focus.shape[1] // width
    place = focus[rows][:, columns]
    pixels = np.broadcast_to(image, (height, width, 3)).astype(np.float64)
    if np.issubdtype(place.dtype, np.integer):
        colours = np.array(_COLOURS, dtype=np.float64)[place % len(_COLOURS)]
        return np.asarray(0.35 * pixels + 0.65 * colours).round().astype(np.uint8)
    light = _DIM + (1 - _DIM) * place / max(float(place.max()), 1e-12)
    return np.asarray(pixels * light[..., None]).round().astype(np.uint8)


def _png(image: np.ndarray) -> str:
    step = -(-max(image.shape[:2]) // _MOST_PX)
    file: bytes = png_files(image[None, ::step, ::step])[0, 0]
    return base64.b64encode(file).decode()
