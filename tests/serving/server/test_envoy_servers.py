# SPDX-License-Identifier: Apache-2.0
"""Envoy before two embedded servers: one is killed, and no caller hears of it."""

import os
import signal
import threading
from collections import Counter

import numpy as np
import pytest
from envoys import running

from saccade.core.errors import SaccadeError
from saccade.serving.client.client import Client
from saccade.serving.server.server import ServeOptions, Server

FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}


@pytest.mark.journey
def test_callers_do_not_notice_that_a_server_is_killed(
    envoy_binary, server, tiny_repository, digit, tmp_path, eventually
):
    stop, seen = threading.Event(), Counter()

    def caller() -> None:
        with Client(envoy.url, server.model, timeout_s=30) as client:
            while not stop.is_set():
                try:
                    (answer,) = client.classify([digit], budget=0.5)
                    seen[answer.variant] += 1
                except SaccadeError as error:
                    seen[str(error)] += 1

    with Server(tiny_repository, ServeOptions(**FREE_PORTS)) as second:
        servers = [server.url, second.url]
        ready = [each.options.ready_port for each in (server, second)]
        with running(envoy_binary, tmp_path, servers, ready) as envoy:
            with Client(envoy.url, server.model) as through, Client(server.url, "nac") as direct:
                asked = {"image": [digit]}
                np.testing.assert_array_equal(
                    through.infer(asked, budget=0.5)["logits"],
                    direct.infer(asked, budget=0.5)["logits"],
                )
            eventually(lambda: envoy.ready_servers() == 2, 5)
            callers = [threading.Thread(target=caller) for _ in range(4)]
            for thread in callers:
                thread.start()
            eventually(lambda: sum(seen.values()) > 20, 2)
            os.kill(second.pid, signal.SIGKILL)
            eventually(lambda: envoy.ready_servers() == 1, 5)
            eventually(lambda: envoy.ready_servers() == 2, 20)
            before = envoy.requests_to(second.url)
            eventually(lambda: envoy.requests_to(second.url) > before + 20, 5)
            stop.set()
            for thread in callers:
                thread.join(60)
    assert list(seen) == ["nac-b0500-fp32"], seen
