# SPDX-License-Identifier: Apache-2.0
"""`saccade show`: query a model about one image, and draw where it looked."""

from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.models.attention_maps import Drawing, MapRow, ShowRequest
from saccade.models.entry import imported
from saccade.models.families import entry_of
from saccade.serving.client.call_options import ShowOptions
from saccade.serving.client.client import Client
from saccade.serving.commands.image_files import named
from saccade.serving.commands.map_picture import maps_png
from saccade.serving.commands.slot_picture import read_pixels


def looked_at(image: Path, options: ShowOptions) -> tuple[bytes, dict[str, Any]]:
    """Return a picture of what the model looked at, as PNG bytes, and the figures in it.

    Raises: SaccadeError if the image cannot be read or the model has no maps to show.
    """
    pixels = read_pixels(image)
    with Client(options.url, options.model, options.timeout_s) as client, named(image):
        view = client.view()
        first = _shown(ShowRequest(client, view, image, pixels, options))
    data = {"title": first.title, **first.figures}
    if isinstance(first, Drawing):
        return first.png, data
    rows = [first]
    if options.against:
        with Client(options.url, options.against, options.timeout_s) as other:
            view.check_family(other.view())
            second = _shown(ShowRequest(other, other.view(), image, pixels, options))
        assert isinstance(second, MapRow), "models of one family are drawn in the same way"
        rows.append(second)
        data["against"] = {"title": second.title, **second.figures}
    return maps_png(rows, pixels), data


def _shown(request: ShowRequest) -> MapRow | Drawing:
    family = request.view.family
    picture = entry_of(family).picture
    if picture is None:
        raise SaccadeError(
            f"{request.view.model} is a model of family '{family}', for which there is nothing to "
            "show. Choose another model."
        )
    shown: MapRow | Drawing = imported(picture)(request)
    return shown
