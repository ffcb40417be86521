# SPDX-License-Identifier: Apache-2.0
"""A real server with more work than it can do: it refuses, answers what it can, and stays."""

import asyncio
import io
import time
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from saccade.core.errors import ServerFailed
from saccade.serving.client.client import AsyncClient, Client
from saccade.serving.server.server import ServeOptions, Server

pytestmark = pytest.mark.journey

FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
PROBE_S = 0.2  # far less than what the requests below take


@pytest.fixture(scope="module")
def watched(needs_server, tiny_repository):
    """A server whose supervisor has little patience."""
    options = ServeOptions(probe_interval_s=PROBE_S, probe_timeout_s=PROBE_S, **FREE_PORTS)
    with Server(tiny_repository, options) as running:
        yield running


def picture(side: int) -> bytes:
    """A grey PNG: few bytes, and yet as long to decode as a photograph."""
    file = io.BytesIO()
    Image.new("L", (side, side), 90).save(file, "PNG")
    return file.getvalue()


def test_overload_ends_in_refusals_and_never_in_a_restart(watched):
    image, said, ready = picture(1500), Counter(), []

    async def load() -> None:
        end = time.monotonic() + 3
        async with AsyncClient(watched.url, "nac", timeout_s=3) as client:

            async def one() -> None:
                while time.monotonic() < end:
                    try:
                        await client.embed([image])
                        said["answered"] += 1
                    except ServerFailed as error:
                        said["refused" if "is overloaded: " in str(error) else "failed"] += 1
                        await asyncio.sleep(0.02)
                    ready.append(bool(watched.ready()))

            await asyncio.gather(*(one() for _ in range(400)))

    asyncio.run(load())
    assert said["answered"] and said["refused"], said
    # What one machine or another is late with; it is cut off, not refused.
    assert said["failed"] < said["refused"] + said["answered"], said
    assert watched.restarts == 0 and all(ready)


def test_a_large_legal_request_is_not_taken_for_death(watched):
    seen = []
    with Client(watched.url, "nac", timeout_s=300) as client:
        began = time.monotonic()
        embeddings = client.embed([picture(3464)] * 40)  # 12 megapixels each
        seen.append(time.monotonic() - began)
    assert len(embeddings.vectors) == 40 and np.isfinite(embeddings.vectors).all()
    assert seen[0] > 3 * PROBE_S, "the request was too short to show anything"
    assert watched.restarts == 0 and watched.ready()


def test_a_flood_does_not_starve_another_caller(watched, digit):
    """A thousand requests wait, of a caller with a name; another has one."""
    from tritonclient.grpc import InferenceServerClient, InferInput

    given = InferInput("image", [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([[picture(1000)]], dtype=object))
    ended = []
    with InferenceServerClient(watched.url) as crowd:
        for number in range(1000):
            crowd.async_infer(
                "nac", [given], lambda result, error: ended.append(error),
                request_id=f"crowd/{number}", timeout=60_000_000,
            )  # fmt: skip
        with Client(watched.url, "nac", timeout_s=60) as client:
            client.embed([digit])
            assert len(ended) < 1000, "the crowd was through before the other began"
        end = time.monotonic() + 120
        while len(ended) < 1000 and time.monotonic() < end:
            time.sleep(0.02)
    refused = [error for error in ended if error is not None]
    assert refused and all("is full" in error.message() for error in refused)
    assert watched.restarts == 0
