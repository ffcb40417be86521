# SPDX-License-Identifier: Apache-2.0
"""A board to drag the slots of an image or move them by sliders, and the model's drawing."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from nicegui import ui

from saccade.core.errors import SaccadeError
from saccade.serving.client.answers import Segmentation
from saccade.serving.client.client import Change
from saccade.serving.commands.explore.explorer import Explorer, ExploreRequest, data_url
from saccade.serving.commands.pictures import COLOURS, image_png, read_pixels

SIDE_PX = 320  # minimum side of the picture on which slots are dragged
_LEAST = 0.02  # share of the picture: a shorter drag is a click


class SlotBoard:
    """Card with the image, its slots, and the image as changed."""

    def __init__(self, explorer: Explorer, told: Callable[[], AbstractContextManager[None]]):
        self._explorer, self._told = explorer, told
        self._request: ExploreRequest | None = None
        self._found: Segmentation | None = None
        self._from: tuple[float, float] | None = None
        self._filling = False  # while a drag sets the sliders, they send no requests
        with ui.card().classes("w-full gap-2 p-4") as self._card:
            ui.label("Move a slot").classes("text-lg font-medium")
            ui.label("Drag a slot in the left image. The model draws the right one.").classes(
                "text-sm opacity-70"
            )
            with ui.element("div").classes("grid grid-cols-1 sm:grid-cols-2 gap-4 w-full"):
                self._image = ui.interactive_image(
                    on_mouse=self._dragged, events=["mousedown", "mouseup"]
                ).classes("w-full cursor-grab explore-pixels")
                self._image.props('alt="the image, one color per slot"')
                self._drawn = ui.image().classes("w-full explore-pixels")
                self._drawn.props('alt="the image with the slot changed" fit=contain')
            self._draw_controls()
        self._card.set_visibility(False)

    def _draw_controls(self) -> None:
        with ui.row().classes("w-full items-center gap-4"):
            self._slot = ui.toggle([0], value=0, on_change=self._changed).props("dense")
            self._remove = ui.switch("remove it", on_change=self._changed)
            ui.button("start again", on_click=self._reset).props("flat dense")
        self._down = self._slider("down", -1, 1, 0)
        self._right = self._slider("right", -1, 1, 0)
        self._scale = self._slider("size", 0.3, 3, 1)

    def _slider(self, name: str, low: float, high: float, value: float) -> Any:
        with ui.row().classes("w-full items-center no-wrap gap-2"):
            ui.label(name).classes("w-12 text-sm")
            slider = ui.slider(min=low, max=high, step=0.05, value=value).classes("grow px-2")
            slider.props(f'aria-label="{name}"').on("change", self._changed)
            ui.label().classes("w-12 text-right text-sm").bind_text_from(
                slider, "value", lambda shown: f"{shown:.2f}"
            )
        return slider

    def clear(self) -> None:
        """Forget the image and the change made to it."""
        self._found = self._request = None
        self._card.set_visibility(False)

    async def show(self, request: ExploreRequest) -> None:
        """Show the slots of this image at this budget.

        Raises: SaccadeError if the server refuses.
        """
        found = await asyncio.to_thread(self._explorer.segment, request)
        is_new = self._request is None or self._request.image != request.image
        self._request, self._found = request, found
        self._slot.set_options(list(range(len(found.masks))))
        self._image.set_source(_overlay(request, found))
        self._image.set_content(_numbers(found, SIDE_PX))
        self._card.set_visibility(True)
        if is_new:
            await self._reset()
        else:
            await self._changed()

    async def _reset(self) -> None:
        self._set(down=0, right=0, scale=1)
        self._remove.set_value(False)
        await self._changed()

    def _set(self, **values: float) -> None:
        self._filling = True
        try:
            for name, value in values.items():
                getattr(self, f"_{name}").set_value(value)
        finally:
            self._filling = False

    async def _dragged(self, event: Any) -> None:
        if self._found is None:
            return
        height, width = self._found.masks.shape[1:]
        scale = _scale_of(self._found)
        x, y = event.image_x / (width * scale), event.image_y / (height * scale)
        if event.type == "mousedown":
            self._from = (y, x)
            row, column = (
                min(int(fraction * size), size - 1) for fraction, size in ((y, height), (x, width))
            )
            self._slot.set_value(int(self._found.owners[max(row, 0), max(column, 0)]))
            return
        begun, self._from = self._from, None
        if begun is None or max(abs(y - begun[0]), abs(x - begun[1])) < _LEAST:
            return
        # Positions range from -1 to 1, so the whole picture is 2 wide.
        self._set(down=round(2 * (y - begun[0]), 2), right=round(2 * (x - begun[1]), 2))
        await self._changed()

    async def _changed(self) -> None:
        if self._request is None or self._filling:
            return
        change = Change(
            slot=int(self._slot.value or 0),
            move=(float(self._down.value), float(self._right.value)),
            scale=float(self._scale.value),
            remove=bool(self._remove.value),
            seed=self._request.seed,
        )
        request = self._request
        try:
            drawn = await asyncio.to_thread(self._explorer.edit, request, change)
        except SaccadeError as error:
            ui.notify(str(error), type="warning", multi_line=True, close_button="close")
            return
        if request is self._request:
            self._drawn.set_source(data_url(drawn))


def _overlay(request: ExploreRequest, found: Segmentation) -> str:
    """Draw the image under the colors of its slots; return the URL of a PNG."""
    from PIL import Image

    height, width = found.masks.shape[1:]
    scale = _scale_of(found)
    image = Image.fromarray(read_pixels(request.image)).resize(
        (width * scale, height * scale), Image.Resampling.NEAREST
    )
    owners = np.kron(found.owners, np.ones((scale, scale), np.uint8))
    colours = np.array([COLOURS[slot % len(COLOURS)] for slot in range(len(found.masks))])
    mixed = 0.6 * np.asarray(image, np.float64) + 0.4 * colours[owners]
    return data_url(image_png(mixed.astype(np.uint8)))


def _numbers(found: Segmentation, side: int) -> str:
    """Draw a number in the middle of each slot, as SVG over the image."""
    scale = _scale_of(found)
    texts = []
    for slot in range(len(found.masks)):
        if not (owned := found.owners == slot).any():
            continue
        row, column = _innermost(owned)
        x, y = (column + 0.5) * scale, (row + 0.5) * scale
        texts.append(
            f'<text x="{x:.0f}" y="{y:.0f}" fill="white" stroke="black" stroke-width="3" '
            f'paint-order="stroke" font-size="{side // 14}" text-anchor="middle" '
            f'dominant-baseline="central">{slot}</text>'
        )
    return "".join(texts)


def _innermost(owned: np.ndarray) -> tuple[int, int]:
    """Return a pixel far from the edge of a region; its center may be outside of it.

    Shapes: bool [h w].
    """
    while True:
        inner = np.pad(owned, 1)
        inner = inner[:-2] & inner[1:-1] & inner[2:]
        inner = inner[:, :-2] & inner[:, 1:-1] & inner[:, 2:]
        if not inner.any():
            row, column = np.argwhere(owned)[owned.sum() // 2]
            return int(row), int(column)
        owned = inner


def _scale_of(found: Segmentation) -> int:
    return max(1, -(-SIDE_PX // min(found.masks.shape[1:])))
