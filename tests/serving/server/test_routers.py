# SPDX-License-Identifier: Apache-2.0
"""A router of several processes: answers, what is counted, and the death of one of them."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_artefacts as tiny
from metric_pages import numbers_in, page_of

from saccade.core.errors import SaccadeError
from saccade.serving.client.client import Client
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.installation import requirements_of
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.process import stubs_in
from saccade.serving.server.server import ServeOptions, Server

FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
CALLS = 12


@pytest.fixture
def folder(tmp_path):
    return tiny.artefacts(tmp_path / "artefacts")


def test_each_process_needs_an_instance(tmp_path):
    with pytest.raises(SaccadeError, match="--routers 3 with --instance-count 2: each router"):
        RepositoryOptions(tmp_path, routers=3, instance_count=2)


def test_the_server_has_threads_for_the_calls_of_one_process(folder, tmp_path):
    deploy(folder, RepositoryOptions(tmp_path / "one", instance_count=16))
    deploy(folder, RepositoryOptions(tmp_path / "two", instance_count=16, routers=2))
    # Two variants of 16 instances with two groups more, and a probe; each of two has half.
    assert [requirements_of(tmp_path / name).calls for name in ("one", "two")] == [37, 19]


@pytest.mark.journey
def test_several_processes_answer_as_one(needs_server, tiny_folder, tmp_path, digit, eventually):
    repository = tmp_path / "repository"
    deploy(tiny_folder, RepositoryOptions(repository, instance_count=2, routers=2))
    options = ServeOptions(probe_interval_s=1, probe_timeout_s=1, **FREE_PORTS)
    with Server(repository, options) as server, Client(server.url, server.model) as client:

        def ask(_):
            return client.classify([digit])[0].variant

        def routers():
            return [stub.pid for stub in stubs_in(server.pid) if stub.model == server.model]

        def answered():
            page = numbers_in(page_of(server.metrics_url))
            return page("saccade_requests_total", outcome="answered")

        with ThreadPoolExecutor(4) as callers:
            assert len(set(callers.map(ask, range(CALLS)))) == 1
        eventually(lambda: answered() == CALLS, 3)  # each counts, and the page has the sum
        first = routers()
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        eventually(lambda: server.reloads + server.restarts == 1 and server.ready(), 30)
        eventually(lambda: len(routers()) == 2 and first[0] not in routers(), 30)
        assert ask(0)
