# SPDX-License-Identifier: Apache-2.0
"""`saccade serve --openai`: unmodified clients, wrong requests, failures, and who may ask."""

import base64
import gzip
import http.client
import io
import json
import os
import shutil
import signal
import socket
import struct
import threading
import time
from concurrent import futures
from contextlib import contextmanager

import numpy as np
import pytest
from family_folders import family_folder
from local_ports import free_port
from PIL import Image
from policy_files import write_policy

from saccade.core.errors import SaccadeError
from saccade.serving.client.client import Client
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.server import ServeOptions, Server
from saccade.serving.server.web_process import WebProcess, read_keys
from saccade.serving.web import api

openai = pytest.importorskip("openai", reason="pip install '.[dev]'")

FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
KEY, OTHER_KEY = "a-key-of-the-tests", "another-key-of-the-tests"
TEXTS = ["a red circle", "blue square"]
PIXELS = np.random.default_rng(3).integers(0, 256, (70, 16, 16, 3), dtype=np.uint8)


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


FILES = [png(pixels) for pixels in PIXELS]


def url_of(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def served(needs_server, tmp_path_factory):
    """A model of images and texts at two budgets, with labels and a policy; two keys."""
    place = tmp_path_factory.mktemp("openai")
    folder = shutil.copytree(family_folder("sparo"), place / "artefacts")
    write_policy(folder, "sure")
    (place / "labels.txt").write_text("red circle\nblue square\nsquare")
    (place / "keys.txt").write_text(f"{KEY}\n\n{OTHER_KEY}\n")
    deploy(folder, RepositoryOptions(out=place / "sparo", labels=place / "labels.txt"))
    options = ServeOptions(**FREE_PORTS, openai=0, openai_key_file=place / "keys.txt")
    with Server(place / "sparo", options) as server:
        yield server


@pytest.fixture(scope="module")
def web(served):
    """The unmodified client."""
    with openai.OpenAI(base_url=served.openai_url, api_key=KEY, max_retries=0) as connected:
        yield connected


@pytest.fixture
def grpc(served):
    with Client(served.url, served.model) as connected:
        yield connected


def send(server, body=b"", method="POST", path="/v1/embeddings", key=KEY, **headers):
    """Status, headers and content of the answer to a request as it is."""
    place = server.openai_url.removeprefix("http://").removesuffix("/v1")
    connection = http.client.HTTPConnection(place, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named |= {"Authorization": f"Bearer {key}"} if key else {}
    try:
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    "encoding", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}]
)
def test_texts_and_images_have_the_vectors_of_grpc(web, grpc, encoding):
    objects = [
        {"image": base64.b64encode(FILES[1]).decode()},
        {"type": "image_url", "image_url": {"url": url_of(FILES[2])}},
        {"text": TEXTS[1]},
    ]
    mixed = [TEXTS[0], url_of(FILES[0]), *objects]
    answer = web.embeddings.create(model="sparo@0.5", input=mixed, **encoding)
    images, texts = grpc.embed(PIXELS[:3], 0.5), grpc.embed_text(TEXTS, 0.5)
    expected = [texts.vectors[0], *images.vectors, texts.vectors[1]]
    vectors = [one.embedding for one in answer.data]
    if encoding.get("encoding_format") == "base64":
        vectors = [np.frombuffer(base64.b64decode(text), "<f4") for text in vectors]
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert [one.index for one in answer.data] == [0, 1, 2, 3, 4]
    assert answer.model == answer.usage.variant == images.variant
    assert answer.usage.answered_by == {images.variant: 3} and answer.usage.certificate is None
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 4


def test_floats_are_those_of_base64(web):
    """Every float32 arrives as it was."""
    floats = web.embeddings.create(model="sparo", input="red", encoding_format="float")
    raw = web.embeddings.create(model="sparo", input="red", encoding_format="base64")
    packed = struct.pack(f"<{len(floats.data[0].embedding)}f", *floats.data[0].embedding)
    assert base64.b64encode(packed).decode() == raw.data[0].embedding


def test_names_of_models_choose_the_variant(web, served):
    full, part, least = "sparo-b1000-fp32", "sparo-b0667-fp32", "sparo-b0167-fp32"
    names = {"sparo": full, "auto": full, "sparo@b0667": part, "b0667": part, part: part,
             "sparo@0.7": part, "sparo@2/3": part, "auto@0.5": least, "sparo@1": full}  # fmt: skip
    for name, variant in names.items():
        assert web.embeddings.create(model=name, input="red").usage.variant == variant, name
    listed = {model.id: model for model in web.models.list()}
    assert list(listed) == ["sparo", "sparo@b1000", "sparo@b0667", "sparo@b0167", "sparo@sure"]
    assert web.models.retrieve("sparo@b0667") == listed["sparo@b0667"]
    assert listed["sparo@b0667"].variant == part and listed["sparo"].variant == full
    with pytest.raises(openai.NotFoundError, match="expected sparo, sparo@b1000"):
        web.models.retrieve("clip")


def test_dimensions_are_those_of_a_variant(web):
    lengths = {model.id: model.dimensions for model in web.models.list()}
    assert lengths["sparo@b0667"] < lengths["sparo@b1000"]
    for name in ("sparo@b0667", "sparo@b1000"):
        for model in ("sparo", name):
            answer = web.embeddings.create(model=model, input="red", dimensions=lengths[name])
            assert len(answer.data[0].embedding) == lengths[name]
            assert f"sparo@{answer.usage.budget}" == name
    with pytest.raises(openai.BadRequestError) as refused:
        web.embeddings.create(model="sparo@b0667", input="red", dimensions=lengths["sparo@b1000"])
    assert refused.value.param == "dimensions"
    assert ", ".join(map(str, sorted({*lengths.values()}))) in str(refused.value)


def test_more_inputs_than_a_request_of_the_router_has(web, grpc):
    answer = web.embeddings.create(model="sparo", input=[url_of(file) for file in FILES])
    expected = grpc.embed(PIXELS)
    np.testing.assert_allclose([one.embedding for one in answer.data], expected.vectors, atol=1e-5)


def classes(web, **body):
    return web.post("/classify", body=body, cast_to=object)


def test_classes_are_those_of_grpc(web, grpc):
    urls = [url_of(file) for file in FILES[:3]]
    expected = grpc.classify(PIXELS[:3], budget=0.5, top=2)
    answer = classes(web, model="sparo@0.5", input=urls, top=2)
    assert [one["labels"] for one in answer["data"]] == [
        one.to_dict()["labels"] for one in expected
    ]
    assert [one["prediction"] for one in answer["data"]] == [one.labels[0][0] for one in expected]
    own = classes(web, model="sparo", input=urls, labels=["red circle", "square"], templates=["{}"])
    expected = grpc.classify(PIXELS[:3], labels=["red circle", "square"], templates=["{}"])
    assert [one["prediction"] for one in own["data"]] == [one.labels[0][0] for one in expected]


def test_a_policy_answers_with_its_certificate(web, grpc):
    urls = [url_of(file) for file in FILES[:20]]
    answer = classes(web, model="sparo@sure", input=urls, top=1)
    expected = grpc.classify(PIXELS[:20], policy="sure", top=1)
    assert [one["steps"] for one in answer["data"]] == [one.steps for one in expected]
    assert answer["usage"]["certificate"] == {"policy": "sure", "certified": True}
    assert answer["usage"]["answered_by"].keys() == {one.variant for one in expected}


def test_an_image_may_be_the_body(served, web):
    status, _, answer = send(
        served, FILES[0], path="/v1/classify?model=sparo", Content_Type="image/png"
    )
    assert status == 200
    assert answer["data"] == classes(web, model="sparo", input=url_of(FILES[0]))["data"]


def test_a_vector_store_finds_images_by_text(served, web):
    """LangChain's embeddings and store, which know nothing of saccade, nor of images."""
    langchain = pytest.importorskip("langchain_openai", reason="pip install '.[dev]'")
    from langchain_core.vectorstores import InMemoryVectorStore

    model = langchain.OpenAIEmbeddings(
        model="sparo@0.5", base_url=served.openai_url, api_key=KEY, check_embedding_ctx_length=False
    )
    store = InMemoryVectorStore(model)
    urls = [url_of(file) for file in FILES[:10]]
    store.add_texts(urls)
    found = store.similarity_search_with_score("a red circle", k=10)
    answer = web.embeddings.create(model="sparo@0.5", input=["a red circle", *urls])
    text, *images = (np.array(one.embedding) for one in answer.data)
    scores = [image @ text / np.linalg.norm(image) / np.linalg.norm(text) for image in images]
    np.testing.assert_allclose(
        [score for _, score in found], sorted(scores, reverse=True), atol=1e-5
    )
    assert found[0][0].page_content == urls[int(np.argmax(scores))]
    tokens = langchain.OpenAIEmbeddings(model="sparo", base_url=served.openai_url, api_key=KEY)
    tokens.tiktoken_enabled = True
    assert tokens.check_embedding_ctx_length  # see the refusal of tokens below


def body(**fields):
    return json.dumps({"model": "sparo", "input": "red", **fields}).encode()


WRONG = {
    "no JSON": (b"{", {}, 400, "not JSON", None),
    "NaN": (b'{"model": NaN}', {}, 400, "not JSON", None),
    "a list": (b"[1]", {}, 400, "expected an object with model and input", None),
    "deep": (b"[" * 150_000, {}, 400, "not JSON", None),
    "deep input": (b'{"input":' + b"[" * 900 + b"]" * 900 + b"}", {}, 400, "no model", "model"),
    "no model": (b'{"input": "red"}', {}, 400, "no model", "model"),
    "no input": (b'{"model": "sparo"}', {}, 400, "no input", "input"),
    "unknown field": (body(dimension=7), {}, 400, "Did you mean dimensions?", "dimension"),
    "model is a number": (body(model=1), {}, 400, "expected a string", "model"),
    "unknown model": (body(model="clip"), {}, 404, "'clip', expected sparo, sparo@b1000", "model"),
    "unknown budget": (body(model="sparo@0.01"), {}, 400, "no variant has a budget", None),
    "no number": (body(model="sparo@nan"), {}, 400, "above 0", None),
    "no such budget": (body(model="sparo@b7"), {}, 404, "'sparo@b7'", "model"),
    "dimensions": (body(dimensions=7), {}, 400, "dimensions: found 7", "dimensions"),
    "dimensions is text": (body(dimensions="7"), {}, 400, "whole number", "dimensions"),
    "hex": (body(encoding_format="hex"), {}, 400, "one of float, base64", "encoding_format"),
    "a caller with a slash": (body(user="a/b"), {}, 400, "without a slash", "user"),
    "empty list": (body(input=[]), {}, 400, "found a list of 0", "input"),
    "empty text": (body(input=""), {}, 400, "non-empty", None),
    "long text": (body(input="red " * 500), {}, 400, "Shorten it", None),
    "too many": (body(input=["red"] * 2049), {}, 400, "1 to 2048", "input"),
    "tokens": (body(input=[1, 2]), {}, 400, "check_embedding_ctx_length=False", "input[0]"),
    "lists of tokens": (body(input=[[1, 2]]), {}, 400, "own tokenizer", "input[0]"),
    "an address": (body(input="https://a.example/b.png"), {}, 400, "no address is ever", "input"),
    "an address in an object": (
        body(input=[{"image_url": {"url": "http://169.254.169.254/latest"}}]), {}, 400,
        "no address is ever fetched", "input[0]",
    ),
    "a file": (body(input=[{"image": "file:///etc/passwd"}]), {}, 400, "no address", "input[0]"),
    "not base64": (body(input="data:image/png;base64,?"), {}, 400, "base64 is broken", "input"),
    "percent": (body(input="data:image/svg+xml,%3C"), {}, 400, "expected data:image", "input"),
    "empty image": (body(input="data:image/png;base64,"), {}, 400, "0 bytes", "input"),
    "no image": (
        body(input=["red", url_of(b"not an image, but long enough")]), {}, 400,
        "input[1]: not a JPEG", "input[1]",
    ),
    "gzip": (gzip.compress(body()), {"Content_Encoding": "gzip"}, 415, "'gzip'", None),
    "large": (b" " * (api.BODY_BYTES + 1), {}, 413, "expected at most 34", None),
    "no key": (body(), {"key": None}, 401, "Found no key", None),
    "wrong key": (body(), {"key": "wrong"}, 401, "Found a wrong key", None),
    "GET": (body(), {"method": "GET"}, 405, "GET /v1/embeddings is not a route", None),
    "other route": (body(), {"path": "/v1/chat/completions"}, 404, "not a route", None),
    "another origin": (body(), {"Origin": "http://evil.example"}, 403, "another site", None),
    "NaN seconds": (body(), {"X_Request_Timeout": "nan"}, 400, "seconds", "x-request-timeout"),
    "no seconds": (body(), {"X_Request_Timeout": "-1"}, 400, "seconds", "x-request-timeout"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_refused(served, name):
    content, options, status, words, param = WRONG[name]
    found, headers, answer = send(served, content, **options)
    assert (found, headers["Content-Type"]) == (status, "application/json"), answer
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert words in answer["error"]["message"] and answer["error"]["param"] == param
    assert served.openai_url not in answer["error"]["message"]


def test_a_body_without_end_is_refused_and_not_kept(served, monkeypatch):
    """Chunks of which each is followed by another one, until the caller has read why."""
    place = served.options.host, served.options.openai
    with socket.create_connection(place, timeout=60) as caller:
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
        caller.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
        for _ in range(40):
            caller.sendall(chunk)
        caller.sendall(b"0\r\n\r\n")
        assert caller.recv(12) == b"HTTP/1.1 413"


def test_classes_of_texts_are_refused(web):
    with pytest.raises(openai.BadRequestError, match="expected images only"):
        classes(web, model="sparo", input="red")


def test_odd_headers_do_no_harm(served):
    odd = {"traceparent": "\xe9", "Host": "[::1", "tracestate": "a\tb"}
    assert send(served, body(), **odd)[0] == 200
    assert send(served, body(), path="/v1/embeddings/", **odd)[0] == 404


def test_each_key_opens(served):
    assert send(served, body(), key=OTHER_KEY)[0] == 200
    assert send(served, body(), key=OTHER_KEY[:-1])[0] == 401


def test_keys_are_read_from_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("short")
    with pytest.raises(SaccadeError, match="at least 16 characters"):
        read_keys(ServeOptions(openai=0, openai_key_file=file))
    with pytest.raises(SaccadeError, match="cannot be read"):
        read_keys(ServeOptions(openai=0, openai_key_file=tmp_path))
    with pytest.raises(SaccadeError, match="without --openai"):
        read_keys(ServeOptions(openai_key_file=file))
    with pytest.raises(SaccadeError, match="--openai-key-file FILE"):
        read_keys(ServeOptions(openai=0, host="0.0.0.0", accept_risk=True))
    assert read_keys(ServeOptions(openai=0)) == ()


# --- a router that fails, hangs or is away: a stand-in for the server answers over gRPC ---------


@contextmanager
def failing(served, answer):
    """An API, without a key, of a server whose `ModelInfer` is this function of its context."""
    import grpc
    from tritonclient.grpc import service_pb2

    with grpc.insecure_channel(served.url) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelConfig")
        config = ask(service_pb2.ModelConfigRequest(name="sparo").SerializeToString())
    methods = {
        "ModelConfig": grpc.unary_unary_rpc_method_handler(lambda _, context: config),
        "ModelInfer": grpc.unary_unary_rpc_method_handler(lambda _, context: answer(context)),
    }
    server = grpc.server(futures.ThreadPoolExecutor(4))
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods)
    server.add_generic_rpc_handlers((service,))
    options = ServeOptions(
        grpc_port=server.add_insecure_port("127.0.0.1:0"), openai=free_port(), grace_s=5
    )
    server.start()
    process = WebProcess(options, "sparo", ())
    process.openai_url = f"http://127.0.0.1:{options.openai}/v1"
    try:
        yield process
    finally:
        process.stop()
        server.stop(None)


BUSY = "variant 'a' is busy: it would take 4 s; try again in about 2.5 s"
FAILURES = {
    "busy": ("UNAVAILABLE", BUSY, 429, "3", "rate_limit_error"),
    "late": ("UNAVAILABLE", "the request's timeout ran out before", 504, None, "server_error"),
    "dead": ("UNAVAILABLE", "variant 'a' has died", 503, "1", "server_error"),
    "broken": ("INTERNAL", "no idea", 503, "1", "server_error"),
    "refused": ("INVALID_ARGUMENT", "two budgets", 400, None, "invalid_request_error"),
    "loading": ("NOT_FOUND", "unknown model", 503, "1", "server_error"),
}


def test_failures_have_the_status_that_clients_understand(served):
    import grpc

    current = []
    with failing(served, lambda context: context.abort(*current)) as process:
        for name, (code, details, status, later, kind) in FAILURES.items():
            current[:] = [getattr(grpc.StatusCode, code), details]
            found, headers, answer = send(process, body(), key=None)
            assert (found, headers["Retry-After"]) == (status, later), name
            assert answer["error"]["type"] == kind and "127.0.0.1" not in answer["error"]["message"]


def test_time_limits_and_callers_that_leave(served, eventually):
    """The server gets a little less time than gRPC; a call of a caller that left is cancelled."""
    left_s, cancelled = [], []

    def hang(context):
        left_s.append(context.time_remaining())
        end = time.monotonic() + 20
        while context.is_active() and time.monotonic() < end:
            time.sleep(0.01)
        cancelled.append(time.monotonic())

    with failing(served, hang) as process:
        status, _, answer = send(process, body(), key=None, X_Request_Timeout="3")
        assert status == 504 and "X-Request-Timeout" in answer["error"]["message"]
        assert 0 < left_s[0] <= 3.11
        with openai.OpenAI(base_url=process.openai_url, api_key="none", max_retries=0) as web:
            with pytest.raises(openai.APITimeoutError):
                web.with_options(timeout=3).embeddings.create(model="sparo", input="red")
        assert left_s[1] <= 3.11  # as the client says in its own header
        eventually(lambda: len(cancelled) == 2, usually_s=1.0)
        with socket.create_connection(("127.0.0.1", int(process.openai_url[17:-3]))) as caller:
            text = body()
            head = f"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(text)}"
            caller.sendall(f"{head}\r\n\r\n".encode() + text)
            eventually(lambda: len(left_s) == 3, usually_s=1.0)
        eventually(lambda: len(cancelled) == 3, usually_s=1.0)


def test_other_sites_are_refused_without_a_key(served):
    with failing(served, lambda context: context.abort(1, "")) as process:
        for headers in (
            {"Host": "rebound.example"},
            {"Sec_Fetch_Site": "cross-site"},
            {"Host": "[::1"},
        ):
            assert send(process, body(), key=None, **headers)[0] == 403, headers
        assert send(process, method="GET", path="/health", key=None)[0] == 200


def test_a_process_that_dies_is_started_again(served, eventually):
    with failing(served, lambda context: context.abort(1, "")) as process:
        assert send(process, method="GET", path="/health", key=None)[0] == 200
        before = process.pid
        os.kill(before, signal.SIGKILL)
        eventually(lambda: process.pid not in (0, before), usually_s=1.0)
        # The socket is open all the time: a new caller waits for the new process.
        assert send(process, method="GET", path="/health", key=None)[0] == 200
    assert not process.is_alive()


def test_calls_that_run_are_finished_at_the_end(served):
    import grpc

    started, end = threading.Event(), threading.Event()

    def slow(context):
        started.set()
        end.wait(10)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "finished")

    with failing(served, slow) as process, futures.ThreadPoolExecutor() as pool:
        call = pool.submit(send, process, body(), key=None)
        assert started.wait(10)
        stopped = pool.submit(process.stop)
        time.sleep(0.3)
        end.set()
        status, _, answer = call.result()
        assert status == 400 and "finished" in answer["error"]["message"]
        stopped.result()
