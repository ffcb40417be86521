# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus before a served repository: no panel, rule or query of ours is empty there."""

import json
import math
import os
import re
import signal
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import yaml
from metric_pages import page_of
from picture_files import png
from places import ROOT
from prometheus_program import promtool, running

from saccade.core.errors import SaccadeError
from saccade.serving.client.client import Client
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.server import ServeOptions, Server

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "saccade.json").read_text())
TARGETS = [
    pytest.param(target["expr"], id=f"{panel['title']}: {target['legendFormat']}")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
SCRAPE_S, WINDOW = 1, "10s"
PATIENCE_S = 120
# In a cluster the scrape configuration adds these.
POD = {"namespace": "default", "pod": "saccade-server-0"}


@contextmanager
def load(server, budgets):
    """Callers in a loop, one a variant; one of them sends junk, and one what has no variant."""
    stop = threading.Event()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    image = png(pixels)

    def call(image, options):
        with Client(server.url, server.model) as client:
            while not stop.wait(0.02):
                with suppress(SaccadeError):
                    client.classify([image], **options)

    kinds = [(image, {"budget": budget}) for budget in budgets]
    kinds += [(b"junk", {}), (image, {"min_score": 1.0})]
    threads = [threading.Thread(target=call, args=kind) for kind in kinds]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def served(tiny_folder, tmp_path_factory):
    """The tiny NAC, served, with a little load on each variant."""
    repository = tmp_path_factory.mktemp("repository") / "nac"
    deploy(tiny_folder, RepositoryOptions(out=repository))
    with Server(repository, ServeOptions(**FREE_PORTS)) as server:
        with load(server, (1.0, 0.5, 0.25, 0.125)):
            yield server


@pytest.fixture(scope="module")
def prometheus(served, tmp_path_factory):
    """The committed configuration, with this server's address and short intervals."""
    place = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    address = served.metrics_url.removeprefix("http://").removesuffix("/metrics")
    job["static_configs"] = [{"targets": [address], "labels": POD}]
    (place / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with running(place / "prometheus.yaml", place) as started:
        yield started


def eventually(holds):
    """What a query gives once it gives something."""
    end = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.5)
    return found


def shown(expression):
    """A panel's query as Grafana sends it."""
    expression = expression.replace("$__rate_interval", WINDOW)
    expression = re.sub(r"\$(model|instance)\b", ".*", expression)
    assert "$" not in expression
    return expression


@pytest.mark.parametrize("expression", TARGETS)
def test_a_panel_shows_numbers(prometheus, served, expression):
    if "nv_gpu_" in expression and "nv_gpu_utilization{" not in page_of(served.metrics_url):
        pytest.skip("this machine has no GPU, of which the server says nothing then")

    def numbers():
        samples = [value for _, value in prometheus.query(shown(expression))]
        return samples if samples and all(map(math.isfinite, samples)) else None

    eventually(numbers)


@pytest.mark.parametrize("variable", ["model", "instance"])
def test_a_variable_of_the_dashboard_has_values(prometheus, variable):
    (chosen,) = (each for each in DASHBOARD["templating"]["list"] if each["name"] == variable)
    series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", chosen["definition"]).groups()
    path = f"/api/v1/label/{label}/values"
    assert eventually(lambda: prometheus.get(path, **{"match[]": shown(series)}))


def test_what_callers_did_is_what_the_panels_show(prometheus, served):
    def ends():
        found = prometheus.query(f"sum by (outcome) (increase(saccade_requests_total[{WINDOW}]))")
        by_outcome = {labels["outcome"]: value for labels, value in found}
        return by_outcome if by_outcome.get("refused") else None

    by_outcome = eventually(ends)
    assert by_outcome["answered"] > 0 and by_outcome["failed"] == 0

    def growing(label, counter):
        found = prometheus.query(f"sum by ({label}) (rate({counter}[{WINDOW}])) > 0")
        return {labels[label] for labels, _ in found}

    eventually(
        lambda: growing("reason", "saccade_refusals_total") >= {"invalid_image", "invalid_request"}
    )
    eventually(lambda: growing("variant", "saccade_answers_total") == set(served.variants))


def test_the_autoscalers_query_gives_one_number_a_pod(prometheus):
    (rule,) = yaml.safe_load((DEPLOY / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert prometheus.query(rule["seriesQuery"])
    query = rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("2m", WINDOW)
    matchers = ",".join(f'{name}="{value}"' for name, value in POD.items())
    query = query.replace("<<.LabelMatchers>>", matchers)
    ((labels, seconds),) = eventually(lambda: prometheus.query(query))
    assert labels == {"pod": POD["pod"]} and 0 < seconds < PATIENCE_S


def test_rules_that_hold_are_pending_and_the_others_are_not(prometheus, served):
    def state():
        (group,) = prometheus.get("/api/v1/rules")["groups"]
        assert not [rule["lastError"] for rule in group["rules"] if rule.get("lastError")]
        return {rule["name"]: rule["state"] for rule in group["rules"]}

    # A sixth of the callers send junk.
    eventually(lambda: state()["SaccadeRefusedShare"] == "pending")
    assert state()["SaccadeErrorShare"] == state()["SaccadeDown"] == "inactive"
    restarts = served.restarts
    os.kill(served.pid, signal.SIGKILL)
    eventually(lambda: state()["SaccadeVariantDead"] == "pending")
    eventually(lambda: served.restarts > restarts and served.ready())
    eventually(lambda: state()["SaccadeVariantDead"] == "inactive")
    assert eventually(lambda: prometheus.query("saccade_server_restarts_total > 0"))


def test_the_page_that_was_scraped_is_clean(served):
    page = page_of(served.metrics_url)
    said = promtool("check", "metrics", given=page)
    assert not [line for line in said.stderr.splitlines() if not line.startswith("nv_")]
