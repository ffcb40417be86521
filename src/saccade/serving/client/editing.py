# SPDX-License-Identifier: Apache-2.0
"""Move, scale or remove one slot of an image and have the model draw the result."""

from dataclasses import dataclass

import numpy as np

from saccade.errors import SaccadeError
from saccade.models.slot_attention.edit import edited_state, painted
from saccade.serving.client.call_options import EditOptions
from saccade.serving.client.images import Image
from saccade.serving.client.router_view import RouterView
from saccade.serving.client.wire import Budget, Steps, array_calls, choice, image_calls, output


@dataclass(frozen=True)
class Change:
    """Change to one slot of an image.

    Units: `move` (y, x) is added to its position, in halves of the picture; `scale` multiplies
           its size.
    """

    slot: int
    move: tuple[float, float] = (0.0, 0.0)
    scale: float = 1.0
    remove: bool = False
    seed: int = 0  # draws where the slots begin, as for `segment`
    slots: int | None = None  # how many; default: as in training


def edit(image: Image, change: Change, budget: Budget | None = None) -> Steps[np.ndarray]:
    """The image with one slot moved, scaled or left out, as the model draws it.

    Shapes: -> uint8 [h w c].
    Raises: SaccadeError if there is no such slot, or the model cannot change it so.
    """
    parameters = choice(budget)
    view: RouterView = yield None
    view.require("edit", "editing")
    names = view.inputs("decode")
    drawn = {"seed": str(change.seed)}
    drawn |= {} if change.slots is None else {"slots": str(change.slots)}
    (asked,) = image_calls([image], (*names, "variant"), {**parameters, **drawn})
    first = yield asked
    state = {name: output(first, name) for name in names}
    changed = edited_state(
        state, slot=change.slot, move=change.move, scale=change.scale, remove=change.remove
    )
    (decode,) = array_calls(changed, ("reconstruction",), parameters)
    return painted(output((yield decode), "reconstruction")[0])


def change_of(options: EditOptions) -> Change:
    """The change that a command line asks for.

    Raises: SaccadeError if a move is not two numbers.
    """
    if len(options.move) != 2:
        raise SaccadeError(
            f"--move has {len(options.move)} numbers, expected two: --move 0.3,-0.1 moves down "
            "by 0.3 and left by 0.1 halves of the picture."
        )
    down, right = options.move
    return Change(
        slot=options.slot,
        move=(down, right),
        scale=options.scale,
        remove=options.remove,
        seed=options.seed,
        slots=options.slots,
    )
