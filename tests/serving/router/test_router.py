# SPDX-License-Identifier: Apache-2.0
"""The router and the variants behind a running server: right answers, classes, clean refusals."""

import asyncio
import io
import json
import re
import urllib.error
import urllib.request

import numpy as np
import pytest
from PIL import Image

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.serving.client.readiness import small_picture

grpc = pytest.importorskip("tritonclient.grpc")


BUDGETS = {1.0: "nac-b1000-fp32", 0.5: "nac-b0500-fp32", 0.25: "nac-b0250-fp32",
           0.125: "nac-b0125-fp32"}  # fmt: skip
OUTPUTS = ("logits", "probabilities", "embedding")
PIXELS = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 1), dtype=np.uint8)
# What must not reach a caller: a path, a place in a source file, a trace, an address in memory.
LEAK = re.compile(r"(^|[\s'\"(])/\w+|\.py\b|Traceback|File \"|line \d+|0x[0-9a-f]{4}|<class|\bAt:")


def test_the_search_for_leaks_can_find_one():
    for text in (
        "failed: /opt/models/nac/1/model.py", "AttributeError: x\n\nAt:\n  y(45): initialize",
        'File "model", line 3', "<object at 0x7f3a>",
    ):  # fmt: skip
        assert LEAK.search(text)
    assert not LEAK.search("image is 9 x 8 pixels, at most 16384 pixels per side are allowed")


def encode(image, kind="PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(pixels) -> bytes:
    return encode(Image.fromarray(pixels[..., 0]))


def files(*contents: bytes):
    given = grpc.InferInput("image", [len(contents), 1], "BYTES")
    given.set_data_from_numpy(np.array([[content] for content in contents], dtype=object))
    return [given]


def tensor(pixels, datatype="UINT8"):
    given = grpc.InferInput("image", list(pixels.shape), datatype)
    given.set_data_from_numpy(pixels)
    return [given]


def names(result, output="variant") -> set[str]:
    """The texts of an output, as a caller without saccade reads them."""
    return {row.tobytes().decode() for row in result.as_numpy(output)}


@pytest.fixture(scope="module")
def connection(server):
    with grpc.InferenceServerClient(server.url) as made:
        yield made


@pytest.fixture(scope="module")
def in_process(tiny_folder):
    """The answers of each variant's file to PIXELS, by ONNX Runtime in this process."""
    onnxruntime = pytest.importorskip("onnxruntime")
    answers = {}
    for manifest in ArtefactFolder(tiny_folder).manifests:
        session = onnxruntime.InferenceSession(str(tiny_folder / manifest.file.name))
        answers[manifest.variant.name] = dict(
            zip(OUTPUTS, session.run(OUTPUTS, {"image": PIXELS}), strict=True)
        )
    return answers


def assert_answers(result, expected, rows):
    for name in OUTPUTS:
        np.testing.assert_allclose(
            result.as_numpy(name), expected[name][rows], rtol=1e-4, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 8), slice(0, 17), slice(0, 64)])
@pytest.mark.parametrize("variant", BUDGETS.values())
def test_a_served_answer_is_the_in_process_one(connection, in_process, variant, rows):
    result = connection.infer(variant, tensor(PIXELS[rows]))
    assert_answers(result, in_process[variant], rows)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_routed_answer_is_the_in_process_one(connection, in_process, tiny_folder, budget):
    contents = [png(pixels) for pixels in PIXELS]
    result = connection.infer("nac", files(*contents), parameters={"budget": budget})
    assert_answers(result, in_process[BUDGETS[budget]], slice(None))
    hashes = {
        manifest.variant.name: manifest.file.sha256
        for manifest in ArtefactFolder(tiny_folder).manifests
    }
    assert names(result, "variant") == {BUDGETS[budget]}
    assert names(result, "variant_sha256") == {hashes[BUDGETS[budget]]}
    assert len(result.as_numpy("variant")) == len(PIXELS)


@pytest.mark.parametrize("value", ["0.25", 0.25, 0.3])
def test_parameters_are_read_from_every_kind_of_value(connection, value):
    result = connection.infer("nac", files(png(PIXELS[0])), parameters={"budget": value})
    assert names(result) == {"nac-b0250-fp32"}


def test_the_default_is_the_full_budget_and_only_what_was_asked_for_is_sent(connection):
    wanted = [grpc.InferRequestedOutput("variant")]
    result = connection.infer("nac", files(png(PIXELS[0])), outputs=wanted)
    assert names(result) == {"nac-b1000-fp32"}
    assert [value.name for value in result.get_response().outputs] == ["variant"]


@pytest.mark.parametrize("routed", [False, True])
def test_classification_extension(connection, in_process, tiny_folder, routed):
    wanted = [grpc.InferRequestedOutput("probabilities", class_count=3)]
    model, given = "nac-b0500-fp32", tensor(PIXELS[:2])
    if routed:
        model, given = "nac", files(*(png(pixels) for pixels in PIXELS[:2]))
    result = connection.infer(
        model, given, outputs=wanted, parameters={"budget": 0.5} if routed else None
    )
    labels = ArtefactFolder(tiny_folder).manifests[0].labels
    for row, expected in zip(
        result.as_numpy("probabilities"),
        in_process["nac-b0500-fp32"]["probabilities"],
        strict=False,
    ):
        best = np.argsort(-expected)[:3]
        for entry, index in zip(row, best, strict=True):
            score, actual, label = entry.decode().split(":")
            assert (int(actual), label) == (index, labels[index])
            assert float(score) == pytest.approx(expected[index], abs=1e-4)


def test_a_load_of_mixed_budgets_gets_its_own_variant_and_rows(server, in_process):
    async def load():
        from tritonclient.grpc import aio

        async with aio.InferenceServerClient(server.url) as connection:

            async def one(index):
                budget = list(BUDGETS)[index % 4]
                rows = np.arange(index, index + 1 + index % 3) % 64
                contents = [png(PIXELS[row]) for row in rows]
                result = await connection.infer(
                    "nac", files(*contents), parameters={"budget": budget}
                )
                assert names(result) == {BUDGETS[budget]}
                assert_answers(result, in_process[BUDGETS[budget]], rows)

            await asyncio.gather(*(one(index) for index in range(200)))

    asyncio.run(load())


def test_a_bad_request_does_not_spoil_its_mates(server, in_process):
    async def load():
        from tritonclient.grpc import aio
        from tritonclient.utils import InferenceServerException

        async with aio.InferenceServerClient(server.url) as connection:

            async def one(index):
                broken = index % 3 == 0
                content = png(PIXELS[index])[: 40 if broken else None]
                try:
                    result = await connection.infer("nac", files(content))
                except InferenceServerException:
                    assert broken
                else:
                    assert not broken
                    assert_answers(result, in_process["nac-b1000-fp32"], slice(index, index + 1))

            await asyncio.gather(*(one(index) for index in range(60)))

    asyncio.run(load())


GOOD = png(PIXELS[0])
NOISE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8))
FRAMES = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 90)]
INVALID = {
    "two parameters": ("nac", files(GOOD), {"budget": 1.0, "min_score": 0.5}, "expected one of"),
    "unknown parameter": ("nac", files(GOOD), {"buget": 1.0}, "expected one of budget"),
    "a truth": ("nac", files(GOOD), {"budget": True}, "budget is True"),
    "not a number": ("nac", files(GOOD), {"budget": float("nan")}, "budget is nan"),
    "out of range": ("nac", files(GOOD), {"budget": 2}, "at most 1"),
    "none meets": ("nac", files(GOOD), {"budget": 0.01}, "nac-b0125-fp32: budget 0.125"),
    "no frontier": ("nac", files(GOOD), {"min_score": 0.5}, "saccade bench"),
    "0 bytes": ("nac", files(b""), {}, "0 bytes"),
    "text": ("nac", files(b"/etc/passwd is no image"), {}, "JPEG, PNG or WebP"),
    "truncated": ("nac", files(encode(NOISE, "JPEG")[:-200]), {}, "truncated"),
    "20,000 pixels wide": ("nac", files(encode(Image.new("1", (20_000, 1)))), {}, "16384"),
    "100,000 x 10": ("nac", files(encode(Image.new("1", (100_000, 10)))), {}, "make it smaller"),
    "one pixel": ("nac", files(encode(Image.new("L", (1, 1)))), {}, "1 x 1 pixels, expected at"),
    "animated": (
        "nac", files(encode(FRAMES[0], "PNG", save_all=True, append_images=FRAMES)), {}, "frames",
    ),
    "the second image": ("nac", files(GOOD, b"x"), {}, "image 1: not a JPEG, PNG or WebP file"),
    "65 images": ("nac", files(*[GOOD] * 65), {}, "must be <= 64"),
    "65 images, direct": (
        "nac-b0125-fp32", tensor(np.zeros((65, 8, 8, 1), np.uint8)), {}, "must be <= 64",
    ),
    "pixels for the router": ("nac", tensor(PIXELS[:1]), {}, "expects 'BYTES'"),
    "another type": (
        "nac-b0125-fp32", tensor(np.zeros((1, 8, 8, 1), np.float32), "FP32"), {}, "'UINT8'",
    ),
    "another shape": (
        "nac-b0125-fp32", tensor(np.zeros((1, 8, 8, 3), np.uint8)), {}, "unexpected shape",
    ),
    "no input": ("nac", [], {}, "expected 1 inputs"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_refuses_and_leaks_nothing(connection, case):
    model, given, parameters, words = INVALID[case]
    with pytest.raises(grpc.InferenceServerException) as caught:
        connection.infer(model, given, parameters=parameters)
    assert "INVALID_ARGUMENT" in caught.value.status()
    assert words in caught.value.message()
    assert not LEAK.search(caught.value.message())


def test_time_that_has_run_out_is_not_spent(connection):
    with pytest.raises(grpc.InferenceServerException) as caught:
        connection.infer("nac", files(GOOD), timeout=1)
    assert "UNAVAILABLE" in caught.value.status()
    assert "timeout" in caught.value.message()
    assert not LEAK.search(caught.value.message())


def test_unknown_names_leak_nothing(server, connection):
    for model, version in (("nax", ""), ("nac", "7"), ("../nac", ""), ("nac/../../etc", "")):
        with pytest.raises(grpc.InferenceServerException) as caught:
            connection.infer(model, files(GOOD), model_version=version)
        assert not LEAK.search(caught.value.message().replace(model, ""))
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.http_url}/v2/models/nac/infer", b"nonsense", timeout=30)
    assert not LEAK.search(refused.value.read().decode())


ROUTER_OUTPUTS = ("logits", "probabilities", "embedding", "variant", "variant_sha256")
COUNTS = (1, 1000, 2**31, 2**32 + 1, 2**62)


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


@pytest.mark.parametrize("output", ROUTER_OUTPUTS)
def test_classes_over_grpc(server, connection, output):
    pid = server.pid
    for count in COUNTS:
        assert len(asked(connection, output, count)) == 1
    for count in (0, -1, -(2**63)):
        with pytest.raises(grpc.InferenceServerException, match="classification"):
            asked(connection, output, count)
    assert server.pid == pid


@pytest.mark.parametrize("output", ROUTER_OUTPUTS)
def test_classes_over_http(server, output):
    pid = server.pid
    for count in (0, *COUNTS):
        assert set(posted(server, wanted(output, classification=count))) == {output}
    assert server.pid == pid


def test_no_output_of_a_router_is_strings(connection):
    outputs = connection.get_model_metadata("nac").outputs
    assert {value.name for value in outputs} == {*ROUTER_OUTPUTS, "saccade_lanes"}
    assert "BYTES" not in {value.datatype for value in outputs}


def test_answers_over_http_are_those_over_grpc(server, client):
    actual = posted(server, wanted("logits"), wanted("variant"), budget=0.25)
    assert bytes(actual["variant"]) == b"nac-b0250-fp32"
    expected = client.infer({"image": [small_picture()]}, outputs=["logits"], budget=0.25)
    np.testing.assert_allclose(actual["logits"], expected["logits"][0], rtol=1e-4, atol=1e-5)
