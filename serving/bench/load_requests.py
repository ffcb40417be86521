# SPDX-License-Identifier: Apache-2.0
"""Serialize requests before a run, and get the answer to a single one."""

import io
from collections.abc import Mapping
from contextlib import closing

import numpy as np

from saccade.core.errors import ServerFailed
from saccade.serving.client.connection import SERVICE, connect
from saccade.serving.client.request_sizes import FIRST_S
from saccade.serving.client.wire import TEXTS, as_texts, infer_message

Answer = dict[str, np.ndarray | list[bytes]]


def request(
    model: str,
    inputs: Mapping[str, np.ndarray],
    outputs: tuple[str, ...],
    parameters: Mapping[str, str] | None = None,
) -> bytes:
    """Return a serialized ModelInferRequest.

    Shapes: inputs [b ...], of numbers or of objects that are bytes. An input [b] is sent as [b 1],
        as the server declares it.
    """
    rows = {name: array[:, None] if array.ndim == 1 else array for name, array in inputs.items()}
    return bytes(infer_message(model, rows, outputs, parameters or {}).SerializeToString())


def tensor_request(model: str, images: np.ndarray, *outputs: str) -> bytes:
    """Return a serialized request to a variant that takes images, with a raw tensor.

    Shapes: images uint8 [b h w c].
    """
    return request(model, {"image": images}, outputs or ("probabilities",))


def encoded_request(router: str, images: np.ndarray, budget: float, *outputs: str) -> bytes:
    """Return a serialized request to the router, with images as PNG files and a budget.

    Shapes: images uint8 [b h w c].
    """
    parameters = {"budget": repr(float(budget))}
    return request(router, {"image": png_files(images)}, outputs or ("probabilities",), parameters)


def png_files(images: np.ndarray) -> np.ndarray:
    """Return images as the bytes of PNG files.

    Shapes: uint8 [b h w c] -> object [b 1].
    """
    files = np.empty((len(images), 1), dtype=object)
    for row, image in zip(files, images, strict=True):
        row[0] = _png(image)
    return files


def ask(url: str, message: bytes, *, timeout_s: float = FIRST_S) -> Answer:
    """Send one serialized request and return its answer, by output name.

    Raises: ServerFailed if the server refuses it or does not answer.
    """
    import grpc
    from tritonclient.grpc import InferResult, service_pb2

    parse = service_pb2.ModelInferResponse.FromString
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(url, options=unlimited) as channel:
        try:
            answer = channel.unary_unary(f"{SERVICE}/ModelInfer", response_deserializer=parse)(
                message, timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise ServerFailed(
                f"{url}: {error.code().name}: {error.details()}. See the server's log."
            ) from error
    result = InferResult(answer)
    return {
        value.name: _values(value.name, result.as_numpy(value.name)) for value in answer.outputs
    }


def server_version(url: str) -> str:
    """Return the name and version that the server reports."""
    with closing(connect(url)) as connection:
        answer = connection.get_server_metadata(client_timeout=30)
    return f"{answer.name} {answer.version}"


def _png(image: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image).save(buffer, "PNG")
    return buffer.getvalue()


def _values(name: str, values: np.ndarray) -> np.ndarray | list[bytes]:
    if values.dtype == object:
        return list(values.ravel())
    return list(as_texts(values)[:, 0]) if name in TEXTS else values
