# SPDX-License-Identifier: Apache-2.0
"""Callers that send malformed, hostile, huge, or too many requests."""

import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
from open_load import Arrivals, OpenLoad, with_timeout

from chaos.scene import Scene, picture, picture_request
from saccade.serving.bench.load import LoadGenerator, Stream
from saccade.serving.client.connection import connect_alone

TIMEOUTS = (-1, 2**63 - 1, -(2**63), 0, 1)
MIB = 2**20
OVERLOAD_S = 45.0
CANCELLED_S = 20.0
TIMES = 3.0
DEADLINE_S = 0.5
_CAPACITY_S = 2.0
_CLIENTS = 16
_PICTURES = 4  # per request: costs the server more, but not the generator


def hostile_timeouts(scene: Scene) -> None:
    """Send impossible timeouts to the lanes in which honest callers wait."""

    def messages() -> Iterator[bytes]:
        for turn in range(400):
            variant = scene.rng.choice(scene.models.variants)
            message = picture_request(scene.models, variant)
            if turn % 10 == 9:
                message.parameters["timeout"].string_param = "soon"
            else:
                message.parameters["timeout"].int64_param = TIMEOUTS[turn % len(TIMEOUTS)]
            yield message.SerializeToString()

    scene.send(messages(), timeout_s=10, at_once=8)


def classify_names(scene: Scene) -> None:
    """Request the server's own classification for outputs of strings."""
    for name in ("variant", "variant_sha256", "caption"):
        message = picture_request(scene.models, scene.models.cheap, outputs=(name,))
        message.outputs[0].parameters["classification"].int64_param = 3
        scene.send([message.SerializeToString()] * 3, timeout_s=10)


def empty_batches(scene: Scene) -> None:
    """Send batches of 0 with the data of one row, which the server does not refuse itself."""
    from tritonclient.grpc import service_pb2
    from tritonclient.utils import triton_to_np_dtype

    with closing(connect_alone(scene.service.grpc)) as connection:
        metadata = connection.get_model_metadata(scene.models.cheap)
    message = service_pb2.ModelInferRequest(model_name=scene.models.cheap)
    for declared in metadata.inputs:
        sizes = [max(1, size) for size in declared.shape[1:]]
        message.inputs.add(name=declared.name, datatype=declared.datatype, shape=[0, *sizes])
        row = np.zeros(sizes, triton_to_np_dtype(declared.datatype))
        message.raw_input_contents.append(row.tobytes())
    scene.send([message.SerializeToString()] * 40, timeout_s=10)


def malformed_grpc(scene: Scene) -> None:
    """Send messages that a fuzzer makes from a valid one."""
    good = picture_request(scene.models, scene.models.cheap)
    scene.send((_broken(good, scene.rng) for _ in range(300)), timeout_s=10, at_once=4)


def broken_texts(scene: Scene) -> None:
    """Send images that claim to be longer than they are, together with honest callers."""
    message = picture_request(scene.models, scene.models.cheap)
    message.raw_input_contents[0] = b"\xff\xff\xff\x7f" + message.raw_input_contents[0][4:]
    scene.send([message.SerializeToString()] * 400, timeout_s=10, at_once=8)


def big_messages(scene: Scene) -> None:
    """Send useless messages that would fill the memory if there were more of them."""
    message = picture_request(scene.models, scene.models.cheap)
    message.raw_input_contents[0] = bytes(256 * MIB)
    whole = message.SerializeToString()
    scene.send([whole] * 3)


def photographs(scene: Scene) -> None:
    """Send requests of the largest allowed size, like a client with a folder of photographs."""
    photograph = picture(4000, 3000, seed=scene.rng.randrange(2**31), kind="JPEG")
    message = picture_request(scene.models, scene.models.full, [photograph] * 64)
    scene.send([message.SerializeToString()] * 2, timeout_s=120)


def picture_bombs(scene: Scene) -> None:
    """Send small files that take long to decode, after the caller has given up."""
    from picture_files import png
    from PIL import Image

    bomb = png(Image.new("L", (7000, 7000)))
    message = picture_request(scene.models, scene.models.full, [bomb] * 64)
    scene.send([with_timeout(message, 1_000_000)], timeout_s=1.2)


def overload(scene: Scene) -> None:
    """Send more than one budget can answer."""
    _overload(scene, [scene.models.full])


def overload_all(scene: Scene) -> None:
    """Send more than all budgets together can answer."""
    _overload(scene, list(scene.models.variants))


def cancelled_calls(scene: Scene) -> None:
    """Cancel calls at every stage."""
    rate = _capacity(scene, [scene.models.full])
    parts = 5
    with OpenLoad(scene.service.grpc) as load:
        for part in range(parts):
            requests = _requests(scene, [scene.models.full], timeout_us=0)
            deadline_s = scene.rng.uniform(0.001, 0.05)
            seconds = CANCELLED_S / parts
            arrivals = Arrivals(requests, TIMES * rate, seconds, deadline_s, seed=part)
            scene.heard += load.run(arrivals).statuses()


def _overload(scene: Scene, variants: list[str]) -> None:
    rate = TIMES * _capacity(scene, variants)
    requests = _requests(scene, variants, timeout_us=int(1e6 * DEADLINE_S))
    seed = scene.rng.randrange(2**31)
    with OpenLoad(scene.service.grpc) as load:
        result = load.run(Arrivals(requests, rate, OVERLOAD_S, DEADLINE_S + 0.1, seed=seed))
    scene.heard += result.statuses()


def _capacity(scene: Scene, variants: list[str]) -> float:
    """Measure requests per second of callers that wait for their answers."""
    requests = _requests(scene, variants, timeout_us=0)
    stream = Stream("all", scene.models.router, _CLIENTS, requests)
    with LoadGenerator(scene.service.grpc) as load:
        result = load.run([stream], seconds=_CAPACITY_S, warmup_s=0.5)
    return max(1.0, len(result.streams["all"].latencies_ms) / result.seconds)


def _requests(scene: Scene, variants: list[str], *, timeout_us: int) -> tuple[bytes, ...]:
    pictures = [picture(64, 64, seed=seed) for seed in range(_PICTURES)]
    messages = [picture_request(scene.models, variant, pictures) for variant in variants]
    for message in messages:
        message.id = "many/1"
    if timeout_us:
        return tuple(with_timeout(message, timeout_us) for message in messages)
    return tuple(message.SerializeToString() for message in messages)


def _broken(good: Any, rng: random.Random) -> bytes:
    """Return a message with one of many possible faults."""
    whole = good.SerializeToString()
    at = rng.randrange(len(whole))
    message = type(good).FromString(whole)
    tensor = message.inputs[0]
    way = rng.randrange(9)
    if way == 0:
        return bytes(whole[:at])
    if way == 1:
        return bytes(whole[:at] + rng.randbytes(8) + whole[at + 8 :])
    if way == 2:
        return rng.randbytes(rng.randrange(2000))
    if way == 3:
        tensor.shape[0] = rng.choice((-1, 0, 2, 2**31, 2**63 - 1))
    elif way == 4:
        tensor.datatype = rng.choice(("FP32", "INT64", "", "BYTES" * 9))
    elif way == 5:
        message.raw_input_contents[0] = rng.randbytes(rng.randrange(64))
    elif way == 6:
        message.parameters["budget"].string_param = rng.choice(("nan", "-1", "2", "x" * 5000))
    elif way == 7:
        message.model_name = rng.choice(("", "..", "nac/../nac", "\0", "m" * 5000))
    else:
        message.parameters[rng.choice(("sequence_id", "priority", "x"))].int64_param = -1
    return bytes(message.SerializeToString())
