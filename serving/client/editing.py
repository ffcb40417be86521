# SPDX-License-Identifier: Apache-2.0
"""Edits of an image: move, scale or remove one slot, and let the model draw the result."""

from dataclasses import dataclass

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.slot_attention.edit import edited_state, painted
from saccade.serving.client.call_options import EditOptions
from saccade.serving.client.images import Image
from saccade.serving.client.router_view import RouterView
from saccade.serving.client.wire import Budget, Steps, array_call, choice, image_call, output


@dataclass(frozen=True)
class Change:
    """Change to one slot of an image.

    Units: `move` (y, x) is added to the slot's position, in halves of the image; `scale`
           multiplies its size.
    """

    slot: int
    move: tuple[float, float] = (0.0, 0.0)
    scale: float = 1.0
    remove: bool = False
    seed: int = 0  # determines where the slots start, as for `segment`
    slots: int | None = None  # number of slots; default: as in training


def edit(image: Image, change: Change, budget: Budget | None = None) -> Steps[np.ndarray]:
    """Return the image with one slot moved, scaled or removed, as the model draws it.

    Shapes: -> uint8 [h w c].
    Raises: SaccadeError if there is no such slot, or the model cannot make this change.
    """
    parameters = choice(budget)
    view: RouterView = yield None
    view.require("edit", "editing")
    names = view.inputs("decode")
    drawn = {"seed": str(change.seed)}
    drawn |= {} if change.slots is None else {"slots": str(change.slots)}
    (first,) = yield image_call([image], (*names, "variant"), {**parameters, **drawn})
    state = {name: output(first, name) for name in names}
    changed = edited_state(
        state, slot=change.slot, move=change.move, scale=change.scale, remove=change.remove
    )
    (drawing,) = yield array_call(changed, ("reconstruction",), parameters)
    return painted(output(drawing, "reconstruction")[0])


def change_of(options: EditOptions) -> Change:
    """Return the change that the options describe.

    Raises: SaccadeError if a move is not two numbers, or if nothing changes.
    """
    down, right = options.move
    if not (down or right or options.remove) and options.scale == 1:
        raise SaccadeError(
            "Found no change, expected --move DOWN,RIGHT, --scale FACTOR or --remove. "
            f"To move slot {options.slot} down: --move 0.3,0"
        )
    return Change(
        slot=options.slot,
        move=(down, right),
        scale=options.scale,
        remove=options.remove,
        seed=options.seed,
        slots=options.slots,
    )
