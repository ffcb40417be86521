# SPDX-License-Identifier: Apache-2.0
"""Variants behind a server: the requests, a check of their answers, and interleaved rounds."""

import io
import struct
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from saccade.plugins.errors import ServerFailed
from saccade.plugins.progress import Advance
from saccade.serving.load import LoadGenerator, LoadResult, Stream, refuse_errors

WARMUP_S = 0.15
# An answer through the server may differ from one in process by the batch it was computed in.
_RELATIVE_TOLERANCE = 1e-3
_DTYPES = {"FP32": np.float32, "INT64": np.int64, "UINT8": np.uint8}
_Key = TypeVar("_Key", bound=Hashable)


def tensor_request(model: str, images: np.ndarray, *outputs: str) -> bytes:
    """A request to a variant, serialised: its own input as it is.

    Shapes: images uint8 [b h w c].
    """
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="image", datatype="UINT8", shape=images.shape)
    request.raw_input_contents.append(np.ascontiguousarray(images).tobytes())
    for output in outputs or ("probabilities",):
        request.outputs.add(name=output)
    return bytes(request.SerializeToString())


def encoded_request(router: str, images: np.ndarray, budget: float, *outputs: str) -> bytes:
    """A request to the router, serialised: images as PNG files and the budget wanted.

    Shapes: images uint8 [b h w c].
    """
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=router)
    request.inputs.add(name="image", datatype="BYTES", shape=[len(images), 1])
    files = [_png(image) for image in images]
    request.raw_input_contents.append(b"".join(struct.pack("<I", len(f)) + f for f in files))
    request.parameters["budget"].string_param = repr(float(budget))
    for output in outputs or ("probabilities",):
        request.outputs.add(name=output)
    return bytes(request.SerializeToString())


def ask(url: str, request: bytes, *, timeout_s: float = 30) -> dict[str, np.ndarray | list[bytes]]:
    """The answer to one serialised request, by output name.

    Raises: ServerFailed if the server refuses it or does not answer.
    """
    import grpc
    from tritonclient.grpc import service_pb2

    method = "/inference.GRPCInferenceService/ModelInfer"
    parse = service_pb2.ModelInferResponse.FromString
    with grpc.insecure_channel(url) as channel:
        try:
            answer = channel.unary_unary(method, response_deserializer=parse)(
                request, timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise ServerFailed(
                f"{url}: {error.code().name}: {error.details()}. Look at the server's log."
            ) from error
    return {
        output.name: _array(output.datatype, raw).reshape(tuple(output.shape))
        if output.datatype != "BYTES"
        else _strings(raw)
        for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }


def check_answers(url: str, variant: str, image: np.ndarray, expected: np.ndarray) -> None:
    """Stop if the served variant does not answer what the artefact answers in process.

    Shapes: image uint8 [1 h w c], expected float32 [1 classes].
    Raises: ServerFailed with both answers.
    """
    found = np.asarray(ask(url, tensor_request(variant, image, "logits"))["logits"])
    scale = _RELATIVE_TOLERANCE * max(1.0, float(np.abs(expected).max()))
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=0, atol=scale):
        raise ServerFailed(
            f"{variant} at {url} answers logits {np.round(found, 4).tolist()}, in process they are "
            f"{np.round(expected, 4).tolist()}. Write the repository again and restart the server."
        )


def routed_to(url: str, router: str, image: np.ndarray, budget: float) -> str:
    """The variant that the router chooses for a budget."""
    answer = ask(url, encoded_request(router, image, budget, "variant"))["variant"]
    return answer[0].decode() if isinstance(answer, list) else ""


def measure(
    generator: LoadGenerator,
    streams: Mapping[_Key, Stream],
    *,
    seconds: float,
    rounds: int,
    seed: int,
    advance: Advance,
) -> dict[_Key, list[LoadResult]]:
    """Each stream alone, once a round, in an order drawn anew: drift meets all alike.

    Units: seconds a stream over all rounds.
    Raises: ServerFailed if any request fails.
    """
    rng = np.random.default_rng(seed)
    keys = list(streams)
    found: dict[_Key, list[LoadResult]] = {key: [] for key in keys}
    for _ in range(rounds):
        for index in rng.permutation(len(keys)):
            key = keys[index]
            result = generator.run([streams[key]], seconds=seconds / rounds, warmup_s=WARMUP_S)
            found[key].append(refuse_errors(result, generator.url))
            advance(1, streams[key].name)
    return found


def point(stream: Stream, results: list[LoadResult]) -> dict[str, float]:
    """One point of the frontier: throughput, quantiles and the load generator's share."""
    latencies = np.concatenate([result.streams[stream.name].latencies_ms for result in results])
    quantiles = np.percentile(latencies, (50, 95, 99))
    client = sum(result.client_cpu_s for result in results)
    server = sum(sum(result.server_cpu_s.values()) for result in results)
    rates = [
        len(result.streams[stream.name].latencies_ms) * stream.images / result.seconds
        for result in results
    ]
    total = len(latencies) * stream.images / sum(result.seconds for result in results)
    return {
        "inferences_per_second": round(total, 2),
        "inferences_per_second_min": round(min(rates), 2),
        "inferences_per_second_max": round(max(rates), 2),
        **{f"p{q}_ms": round(float(v), 4) for q, v in zip((50, 95, 99), quantiles, strict=True)},
        "requests": len(latencies),
        "client_cpu_share": round(client / max(client + server, 1e-9), 4),
        "core_ms_per_request": round(1e3 * (client + server) / len(latencies), 4),
    }


def raw(stream: Stream, result: LoadResult) -> dict[str, Any]:
    """Everything one round saw of one stream, as plain values."""
    return {
        "seconds": result.seconds,
        "latencies_ms": list(result.streams[stream.name].latencies_ms),
        "client_cpu_s": result.client_cpu_s,
        "server_cpu_s": result.server_cpu_s,
        "statistics": result.statistics,
    }


def streams(
    url: str,
    router: str,
    budgets: Mapping[str, float],
    images: np.ndarray,
    expected: Mapping[str, np.ndarray],
    concurrency: Sequence[int],
) -> dict[tuple[str, str], Stream]:
    """What is measured of each variant: (variant, name of the point) -> stream.

    Shapes: images uint8 [n h w c], expected[variant] float32 [n classes].
    Raises: ServerFailed if a variant does not answer as expected.
    """
    single = [images[index : index + 1] for index in range(len(images))]
    found = {}
    for name, budget in budgets.items():
        check_answers(url, name, single[0], expected[name][:1])
        direct = tuple(tensor_request(name, image) for image in single)
        for clients in concurrency:
            stream = Stream(f"{name}, {clients} clients", name, clients, direct)
            found[name, f"concurrency_{clients}"] = stream
        # Of two precisions of one budget the router takes the faster: only that one is measured.
        if routed_to(url, router, single[0], budget) == name:
            encoded = tuple(encoded_request(router, image, budget) for image in single)
            stream = Stream(f"{name}, routed", router, 1, encoded)
            found[name, "router_concurrency_1"] = stream
    return found


def server_version(url: str) -> str:
    """The server's own name and version."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ServerMetadata(service_pb2.ServerMetadataRequest(), timeout=30)
    return f"{answer.name} {answer.version}"


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(buffer, "PNG")
    return buffer.getvalue()


def _array(datatype: str, raw_bytes: bytes) -> np.ndarray:
    return np.frombuffer(raw_bytes, _DTYPES[datatype])


def _strings(raw_bytes: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(raw_bytes):
        (length,) = struct.unpack_from("<I", raw_bytes, at)
        found.append(raw_bytes[at + 4 : at + 4 + length])
        at += 4 + length
    return found
