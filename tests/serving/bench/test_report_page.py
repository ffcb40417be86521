# SPDX-License-Identifier: Apache-2.0
"""The report page: whole without a network, foreign texts stay texts, charts of right figures."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from report_figures import (
    LONG,
    account,
    figures,
    file,
    hostile,
    with_examples,
    with_policies,
    with_samples,
)

from saccade.core.errors import MissingPackage
from saccade.exporter.evaluation.examples import chosen_samples
from saccade.serving.bench import report
from saccade.serving.bench.report_charts import STAGES, charts
from saccade.serving.bench.report_examples import focused

pytest.importorskip("plotly", reason="plotly is not installed: pip install '.[bench]'")

PNG = b"\x89PNG of the test"
HOSTILE = "\"><img src=x onerror=alert(1)>$\\frac{$ ${title}</script><script>alert(2)</script> '"
# Elements without an end.
_VOID = {"meta", "img", "input", "br"}


class Page(HTMLParser):
    """The elements of a page, and the texts of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.inside: list[tuple[str, dict[str, str], str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append((tag, attributes))
        if tag not in _VOID:
            self._open.append(tag)
        if tag in ("script", "style"):
            self.inside.append((tag, attributes, ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style"):
            tag, attributes, text = self.inside.pop()
            self.inside.append((tag, attributes, text + data))

    def texts(self, tag: str) -> list[str]:
        return [text for name, given, text in self.inside if name == tag and "type" not in given]

    def attributes(self, tag: str) -> list[dict[str, str]]:
        return [given for name, given in self.elements if name == tag]

    @property
    def policy(self) -> dict[str, list[str]]:
        (meta,) = [m for m in self.attributes("meta") if "http-equiv" in m]
        assert meta["http-equiv"] == "Content-Security-Policy"
        rules = (rule.split() for rule in meta["content"].split(";"))
        return {name: values for name, *values in rules}


@pytest.fixture
def full() -> dict[str, Any]:
    return with_examples(with_samples(figures()))


def own(page: str) -> str:
    """The page without plotly.js."""
    library = report._library()
    assert page.count(library) == 1
    return page.replace(library, "")


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_page_is_whole_without_a_network(full: dict[str, Any]) -> None:
    page = report.page(full, PNG)
    assert base64.b64encode(PNG).decode() in page
    # Every source is a picture inside the page, and there is no address at all.
    assert set(re.findall(r'src="([^,"]*)', own(page))) == {"data:image/png;base64"}
    assert not re.search(r"https?:|\bhref|<link|@import|url\(|\bfetch\(|<iframe", own(page))
    assert "&lt;script&gt;" in page
    for variant in full["variants"]:
        assert page.count(variant["variant"]) >= 3


def test_the_policy_admits_these_scripts_and_styles_and_nothing_else(full: dict[str, Any]) -> None:
    page = Page(report.page(full, PNG))
    policy = page.policy
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == ["'none'"]
    assert policy["script-src"] == [hash_of(text) for text in page.texts("script")]
    assert len(policy["script-src"]) == 2
    # plotly.js makes an empty style element, whose rules it adds by script.
    assert policy["style-src"] == [hash_of(text) for text in ("", *page.texts("style"))]
    assert policy["img-src"] == ["data:"]
    assert "unsafe" not in str(policy)
    # Neither an attribute that runs, nor one with a style, which the policy would refuse.
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]


def test_foreign_texts_stay_texts(full: dict[str, Any]) -> None:
    plain = Page(report.page(full, PNG))
    text = report.page(hostile(full, HOSTILE), PNG)
    page = Page(text)
    # The same elements as with harmless names, but for the table of what failed.
    for tag in ("script", "style", "img", "template", "article", "input"):
        assert len(page.attributes(tag)) == len(plain.attributes(tag))
    assert {image["src"][:10] for image in page.attributes("img")} == {"data:image"}
    assert text.count("&#34;&gt;&lt;img src=x onerror=alert(1)&gt;$\\frac{$ ${title}") > 40
    (data,) = [text for tag, given, text in page.inside if "type" in given]
    assert "<" not in data and json.loads(data)["variants"][0]["name"] == f"{HOSTILE} 0"


def test_letters_that_turn_the_order_are_written_out(full: dict[str, Any]) -> None:
    full["variants"][0]["variant"] = "nac\u202edcba"
    assert "\u202e" not in own(report.page(full, PNG))


def test_everything_that_is_drawn_has_words(full: dict[str, Any]) -> None:
    page = Page(report.page(full, PNG))
    assert all(image["alt"] for image in page.attributes("img"))
    ids = [given["id"] for _, given in page.elements if "id" in given]
    assert len(ids) == len(set(ids))
    for _, given in page.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert set(given.get(name, "").split()) <= set(ids)
    plots = [given for tag, given in page.elements if given.get("class", "").startswith("plot")]
    assert len(plots) == 3
    assert all({"aria-label", "aria-labelledby", "aria-describedby"} & set(p) for p in plots)
    assert len(page.attributes("noscript")) == 1  # around the picture: the tables are always there
    assert len(page.attributes("table")) > 6


def test_axes_are_the_costs_that_differ(full: dict[str, Any]) -> None:
    axes = {axis["name"]: axis for axis in charts(full)["axes"]}
    assert list(axes) == ["throughput", "in-process", "macs"]  # each takes 3 and 6 ms everywhere
    throughput, macs = axes["throughput"], axes["macs"]
    assert [one["value"] for one in throughput["points"]] == [420, 400, 3900]
    assert throughput["dominated_by"] == [None, LONG, None] and throughput["judged"]
    assert throughput["more_is_better"] and throughput["log"]
    assert [one["value"] for one in macs["points"]] == [51e6, 25.5e6, 6.375e6]
    assert not macs["judged"] and macs["dominated_by"] == [None] * 3
    # 8 images in 8 to 12 ms, of which the middle half in 9 to 11.
    inside = axes["in-process"]["points"][0]
    assert (inside["least"], inside["value"]) == (pytest.approx(8 / 0.011), 840)
    assert inside["most"] == pytest.approx(8 / 0.009)


def test_policies_are_on_costs_that_were_measured_of_them(full: dict[str, Any]) -> None:
    content = charts(with_policies(full))
    (mark,) = content["policies"]
    assert (
        mark["chain"] == "nac-b0125-fp32 70 % → nac-b1000-fp32 30 %" and mark["same"] == "99.20 %"
    )
    rates = {axis["name"]: axis["policies"] for axis in content["axes"]}
    # Those with policies come first; straight to a variant, no policy can be measured.
    assert list(rates) == ["in-process", "router", "throughput", "macs"]
    assert [one["value"] for one in rates["in-process"]] == [2100]
    assert [one["value"] for one in rates["router"]] == [516]
    assert rates["throughput"] == rates["macs"] == [None]


def test_bytes_come_first_where_a_budget_saves_them(full: dict[str, Any]) -> None:
    for each, size in zip(full["variants"], (4096, 2048, 512), strict=True):
        each["embedding_bytes"] = size
    first = charts(full)["axes"][0]
    assert first["name"] == "bytes" and not first["more_is_better"] and first["judged"]
    assert not charts(full)["axes"][1]["judged"]


def test_multiply_adds_are_those_of_the_component_that_takes_the_image(full) -> None:
    for each in full["variants"]:
        each["files"].append(file("words", "text", 10**9))
        each["files"][0]["role"] = "image"
    (macs,) = [axis for axis in charts(full)["axes"] if axis["name"] == "macs"]
    assert macs["label"] == "Multiply-adds per image, component image"
    assert [one["value"] for one in macs["points"]] == [51e6, 25.5e6, 6.375e6]


def test_a_sweep_says_who_is_dominated_by_each_cost(full: dict[str, Any]) -> None:
    for index, each in enumerate(full["variants"]):
        cost = {"value": 2.0**20 * (70 + index), "least": 2.0**20, "most": 2.0**27}
        each["costs"] = {"memory": {**cost, "dominated_by": "another" if index else None}}
    (memory,) = [axis for axis in charts(full)["axes"] if axis["name"] == "memory"]
    assert [one["value"] for one in memory["points"]] == [70, 71, 72]
    assert memory["points"][0]["most"] == 128 and memory["bars"]
    assert memory["dominated_by"] == [None, "another", "another"] and memory["judged"]


def test_latencies_are_percentiles_of_all_rounds(full: dict[str, Any]) -> None:
    routed, direct = charts(full)["latency"]
    assert (routed["clients"], direct["clients"]) == ([1], [1, 16])
    box = direct["boxes"][1][2]
    assert box["requests"] == 200
    assert (box["p50"], box["p99"]) == (pytest.approx(50.5), pytest.approx(99.01, abs=0.05))


def test_the_parts_of_a_request_add_up_to_what_the_caller_saw(full: dict[str, Any]) -> None:
    (load,) = charts(full)["stages"]["loads"]
    assert load["clients"] == 1 and len(load["rows"]) == 3
    for row in load["rows"]:
        assert sum(row) == pytest.approx(50.5) and len(row) == len(STAGES)
        # 0.5 ms each in the model's queue, input, work and output, 0.25 each in the router's.
        assert row[:4] == pytest.approx([0.5, 0.5, 1.0, 1.0])


def test_a_request_of_several_calls_has_no_parts(full: dict[str, Any]) -> None:
    for each in full["variants"]:
        each["files"].append(file("beside", "step"))
        for round_ in each["samples"]["grpc"]["router_concurrency_1"]:
            round_["statistics"]["beside"] = account(300, 0.1)
    assert charts(full)["stages"]["loads"] == []


def test_what_was_not_measured_is_not_drawn() -> None:
    drawn = charts(figures())
    assert drawn["latency"] == [] and drawn["stages"]["loads"] == []
    page = report.page(figures(), PNG)
    assert "Sample answers" not in page and page.count("<article") == 0


def test_answers_stand_beside_each_other(full: dict[str, Any]) -> None:
    page = report.page(full, PNG)
    assert page.count("<article") == 2 and page.count("budgets differ</span>") == 1
    assert page.count("✗ wrong") == 1 and page.count("✓ right") == 5
    assert "On 1 of 599 test samples the variants score differently." in page
    assert page.count('<meter min="0" max="1" value="0.7500">75 %</meter>') == 6


def test_samples_are_shown_by_how_far_apart_the_scores_are() -> None:
    values = np.zeros((2, 30))
    values[1, 20:] = np.arange(10)  # at 20 they agree
    assert chosen_samples(list(values)).tolist() == [29, 28, 27, 26, 25, 24, 23, 22, 0, 1, 2, 3]
    assert chosen_samples([np.ones(2), np.ones(2)]).tolist() == [0, 1]


def test_a_focus_darkens_what_was_not_looked_at_and_slots_get_a_colour() -> None:
    image = np.full((4, 4, 1), 200, dtype=np.uint8)
    seen = focused(image, np.array([[1.0, 0.0], [0.5, 0.0]]))
    assert seen.shape == (4, 4, 3) and seen[0, 0, 0] == 200 and seen[0, 3, 0] == 44
    assert seen[3, 0, 0] == 122
    slots = focused(image, np.array([[0, 1], [9, 1]]))
    assert len({tuple(slots[y, x]) for y, x in ((0, 0), (0, 3), (3, 0), (3, 3))}) == 2
    dark = focused(image, np.zeros((2, 2)))
    assert dark.max() == 44


def test_without_plotly_the_extra_is_named(full: dict[str, Any], monkeypatch) -> None:
    def missing(name: str, *, extra: str) -> None:
        raise MissingPackage(name, extra)

    report._library.cache_clear()
    monkeypatch.setattr(report, "require", missing)
    with pytest.raises(MissingPackage):
        report.page(full, PNG)
