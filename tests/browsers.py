# SPDX-License-Identifier: Apache-2.0
"""Run Debian's Chromium with Playwright and collect the errors of a page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

PATIENCE_MS = 120_000  # a machine under load renders slowly


@dataclass(frozen=True)
class Tab:
    """A page, its console errors, and its network requests."""

    page: Any
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def chromium_or_skip() -> str:
    """Return the path of Chromium, or skip the test."""
    pytest.importorskip("playwright", reason="playwright is not installed: pip install '.[dev]'")
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("chromium is not installed (Debian, Ubuntu: apt-get install chromium)")
    return program


@contextmanager
def browser() -> Iterator[Any]:
    """Start a headless browser."""
    program = chromium_or_skip()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # In containers, tests run as root, where Chromium's sandbox cannot be set up.
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()


@contextmanager
def tab(running: Any, address: str, **settings: Any) -> Iterator[Tab]:
    """Open an address in a separate context with these Playwright settings."""
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
