# SPDX-License-Identifier: Apache-2.0
"""Answers to questions from features of boxes and of a grid, on generated scenes, for the recipes.

The features are pixels: those of each cell, and those of each object's bounding box, which a
detector would find, resized to as many, with the box's place.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from saccade.models.checkpoint import load, save
from saccade.models.data.scene_texts import ANSWERS, QUESTION_TOKENS, QUESTION_WORDS, questions
from saccade.models.data.shapes import Scenes, scenes
from saccade.models.families import new_model
from saccade.models.vqa.config import VQAConfig
from saccade.models.vqa.model import VQA
from saccade.models.vqa.training import answer_loss
from saccade.models.word_tokens import WordVocabulary

SIDE, CELLS, CELL, BOXES = 48, 6, 8, 4
PIXELS = 3 * CELL**2  # numbers of a cell; a box also has its corners
WORDS = WordVocabulary(QUESTION_WORDS)


def scaled(pixels: np.ndarray) -> np.ndarray:
    """Return pixels from -2 to 2."""
    return pixels.astype(np.float32) / 64 - 2


def features_of(drawn: Scenes) -> dict[str, Tensor]:
    """Return the features of the cells and of the boxes of scenes.

    Shapes: -> features [n 6 6 192], sizes [n 2], boxes [n 4 196], box_count [n].
    """
    n = len(drawn.images)
    cells = drawn.images.reshape(n, CELLS, CELL, CELLS, CELL, 3).transpose(0, 1, 3, 2, 4, 5)
    boxes = np.zeros((n, BOXES, PIXELS + 4), np.float32)
    counts = np.zeros(n, np.int64)
    for index, (image, mask) in enumerate(zip(drawn.images, drawn.masks, strict=True)):
        for own in range(1, len(drawn.objects[index]) + 1):
            rows, columns = np.nonzero(mask == own)
            if not len(rows):
                continue  # another object hides it
            corners = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            object_px = Image.fromarray(image).crop(corners)
            cut = object_px.resize((CELL, CELL), Image.Resampling.BILINEAR)
            place = np.array(corners) / SIDE
            boxes[index, counts[index]] = [*scaled(np.asarray(cut).ravel()), *place]
            counts[index] += 1
    return {
        "features": torch.from_numpy(scaled(cells.reshape(n, CELLS, CELLS, PIXELS))),
        "sizes": torch.full((n, 2), CELLS),
        "boxes": torch.from_numpy(boxes),
        "box_count": torch.from_numpy(counts),
    }


def asked(
    model: VQA, given: dict[str, Tensor], drawn: Scenes, rows: np.ndarray, rng: np.random.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the model's answer to four questions about each of some scenes, and the right ones."""
    pairs = [(row, one) for row in rows for one in questions(drawn.objects[row], rng, 4)]
    tokens = np.stack([WORDS.encode(one.text, QUESTION_TOKENS) for _, one in pairs])
    which = torch.tensor([row for row, _ in pairs])
    config = model.config
    names = ("features", "sizes") * config.has_grid + ("boxes", "box_count") * config.has_boxes
    inputs = {name: given[name][which] for name in names}
    right = torch.tensor([ANSWERS.index(one.answer) for _, one in pairs])
    return model.details(question=torch.from_numpy(tokens), **inputs), right


def answering(
    out: Path, *, seed: int, steps: int, batch: int, learning_rate: float, scenes_drawn: int,
    set: dict[str, Any],
) -> None:  # fmt: skip
    """Train a network that answers questions from features, and write its checkpoint.

    Source: Martins et al. 2021, section 3.2 and table 3.
    """
    sizes = {"grid": (CELLS, CELLS), "feature_dim": PIXELS, "boxes": BOXES}
    sizes |= {
        "box_dim": PIXELS + 4,
        "answers": len(ANSWERS),
        "question_length": QUESTION_TOKENS,
        "tokens": len(WORDS),
    }
    given = {"features": "given", "words": QUESTION_WORDS, "dropout": 0.0, "seed": seed}
    config = VQAConfig(**sizes, **given, **set)
    drawn, rng = scenes("train", scenes_drawn, side_px=SIDE), np.random.default_rng(seed)
    known, model = features_of(drawn), new_model(VQA, config).train()
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    for _ in range(steps):
        rows = rng.integers(scenes_drawn, size=batch)
        answers, right = asked(model, known, drawn, rows, rng)
        loss = answer_loss(answers["logits"], right, config.answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    sample = {"question": np.ones((1, QUESTION_TOKENS), np.int64), "labels": np.zeros(1, np.int64)}
    save(
        out, family="vqa", config=config.to_dict(), weights=model.state_dict(), preprocessing=None,
        labels=ANSWERS, calibration=sample, card={},
    )  # fmt: skip


def box_answers(path: Path, *, scenes_drawn: int) -> dict[str, float]:
    """Return the share of right answers on test scenes."""
    model: Any = load(path).build().eval()
    drawn = scenes("test", scenes_drawn, side_px=SIDE)
    with torch.inference_mode():
        every = np.arange(scenes_drawn)
        found, right = asked(model, features_of(drawn), drawn, every, np.random.default_rng(0))
    return {"accuracy": float((found["logits"].argmax(1) == right).double().mean())}
