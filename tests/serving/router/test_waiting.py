# SPDX-License-Identifier: Apache-2.0
"""Waiting times in the router's lanes are on the server's page of metrics."""

import re
import urllib.request


def counted(server, name):
    page = urllib.request.urlopen(server.metrics_url, timeout=60).read().decode()
    (value,) = re.findall(rf'^{name}{{model="nac"}} (\S+)$', page, re.MULTILINE)
    return float(value)


def test_every_request_is_counted_with_the_time_that_it_waited(server, client, digit, eventually):
    requests = counted(server, "saccade_waited_requests")
    waited_us = counted(server, "saccade_waited_us")
    for _ in range(3):
        client.classify([digit])
    eventually(lambda: counted(server, "saccade_waited_requests") >= requests + 3, 5)
    assert counted(server, "saccade_waited_us") > waited_us
