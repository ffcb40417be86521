# SPDX-License-Identifier: Apache-2.0
"""Layout and events of the page: from image and budget to answers, pictures and the frontier."""

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakSet

from nicegui import app, ui

from saccade.core.errors import SaccadeError
from saccade.serving.commands.explore.explorer import (
    MAX_BYTES,
    BudgetReply,
    Explorer,
    ExploreRequest,
    ExploreServer,
    data_url,
)
from saccade.serving.commands.explore.frontier_chart import chart
from saccade.serving.commands.explore.slot_board import SlotBoard

LOGGER = logging.getLogger("saccade.explore")
_NO_IMAGE = "Drop an image to start, or choose an example."
_CARD = "w-full gap-2 p-4"
_COLUMNS = [
    {"name": name, "label": label, "field": name, "align": align}
    for name, label, align in (
        ("budget", "budget", "left"), ("best", "answer", "left"),
        ("share", "confidence", "right"), ("ms", "latency, ms", "right"),
    )
]  # fmt: skip
# Styles that the page needs in addition to the library's.
_STYLE = """
.q-uploader { width: 100%; }
.q-uploader__list, .q-uploader__subtitle { display: none; }
.q-uploader__header-content { min-height: 5rem; }
.explore-picture { min-width: 34rem; }
.explore-scroll { overflow-x: auto; width: 100%; }
.explore-pixels img, .explore-pixels { image-rendering: pixelated; }
"""


def register(place: ExploreServer, timeout_s: float | None) -> None:
    """Serve the page for these models at /."""

    pages: WeakSet[Page] = WeakSet()

    @ui.page("/")
    def page() -> None:
        ui.add_css(_STYLE)
        pages.add(Page(place, timeout_s))

    def cut_calls() -> None:
        for each in pages:
            each.close()

    app.on_shutdown(cut_calls)  # otherwise the end would wait for them


class Page:
    """The page of one browser tab."""

    def __init__(self, place: ExploreServer, timeout_s: float | None) -> None:
        self._place, self._timeout_s, self._measured = place, timeout_s, place.frontier
        self._request: ExploreRequest | None = None
        self._turn = 0  # a later request makes the answer to an earlier one stale
        self._explorer: Explorer | None = None
        with ui.column().classes("w-full max-w-6xl mx-auto p-2 md:p-4 gap-4"):
            with ui.row().classes("w-full items-center gap-4"):
                ui.label("saccade explore").classes("text-xl font-semibold").props("role=heading")
                if len(place.models) > 1:
                    ui.select(
                        list(place.models), value=place.models[0], label="model",
                        on_change=lambda event: self._choose_model(event.value),
                    ).props("dense outlined")  # fmt: skip
                else:
                    ui.label(place.models[0]).classes("text-lg")
                ui.space()
                ui.label(f"server {place.url}").classes("text-sm opacity-70")
            self._body = ui.element("div").classes("w-full")
        ui.context.client.on_delete(self.close)
        self._choose_model(place.models[0])

    def _choose_model(self, model: str) -> None:
        self.close()
        self._turn += 1
        self._request = None
        self._body.clear()
        with self._body:
            try:
                self._explorer = Explorer(self._place.url, model, self._timeout_s)
            except SaccadeError as error:
                _alert(ui.column().classes("w-full"), str(error))
                return
            grid = ui.element("div").classes("grid grid-cols-1 md:grid-cols-3 gap-4 w-full")
            with grid.props(f'data-model="{model}"'):
                with ui.column().classes("gap-4 min-w-0"):
                    self._draw_inputs(self._explorer)
                with ui.column().classes("md:col-span-2 gap-4 min-w-0"):
                    self._draw_outputs(self._explorer)

    def close(self) -> None:
        """Cut the calls that run, and the connection."""
        if self._explorer is not None:
            self._explorer.close()
            self._explorer = None

    def _draw_inputs(self, explorer: Explorer) -> None:
        with ui.card().classes(_CARD):
            upload = ui.upload(
                label="Drop an image here, or press +", auto_upload=True, max_file_size=MAX_BYTES,
                on_upload=self._uploaded, on_rejected=self._rejected,
            ).props('accept="image/*,.png,.jpg,.jpeg,.webp" flat bordered')  # fmt: skip
            upload.on("failed", self._rejected)
            self._upload = upload
            self._preview = ui.image().classes("w-full rounded explore-pixels")
            self._preview.props('alt="the image that is sent" fit=contain')
            self._preview.style("max-height: 18rem").set_visibility(False)
            self._name = ui.label().classes("text-sm opacity-70 break-all")
            self._draw_examples()
        with ui.card().classes(_CARD):
            self._draw_text(explorer)
            self._draw_budget(explorer)

    def _draw_examples(self) -> None:
        if not self._place.examples:
            return
        ui.label("Examples from the checkpoint").classes("text-sm opacity-70")
        with ui.row().classes("gap-2"):
            for number, image in enumerate(self._place.examples, start=1):
                name = f"example {number}"

                async def choose(image: bytes = image, name: str = name) -> None:
                    await self._take(image, name)

                with ui.button(on_click=choose).props(f'flat dense aria-label="{name}"'):
                    ui.image(data_url(image)).classes("w-12 h-12 rounded explore-pixels")

    def _draw_text(self, explorer: Explorer) -> None:
        self._text = None
        if not (explorer.asks_question or explorer.takes_labels):
            return
        label = "question" if explorer.asks_question else "labels, separated by commas"
        self._text = ui.input(label, on_change=self._changed).classes("w-full")
        self._text.props("outlined clearable debounce=500")
        if explorer.words:
            known = "  ".join(sorted(explorer.words))
            with (
                ui.expansion("words that the model knows").classes("w-full text-sm").props("dense")
            ):
                ui.label(known).classes("break-words")

    def _draw_budget(self, explorer: Explorer) -> None:
        budgets = [explorer.title(budget) for budget in explorer.budgets]
        only = "" if len(budgets) > 1 else ", the only one"
        self._budget = ui.label(f"budget {budgets[-1]}{only}").classes("font-medium")
        marks = json.dumps(dict(enumerate(budgets)))
        self._slider = ui.slider(
            min=0, max=max(1, len(budgets) - 1), step=1, value=len(budgets) - 1
        )
        self._slider.props(f"markers snap :marker-labels='{marks}' aria-label=budget")
        self._slider.classes("px-3 pb-4").set_visibility(len(budgets) > 1)
        self._slider.on("change", self._changed)
        self._slider.on_value_change(
            lambda event: self._budget.set_text(f"budget {budgets[int(event.value)]}")
        )

    def _draw_outputs(self, explorer: Explorer) -> None:
        self._alerts = ui.column().classes("w-full empty:hidden")
        with ui.card().classes(_CARD):
            with ui.row().classes("w-full items-center"):
                ui.label("Answer").classes("text-lg font-medium")
                self._busy = ui.spinner(size="1.2em")
                self._busy.set_visibility(False)
            self._answer = ui.column().classes("w-full gap-1")
            with self._answer:
                ui.label(_NO_IMAGE).classes("opacity-70")
        with ui.card().classes(_CARD) as self._looked_card:
            ui.label("What the model looked at").classes("text-lg font-medium")
            self._looked = ui.column().classes("explore-scroll")
        self._board = SlotBoard(explorer, self._told) if explorer.edits_slots else None
        with ui.card().classes(_CARD) as self._budgets_card:
            ui.label("The same image at every budget").classes("text-lg font-medium")
            self._table = ui.table(columns=_COLUMNS, rows=[], row_key="budget").classes("w-full")
            self._table.props("flat dense hide-bottom")
            self._every = ui.expansion("what it looked at, at every budget").classes("w-full")
            self._every.on_value_change(self._opened)
        for card in (self._looked_card, self._budgets_card):
            card.set_visibility(False)
        self._frontier: Any = None
        if self._measured:
            with ui.card().classes(_CARD):
                ui.label("Score against latency").classes("text-lg font-medium")
                self._frontier = ui.echart(chart(self._measured, "")).classes("w-full h-80")

    async def _uploaded(self, event: Any) -> None:
        data, name = await event.file.read(), event.file.name
        self._upload.reset()
        await self._take(data, name)

    def _rejected(self) -> None:
        self._upload.reset()
        _alert(
            self._alerts,
            f"The file was rejected. Expected one PNG, JPEG or WebP image of at most "
            f"{MAX_BYTES >> 20} MiB.",
        )

    async def _take(self, data: bytes, name: str) -> None:
        self._request = ExploreRequest(data, "")
        self._name.set_text(name)
        if self._board:
            self._board.clear()
        await self._changed()

    @cached_property
    def _kept(self) -> dict[ExploreRequest, list[BudgetReply]]:
        """Answers at every budget for the latest image and text."""
        return {}

    async def _changed(self) -> None:
        """Send the image again, with the current settings of the page."""
        explorer = self._explorer
        if self._request is None or explorer is None:
            return
        budget = explorer.budgets[int(self._slider.value)]
        text = (self._text.value or "") if self._text else ""
        self._request = request = replace(self._request, budget=budget, text=text)
        self._turn += 1
        turn = self._turn
        self._alerts.clear()
        if missing := explorer.missing(text):
            self._answer.clear()
            with self._answer:
                ui.label(missing).classes("opacity-70")
            self._show_preview(request)
            return
        self._busy.set_visibility(True)
        with self._told():
            reply = await asyncio.to_thread(explorer.answer, request)
            if turn == self._turn:
                self._show_preview(request)
                self._show_answer(reply)
            await self._show_more(explorer, request, turn)
        if turn == self._turn:
            self._busy.set_visibility(False)

    async def _show_more(self, explorer: Explorer, request: ExploreRequest, turn: int) -> None:
        if self._board and turn == self._turn:
            await self._board.show(request)
        every = replace(request, budget="")
        if every not in self._kept and turn == self._turn:
            replies = await asyncio.to_thread(explorer.at_every_budget, request)
            self._kept.clear()
            self._kept[every] = replies
            self._every.set_value(False)
        if turn == self._turn:
            self._show_table(explorer, self._kept[every], request.budget)
        await self._show_picture(explorer, request, turn)  # the slowest of them

    async def _show_picture(self, explorer: Explorer, request: ExploreRequest, turn: int) -> None:
        try:
            picture = await asyncio.to_thread(explorer.picture, request)
        except SaccadeError as error:
            picture, reason = b"", str(error)
        if turn != self._turn:
            return
        self._looked_card.set_visibility(True)
        self._looked.clear()
        with self._looked:
            if picture:
                _picture(picture, "what the model looked at")
            else:
                ui.label(reason).classes("opacity-70 break-words")

    async def _opened(self, event: Any) -> None:
        explorer, request, turn = self._explorer, self._request, self._turn
        self._every.clear()
        if not event.value or explorer is None or request is None:
            return
        for budget in explorer.budgets:
            with self._told():
                asked = replace(request, budget=budget)
                picture = await asyncio.to_thread(explorer.picture, asked)
                if turn != self._turn:
                    return
                with self._every, ui.column().classes("explore-scroll"):
                    ui.label(f"budget {explorer.title(budget)}").classes("font-medium")
                    _picture(picture, f"what the model looked at with budget {budget}")

    def _show_preview(self, request: ExploreRequest) -> None:
        self._preview.set_source(data_url(request.image))
        self._preview.set_visibility(True)

    def _show_answer(self, reply: BudgetReply) -> None:
        self._answer.clear()
        with self._answer:
            for text, share in reply.lines:
                if share is None:
                    ui.label(text).classes("text-lg break-words")
                    continue
                with ui.row().classes("w-full items-center no-wrap gap-2"):
                    ui.label(text).classes("w-32 truncate").tooltip(text)
                    bar = ui.linear_progress(share, show_value=False, size="0.8em")
                    bar.classes("grow").props("aria-hidden=true rounded")
                    ui.label(f"{100 * share:.1f} %").classes("w-16 text-right whitespace-nowrap")
            ui.label(f"{reply.variant} in {reply.latency_ms:.1f} ms").classes("text-sm opacity-70")
        if self._frontier is not None and self._measured is not None:
            self._frontier.options.clear()
            self._frontier.options.update(chart(self._measured, reply.variant))
            self._frontier.update()

    def _show_table(self, explorer: Explorer, replies: list[BudgetReply], budget: str) -> None:
        self._budgets_card.set_visibility(len(replies) > 1)
        sure = any(reply.confidence is not None for reply in replies)
        self._table.columns = [one for one in _COLUMNS if sure or one["name"] != "share"]
        self._table.rows = [
            {
                "budget": explorer.title(reply.budget) + ("  ◂" if reply.budget == budget else ""),
                "best": reply.best,
                "share": "" if reply.confidence is None else f"{100 * reply.confidence:.1f} %",
                "ms": f"{reply.latency_ms:.1f}",
            }
            for reply in reversed(replies)
        ]

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Show errors from the block on the page."""
        try:
            yield
        except SaccadeError as error:
            name = self._name.text
            self._answer.clear()
            with self._answer:
                ui.label("no answer").classes("opacity-70")
            # The last picture is not of this request.
            for part in (self._preview, self._looked_card, self._budgets_card):
                part.set_visibility(False)
            # The page already shows which server and model refused.
            text = str(error).rpartition(" refuses the request: ")[2]
            _alert(self._alerts, f"{name}: {text}" if name else text)
        except RuntimeError as error:
            # The tab has been closed: there is no page left to write to.
            if "deleted" not in str(error):
                raise


def _alert(place: Any, text: str) -> None:
    place.clear()
    with place, ui.card().classes("w-full bg-red-100 dark:bg-red-900 p-3").props("flat role=alert"):
        ui.label(text).classes("break-words w-full")


def _picture(png: bytes, alt: str) -> None:
    ui.image(data_url(png)).classes("explore-picture").props(f'alt="{alt}" fit=contain')
