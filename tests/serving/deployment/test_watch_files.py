# SPDX-License-Identifier: Apache-2.0
"""Alert rules, dashboard and runbook: they speak of metrics that a service has, and of all."""

import json
import re

import pytest
import yaml
from metric_pages import page_of, types_in
from places import PACKAGE, ROOT
from prometheus_program import promtool

from saccade.serving.server.http_endpoint import PROXY_FAMILIES

DEPLOY, RUNBOOK = ROOT / "deploy", ROOT / "docs" / "operate.md"
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((DEPLOY / "grafana" / "saccade.json").read_text())
ADAPTER = (DEPLOY / "prometheus-adapter.yaml").read_text()
NAME = re.compile(r"\b(?:saccade|nv)_\w+")
# A server says nothing of GPUs where there is none; `check_watch.py` asks on a machine that has.
OF_GPUS = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"}
# A repository without policies and without an objective, as this page's, does not count these.
OF_CHOICES = {
    "saccade_policy_answers_total",
    "saccade_adaptive_answers_total",
    "saccade_monitor_answers_total",
    "saccade_monitor_seconds_total",
    "saccade_policy_withdrawn_total",
}
# Nor these without `--proxy`.
OF_PROXY = {f"saccade_{name}" for name in PROXY_FAMILIES}


@pytest.fixture(scope="module")
def page(server):
    return page_of(server.metrics_url)


def sample_names(page):
    """Names by which samples are asked for."""
    return {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}


def own_families(page):
    """Names in the lines of types, with `_total`, as a query has them."""
    return set(re.findall(r"^# TYPE (saccade_\w+)", page, re.MULTILINE))


def expressions():
    yield from (rule["expr"] for rule in RULES)
    yield from (target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])
    yield from (each["definition"] for each in DASHBOARD["templating"]["list"][1:])
    (rule,) = yaml.safe_load(ADAPTER)["rules"]["custom"]
    yield from (rule["seriesQuery"], rule["metricsQuery"])


def test_queries_ask_for_what_the_page_has(page):
    asked = {name for expression in expressions() for name in NAME.findall(expression)}
    assert asked - OF_GPUS - OF_CHOICES - OF_PROXY <= sample_names(page)
    assert len(asked) > 15


def test_labels_in_queries_are_those_of_the_page(page):
    """A reason or an outcome that is no longer counted would make an alert that never fires."""
    for label in ("outcome", "reason"):
        counted = set(re.findall(rf'{label}="([^"]*)"', page))
        for expression in expressions():
            for pattern in re.findall(rf'{label}=~?"([^"]*)"', expression):
                for word in pattern.split("|"):
                    assert any(re.fullmatch(word, value) for value in counted), word


def test_the_runbook_has_every_metric_and_every_alert(page):
    text = RUNBOOK.read_text()
    table = set(re.findall(r"^\| `(saccade_\w+)", text, re.MULTILINE))
    assert table == own_families(page) | OF_CHOICES | OF_PROXY
    source = (PACKAGE / "model_repository" / "router" / "metrics.py").read_text()
    assert all(name in source for name in OF_CHOICES)
    headings = re.findall(r"^### (Saccade\w+)$", text, re.MULTILINE)
    assert headings == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/operate.md#{rule['alert'].lower()}"


def test_the_runbooks_reasons_are_those_that_are_counted(page):
    text = RUNBOOK.read_text()
    assert set(re.findall(r"^\| `([a-z_]+)` \| [A-Z_]+ \|", text, re.MULTILINE)) == set(
        re.findall(r'reason="([a-z_]+)"', "".join(re.findall(r"saccade_refusals.*", page)))
    )


def test_the_dashboard_can_be_imported():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) and {"title", "uid", "schemaVersion"} <= set(DASHBOARD)
    source, *variables = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"]) == ("datasource", "datasource")
    cells = set()
    for panel in DASHBOARD["panels"]:
        assert panel["title"] and panel["targets"]
        for each in (panel, *panel["targets"]):
            assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells and max(x for x, _ in own) < 24
        cells |= own
    asked = {name for text in expressions() for name in re.findall(r"\$(\w+)", text)}
    assert asked == {"__rate_interval", *(each["name"] for each in variables)}


def test_promtool_finds_nothing_in_our_part_of_the_page(page):
    """The server's own names have no `_total`, and microseconds: those are not ours to mend."""
    assert len(types_in(page)) > 20
    said = promtool("check", "metrics", given=page)
    ours = [line for line in said.stderr.splitlines() if not line.startswith("nv_")]
    assert not ours
    own = "".join(
        family
        for family in re.split(r"^(?=# HELP )", page, flags=re.MULTILINE)
        if family.startswith("# HELP saccade_")
    )
    clean = promtool("check", "metrics", given=own)
    assert (clean.returncode, clean.stderr) == (0, "") and own.count("# TYPE") == 15


def test_promtool_takes_rules_and_configuration():
    for kind, name in (("rules", "rules.yaml"), ("config", "prometheus.yaml")):
        said = promtool("check", kind, str(DEPLOY / "prometheus" / name))
        assert said.returncode == 0, said.stdout + said.stderr


def test_alerts_fire_where_they_should_and_only_there():
    said = promtool("test", "rules", str(ROOT / "tests/serving/deployment/alert_rules_test.yaml"))
    assert said.returncode == 0, said.stdout + said.stderr
