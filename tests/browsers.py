# SPDX-License-Identifier: Apache-2.0
"""Debian's Chromium, driven by Playwright, with what goes wrong in a page gathered."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

PATIENCE_MS = 120_000  # a machine under load draws slowly


@dataclass(frozen=True)
class Tab:
    """A page, what it complained of on its console, and what it asked the network for."""

    page: Any
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def chromium_or_skip() -> str:
    """The program."""
    pytest.importorskip("playwright", reason="playwright is not installed: pip install '.[dev]'")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("chromium is not installed (Debian, Ubuntu: apt-get install chromium)")
    return program


@contextmanager
def browser() -> Iterator[Any]:
    """A browser without a window."""
    program = chromium_or_skip()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Tests run as root in containers, where Chromium's own sandbox cannot be set up.
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()


@contextmanager
def tab(running: Any, address: str, **settings: Any) -> Iterator[Tab]:
    """The page at an address, in a context of its own with these settings of Playwright's."""
    context = running.new_context(**settings)
    try:
        shown = Tab(context.new_page())
        shown.page.set_default_timeout(PATIENCE_MS)
        shown.page.on("console", lambda line: shown.faults.append(f"{line.type}: {line.text}"))
        shown.page.on("pageerror", lambda error: shown.faults.append(str(error)))
        shown.page.on("dialog", lambda dialog: shown.faults.append(f"dialog: {dialog.message}"))
        shown.page.on("request", lambda request: shown.requests.append(request.url))
        shown.page.goto(address)
        yield shown
    finally:
        context.close()
