# SPDX-License-Identifier: Apache-2.0
"""Scenes of one object first, of several later: words are easier to learn from simple scenes."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from saccade.models.data.shapes import scenes
from saccade.models.training.task import Task

# In a recipe's `extra`, besides `scenes` (scenes of several objects, drawn once).
MIX: dict[str, Any] = {
    "singles": 2_000,  # further scenes of one object
    "singles_first": 0.5,  # share of the steps over which their part of a batch falls from all ...
    "singles_last": 0.1,  # ... to this share
}


class SceneMix:
    """Training scenes of both kinds, and the schedule that picks them.

    Shapes: images [n s s 3] uint8; objects, a tuple of Object per scene.
    """

    def __init__(self, extra: Mapping[str, Any], side_px: int) -> None:
        several = scenes("train", extra["scenes"], side_px=side_px)
        single = scenes("train", extra["singles"], seed=1, side_px=side_px, objects=(1, 1))
        self.images = np.concatenate([several.images, single.images])
        self.objects = several.objects + single.objects
        self._extra = extra

    def rows(self, rng: np.random.Generator, count: int, passed: float) -> np.ndarray:
        """Draw the scenes of a batch after the share `passed` of all steps.

        Shapes: -> [count] int64.
        """
        extra, total = self._extra, len(self.images)
        done = min(1.0, passed / max(1e-9, extra["singles_first"]))
        share = 1 - (1 - extra["singles_last"]) * done
        return np.where(
            rng.random(count) < share,
            rng.integers(extra["scenes"], total, count),
            rng.integers(extra["scenes"], size=count),
        )


class SceneTask(Task):
    """A `training.task.Task` on scenes of shapes, validated on a fixed draw."""

    data = "shapes"

    def draw(self, side_px: int, held_out: int) -> None:
        """Draw the training scenes, and `held_out` scenes to validate on."""
        self.training = SceneMix(self.recipe.extra, side_px)
        self.validation = scenes("validation", held_out, side_px=side_px)
        self.data_sha256 = {
            "train": _sha256(self.training.images),
            "validation": _sha256(self.validation.images),
        }


def _sha256(images: np.ndarray) -> str:
    return hashlib.sha256(images.tobytes()).hexdigest()
