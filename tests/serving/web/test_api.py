# SPDX-License-Identifier: Apache-2.0
"""The HTTP API as an application, without a server behind it."""

import asyncio
import json

from saccade.serving.web.api import Api
from saccade.serving.web.router_calls import RouterCalls


def answer_of(api, path):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "client": None}
    asyncio.run(api(scope, None, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_a_fault_is_told_to_the_log_and_not_to_the_caller(monkeypatch, caplog):
    async def fail(self):
        raise ValueError("a secret place")

    monkeypatch.setattr(RouterCalls, "look", fail)
    status, content = answer_of(Api("127.0.0.1:1", "m", []), "/health")
    assert (status, content["error"]["type"]) == (500, "server_error")
    assert "secret" not in str(content) and "a secret place" in caplog.text


def test_without_a_server_it_is_not_ready():
    status, content = answer_of(Api("127.0.0.1:1", "m", []), "/health")
    assert (status, content["error"]["code"]) == (503, "unavailable")
    assert "starting or being restarted" in content["error"]["message"]


def test_routes_are_behind_the_key_too():
    api = Api("127.0.0.1:1", "m", ["a-secret-key-of-tests"])
    assert answer_of(api, "/health")[0] == answer_of(api, "/nothing")[0] == 401
