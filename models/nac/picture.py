# SPDX-License-Identifier: Apache-2.0
"""The circuit that answered for an image."""

from saccade.errors import SaccadeError
from saccade.models.attention_maps import Drawing, ShowRequest
from saccade.models.nac.circuit import sample_circuit
from saccade.models.nac.circuit_drawing import circuit_png


def circuit(request: ShowRequest) -> Drawing:
    """Modules, what each of them reads, and who hears whom.

    Raises: SaccadeError if another model is to be drawn beside it.
    """
    view, options = request.view, request.options
    if options.against:
        raise SaccadeError(
            f"--against {options.against}: {options.model} is a NAC, whose circuit is "
            "drawn by itself. Leave the option out."
        )
    found = request.ask(["attention", *(["link"] if "link" in view.outputs("") else [])])
    link = found["link"][0] if "link" in found else None
    grid = tuple(view.facts(found["by"])["grid"])
    drawn = sample_circuit(found["attention"][0], link, grid=grid)
    (best,) = request.client.classify([request.image], options.budget, top=1)
    title = f"{found['by']}: {best.labels[0][0]}"
    png = circuit_png(drawn, image=request.pixels, title=title)
    return Drawing(title, png, drawn.to_dict())
