# SPDX-License-Identifier: Apache-2.0
"""The report page in Chromium: drawn without a complaint, used by mouse and by keyboard."""

from contextlib import contextmanager
from typing import Any

import pytest
from browsers import browser, tab
from report_figures import LONG, figures, hostile, with_examples, with_policies, with_samples

from saccade.serving.bench import report

pytest.importorskip("plotly", reason="plotly is not installed: pip install '.[bench]'")
pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[bench]'")

SIZE = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
HOSTILE = "<img src=x onerror=alert(1)><a href='javascript:alert(2)'>%{x}</a><b>bold</b>"
POINT = "#frontier-plot .scatterlayer .points path"
TOOLTIP = "#frontier-plot .hoverlayer .hovertext"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    report.write_report(with_examples(with_samples(figures())), folder)
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def chromium():
    with browser() as running:
        yield running


@contextmanager
def opened(chromium, address, **options):
    """A page in a tab of its own, of which nothing has complained in the end."""
    with tab(chromium, address, **{"viewport": SIZE, **options}) as shown:
        yield shown.page
        assert shown.faults == []


@pytest.fixture(scope="module")
def desktop(chromium, address):
    """One tab of the usual size and colours; who switches something switches it back."""
    with tab(chromium, address, viewport=SIZE) as shown:
        yield shown


def background(page: Any, selector: str) -> str:
    return str(page.eval_on_selector(selector, "element => getComputedStyle(element).fill"))


def test_it_is_drawn_and_asks_nobody(desktop, address):
    for plot in ("frontier", "latency", "stages"):
        desktop.page.wait_for_selector(f"#{plot}-plot .main-svg")
    assert desktop.page.locator(POINT).count() == 3
    assert desktop.page.locator("#stages-plot .barlayer .point path").count() >= 3
    assert desktop.page.locator("#latency-plot .boxlayer path.box").count() == 3
    assert desktop.page.locator("noscript img").count() == 0
    assert desktop.faults == []
    assert [url for url in desktop.requests if not url.startswith("data:")] == [address]


def test_a_point_tells_its_figures_under_the_mouse(desktop):
    desktop.page.locator(POINT).nth(1).hover(force=True)
    desktop.page.wait_for_selector(TOOLTIP)
    text = desktop.page.locator(TOOLTIP).text_content()
    assert "nac-b0500-fp32" in text and "85.00 %" in text and f"dominated by {LONG}" in text
    assert desktop.faults == []


def test_the_switch_changes_the_axis(desktop):
    title = desktop.page.locator("#frontier-plot .g-xtitle")
    assert "Images per second, through gRPC, concurrency 16" in title.text_content()
    before = desktop.page.locator(POINT).nth(1).bounding_box()["x"]
    desktop.page.get_by_label("Multiply-adds").check()
    desktop.page.wait_for_function(
        "document.querySelector('#frontier-plot .g-xtitle').textContent.includes('Multiply')"
    )
    assert desktop.page.locator(POINT).nth(1).bounding_box()["x"] != before
    assert "no variant is marked" in desktop.page.locator("#frontier-note").text_content()
    desktop.page.locator("#paths").get_by_label("Straight to the variant").check()
    desktop.page.wait_for_function(
        "document.querySelectorAll('#latency-plot .boxlayer path.box').length === 6"
    )
    desktop.page.get_by_label("Images/s, server").check()
    assert desktop.faults == []


def test_the_keyboard_goes_from_point_to_point(desktop):
    desktop.page.locator("#frontier-plot").focus()
    told = []
    for _ in range(4):
        desktop.page.keyboard.press("ArrowRight")
        told.append(desktop.page.locator("#live").text_content().split(".")[0])
    # From the slowest to the fastest, and round again.
    names = ["nac-b0500-fp32", "nac-b1000-fp32", "nac-b0125-fp32"]
    assert told == [*names, names[0]]
    # plotly.js draws a point's figures a little later, and of several calls the last.
    desktop.page.wait_for_selector(f"{TOOLTIP} :text('nac-b0500-fp32')")
    desktop.page.keyboard.press("Escape")
    desktop.page.wait_for_selector(TOOLTIP, state="detached")
    assert desktop.faults == []


def test_policies_are_stars_that_the_keyboard_reaches(chromium, tmp_path):
    report.write_report(with_policies(figures()), tmp_path)
    with opened(chromium, (tmp_path / "report.html").as_uri()) as page:
        page.wait_for_selector("#frontier-plot .main-svg")
        assert page.locator(POINT).count() == 4
        legend = page.locator("#frontier-plot .legendtext").all_text_contents()
        assert legend == ["fixed budget", "policy"]
        page.locator("#frontier-plot").focus()
        told = []
        for _ in range(4):
            page.keyboard.press("ArrowRight")
            told.append(page.locator("#live").text_content().split(".")[0])
        assert told[2] == "policy auto" and told[3] == "nac-b0125-fp32"
        page.wait_for_selector(f"{TOOLTIP} :text('nac-b0125-fp32')")
        page.get_by_label("Multiply-adds").check()
        page.wait_for_function(
            "document.querySelectorAll('#frontier-plot .scatterlayer .points path').length === 3"
        )


def test_a_phone_does_not_scroll_sideways(chromium, address):
    with opened(chromium, address, viewport=PHONE, has_touch=True, is_mobile=True) as page:
        page.wait_for_selector("#stages-plot .main-svg")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width == page.evaluate("window.innerWidth") == 390


def test_colours_follow_the_system_and_the_switch(chromium, address):
    dark, light = "rgb(20, 23, 27)", "rgb(255, 255, 255)"
    with opened(chromium, address, color_scheme="dark") as page:
        page.wait_for_selector("#frontier-plot .main-svg")
        body = "element => getComputedStyle(element).backgroundColor"
        assert page.eval_on_selector("body", body) == dark
        assert background(page, "#latency-plot .bglayer rect, #latency-plot rect.bg") == dark
        page.locator(".theme").get_by_label("Light").check()
        assert page.eval_on_selector("body", body) == light
        assert page.eval_on_selector("#frontier-plot .main-svg", "e => e.style.background") == light


def test_foreign_texts_run_nowhere(chromium, tmp_path):
    content = hostile(with_examples(with_samples(with_policies(figures()))), HOSTILE)
    report.write_report(content, tmp_path)
    with opened(chromium, (tmp_path / "report.html").as_uri()) as page:
        page.locator("#frontier-plot").focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(TOOLTIP)
        assert "<img src=x onerror=alert(1)>" in page.locator(TOOLTIP).text_content()
        assert page.locator("a, img[src='x'], svg a").count() == 0
        assert page.evaluate("document.title").startswith("<img src=x")


def test_without_scripts_picture_and_tables_are_left(chromium, address):
    with opened(chromium, address, java_script_enabled=False) as page:
        assert page.locator("noscript img").is_visible()
        assert not page.locator("#frontier").is_visible()
        assert page.get_by_role("table").count() >= 6
