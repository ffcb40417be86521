# SPDX-License-Identifier: Apache-2.0
"""Class labels of scenes with one object: its color and shape."""

from collections.abc import Sequence

from saccade.core.errors import SaccadeError
from saccade.models.data.shapes import COLOURS, SHAPES, Object

SCENE_LABELS = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)


def scene_label(objects: Sequence[Object]) -> int:
    """Return the class of a scene: its index in SCENE_LABELS.

    Raises: SaccadeError unless there is exactly one object.
    """
    if len(objects) != 1:
        raise SaccadeError(
            f"scene label: found {len(objects)} objects, expected exactly one. "
            "Draw scenes with objects=(1, 1)."
        )
    return SCENE_LABELS.index(f"{objects[0].colour} {objects[0].shape}")
