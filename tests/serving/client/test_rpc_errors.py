# SPDX-License-Identifier: Apache-2.0
"""What a failed call is explained as, and whether another try can help; no server is started."""

import asyncio
import pickle

import pytest
from tritonclient.utils import InferenceServerException

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.models import image_decoding
from saccade.serving.client import client as client_module
from saccade.serving.client.client import AsyncClient, Client
from saccade.serving.client.connection import ServerRefusedImage, explain

URL = "127.0.0.1:9"
_FAILED = "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:9: "
# Of each failure: its status, the words of gRPC or the server, whether to retry, and our words.
FAILURES = {
    "no server": ("UNAVAILABLE", f"{_FAILED}Connection refused", True, "try again in a few sec"),
    "a silent server": ("DEADLINE_EXCEEDED", "Deadline Exceeded", True, "Try again in a few sec"),
    "no such host": ("UNAVAILABLE", "DNS resolution failed for x", False, "no such host"),
    "the port of /ready": (
        "UNAVAILABLE", f"{_FAILED}Failed parsing HTTP/2 (Expected SETTINGS frame as the first "
        "frame, got frame type 79)", False, "does not speak gRPC. Pass the gRPC port",
    ),
    "TLS to a plain port": (
        "UNAVAILABLE", f"{_FAILED}Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL",
        False, "the TLS handshake failed: the server may not use TLS",
    ),
    "a dead variant": (
        "UNAVAILABLE", "variant 'm-b1000-fp32' has died", True, "The other variants still answer"
    ),
    "a dead router": (
        "INTERNAL", "Stub process 'm_0_0' is not healthy.", True,
        "the router of m has died. `saccade serve` reloads it; until then no variant answers",
    ),
    "a stopping server": ("NOT_FOUND", "no available versions", True, "is stopping"),
    "a full queue": ("UNAVAILABLE", "Exceeds maximum queue size", True, "overloaded"),
    "no variant in time": (
        "UNAVAILABLE", "model 'm' is busy: found no way to answer this request within 0.5 ms; the "
        "cheapest, 'auto', needs about 39 ms; send less in one request, or allow more time", True,
        "m is overloaded: model 'm' is busy: found no way to answer this request within 0.5 ms; "
        "the cheapest, 'auto', needs about 39 ms; send less in one request, or allow more time.",
    ),
    "another reason": (
        "UNAVAILABLE", "not yet", True, "m accepts no requests now: not yet. Try again later.",
    ),
    "a fault": ("INTERNAL", "onnx runtime error", True, "m failed"),
    "an unknown fault": ("UNKNOWN", "what", False, "m failed"),
}  # fmt: skip


def failure(status, said):
    return explain(InferenceServerException(said, f"StatusCode.{status}"), URL, "m", 10)


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_says_whether_to_try_again(case):
    status, said, retry, words = FAILURES[case]
    error = failure(status, said)
    assert isinstance(error, ServerFailed) and words in str(error)
    assert (error.retry, error.status) == (retry, status)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.retry, copy.status, str(copy)) == (retry, status, str(error))


def test_a_dead_router_leaves_no_other_variants():
    assert "other variants" not in str(failure("INTERNAL", "Stub process 'm_0_0' is not healthy."))


def test_a_failed_start_is_not_worth_another_try():
    error = ServerFailed("It exited.")
    assert (error.retry, error.status) == (False, "")


def test_a_table_of_variants_keeps_its_lines():
    said = "[request id: 1] no variant has a score of 0.99. Variants:\na: score 0.9\nb:  score 0.8"
    assert str(failure("INVALID_ARGUMENT", said)).endswith("Variants:\na: score 0.9\nb: score 0.8")


@pytest.mark.parametrize("data", [b"hello", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"])
def test_the_decoder_s_words_are_those_of_a_refused_image(data):
    with pytest.raises(image_decoding.ImageRefused) as reason:
        image_decoding._open(data, None)
    error = failure("INVALID_ARGUMENT", f"image 3: {reason.value}")
    assert isinstance(error, ServerRefusedImage)
    assert (error.index, error.reason) == (3, str(reason.value))


class Absent:
    """A connection to a server that has no model `digitsum`."""

    def get_model_config(self, name, client_timeout):
        said = f"Request for unknown model: '{name}' is not found"
        raise InferenceServerException(said, "StatusCode.NOT_FOUND")

    def close(self):
        pass


class AbsentAsyncio(Absent):
    async def get_model_config(self, name, client_timeout):
        super().get_model_config(name, client_timeout)

    async def close(self):
        pass


async def _view(client):
    client._connection = AbsentAsyncio()
    async with client:
        await client.view()


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
@pytest.mark.parametrize("routers", [("digits-sum", "other"), None])
def test_an_unknown_model_is_told_with_those_that_there_are(kind, routers, monkeypatch):
    def routers_at(url, timeout_s):
        if routers is None:
            raise SaccadeError("It does not tell.")
        return routers

    monkeypatch.setattr(client_module, "routers_at", routers_at)
    with pytest.raises(SaccadeError, match="there is no model 'digitsum'") as error:
        if kind == "asyncio":
            asyncio.run(_view(AsyncClient(URL, "digitsum")))
        else:
            client = Client(URL, "digitsum")
            client._connection = Absent()
            client.view()
    has = "This server has: digits-sum, other." if routers else f"`saccade doctor --url {URL}` "
    assert has in str(error.value) and "unknown model" not in str(error.value)
