# SPDX-License-Identifier: Apache-2.0
"""Any output's classes may be asked for, over gRPC and HTTP: the server lives, and answers."""

import json
import urllib.request

import numpy as np
import pytest

from saccade.serving.client.readiness import small_picture

grpc = pytest.importorskip("tritonclient.grpc")
OUTPUTS = ("logits", "probabilities", "embedding", "variant", "variant_sha256")
COUNTS = (1, 1000, 2**31, 2**32 + 1, 2**62)


@pytest.fixture(scope="module")
def connection(server):
    with grpc.InferenceServerClient(server.url) as made:
        yield made


def asked(connection, output, count):
    """One image's classes of an output, over gRPC."""
    given = grpc.InferInput("image", [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([[small_picture()]], dtype=object))
    wanted = grpc.InferRequestedOutput(output)
    wanted._get_tensor().parameters["classification"].int64_param = count
    return connection.infer("nac", [given], outputs=[wanted]).as_numpy(output)


def posted(server, *outputs, **parameters):
    """The data of each output of one image, over HTTP, by its name."""
    body = small_picture()
    payload = len(body).to_bytes(4, "little") + body
    image = {
        "name": "image", "shape": [1, 1], "datatype": "BYTES",
        "parameters": {"binary_data_size": len(payload)},
    }  # fmt: skip
    content = {"inputs": [image], "outputs": outputs, "parameters": parameters}
    head = json.dumps(content).encode()
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/nac/infer", head + payload,
        {"Inference-Header-Content-Length": str(len(head))},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=30) as response:
        return {value["name"]: value["data"] for value in json.load(response)["outputs"]}


def wanted(name, **parameters):
    return {"name": name, "parameters": {"binary_data": False, **parameters}}


@pytest.mark.parametrize("output", OUTPUTS)
def test_classes_over_grpc(server, connection, output):
    pid = server.pid
    for count in COUNTS:
        assert len(asked(connection, output, count)) == 1
    for count in (0, -1, -(2**63)):
        with pytest.raises(grpc.InferenceServerException, match="classification"):
            asked(connection, output, count)
    assert server.pid == pid


@pytest.mark.parametrize("output", OUTPUTS)
def test_classes_over_http(server, output):
    pid = server.pid
    for count in (0, *COUNTS):
        assert set(posted(server, wanted(output, classification=count))) == {output}
    assert server.pid == pid


def test_no_output_of_a_router_is_strings(connection):
    outputs = connection.get_model_metadata("nac").outputs
    assert {value.name for value in outputs} == {*OUTPUTS, "saccade_lanes"}
    assert "BYTES" not in {value.datatype for value in outputs}


def test_answers_over_http_are_those_over_grpc(server, client):
    actual = posted(server, wanted("logits"), wanted("variant"), budget=0.25)
    assert bytes(actual["variant"]) == b"nac-b0250-fp32"
    expected = client.infer({"image": [small_picture()]}, outputs=["logits"], budget=0.25)
    np.testing.assert_allclose(actual["logits"], expected["logits"][0], rtol=1e-4, atol=1e-5)
