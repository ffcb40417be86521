# SPDX-License-Identifier: Apache-2.0
"""`saccade show`: ask a model about one image, outputs included that say where it looked."""

from pathlib import Path
from typing import Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.models.attention_maps import Drawing, MapRow, ShowRequest
from saccade.models.entry import imported
from saccade.models.families import entry_of
from saccade.serving.client.call_options import ShowOptions
from saccade.serving.client.client import Client
from saccade.serving.commands.map_picture import maps_png


def looked_at(image: Path, options: ShowOptions) -> tuple[bytes, dict[str, Any]]:
    """The picture of what a model looked at, as PNG bytes, and its figures.

    Raises: SaccadeError if the image cannot be read, or the model has no maps to show.
    """
    pixels = read_pixels(image)
    with Client(options.url, options.model, options.timeout_s) as client:
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
        assert isinstance(second, MapRow), "models of one family are shown in one way"
        rows.append(second)
        data["against"] = {"title": second.title, **second.figures}
    return maps_png(rows, pixels), data


def read_pixels(image: Path) -> np.ndarray:
    """The image as the picture shows it.

    Shapes: -> uint8 [h w 3].
    Raises: SaccadeError if it cannot be read.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(image) as opened:
            return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    except (OSError, ValueError) as error:
        raise SaccadeError(
            f"{image}: cannot be read as an image ({error}). Name a PNG, JPEG or WebP file."
        ) from error


def _shown(request: ShowRequest) -> MapRow | Drawing:
    family = request.view.family
    picture = entry_of(family).picture
    if picture is None:
        raise SaccadeError(
            f"{request.view.model} is a model of family '{family}', of which nothing can be "
            "shown. Name another model."
        )
    shown: MapRow | Drawing = imported(picture)(request)
    return shown
