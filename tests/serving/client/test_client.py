# SPDX-License-Identifier: Apache-2.0
"""The client against the real server: answers, splits, deadlines, and errors in words."""

import asyncio
import inspect
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from picture_files import png

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.serving.client.client import (
    AsyncClient,
    Client,
    Embeddings,
    check_embeddings_file,
    load_embeddings,
    routers_at,
    save_embeddings,
)
from saccade.serving.commands import cli

VARIANTS = ("nac-b1000-fp32", "nac-b0500-fp32", "nac-b0250-fp32", "nac-b0125-fp32")


def test_path_bytes_and_pixels_are_answered_alike(client, digit, tmp_path):
    path = tmp_path / "digit.png"
    path.write_bytes(png(digit[..., 0]))
    answers = client.classify([path, str(path), png(digit[..., 0]), digit, digit[:, :, 0]], top=2)
    assert len({answer.labels for answer in answers}) == 1
    assert answers[0].variant == VARIANTS[0]
    (first, second) = answers[0].labels
    assert first[0].startswith("digit ") and 1 >= first[1] >= second[1] >= 0
    assert len(client.classify([digit], top=99)[0].labels) == 10


def test_served_answer_equals_the_one_in_process(client, tiny_folder):
    ort = pytest.importorskip("onnxruntime")
    rng = np.random.default_rng(1)
    batch = rng.integers(0, 256, (5, 8, 8, 1), dtype=np.uint8)
    for budget, variant in zip((1, 0.5, 0.25, 0.125), VARIANTS, strict=True):
        session = ort.InferenceSession(tiny_folder / f"{variant}.onnx")
        names = ["probabilities", "embedding"]
        probabilities, embedding = session.run(names, {"image": batch})
        embeddings = client.embed(batch, budget=budget)
        np.testing.assert_allclose(embeddings.vectors, embedding, atol=1e-5)
        assert embeddings.variant == variant
        answers = client.classify(batch, budget=budget, top=10)
        for answer, row in zip(answers, probabilities, strict=True):
            served = [dict(answer.labels)[f"digit {digit}"] for digit in range(10)]
            np.testing.assert_allclose(served, row, atol=1e-5)


def test_many_images_are_split_and_keep_their_order(client):
    rng = np.random.default_rng(2)
    batch = rng.integers(0, 256, (150, 8, 8, 1), dtype=np.uint8)
    whole = client.embed(batch, budget=0.125)
    assert whole.vectors.shape[0] == 150
    picked = [0, 70, 149]
    alone = client.embed(batch[picked], budget=0.125)
    np.testing.assert_allclose(whole.vectors[picked], alone.vectors, atol=1e-5)


def test_asyncio_client_answers_the_same(server, client, digit):
    async def ask():
        async with AsyncClient(server.url, server.model) as other:
            calls = [other.classify([digit], budget=0.5) for _ in range(4)]
            classified = await asyncio.gather(*calls)
            return classified, await other.embed([digit]), await other.ready()

    classified, embedded, ready = asyncio.run(ask())
    assert classified == [client.classify([digit], budget=0.5)] * 4
    np.testing.assert_allclose(embedded.vectors, client.embed([digit]).vectors, atol=1e-6)
    assert ready


def test_both_clients_have_the_methods_of_the_operations():
    names = ("classify", "embed", "embed_text", "segment", "edit", "answer", "caption", "infer")
    for name in names:
        waiting, awaited = getattr(Client, name), getattr(AsyncClient, name)
        assert inspect.iscoroutinefunction(awaited) and not inspect.iscoroutinefunction(waiting)
        assert (waiting.__name__, waiting.__doc__) == (awaited.__name__, awaited.__doc__)
        assert waiting.__name__ == name and waiting.__doc__
        signature = inspect.signature(waiting)
        assert signature == inspect.signature(awaited)
        assert "Generator" not in str(signature)
    with Client() as client:
        assert list(inspect.signature(client.classify).parameters) == [
            "images", "budget", "min_score", "max_latency_ms", "top", "labels", "templates",
            "policy", "max_risk", "strict",
        ]  # fmt: skip
    assert inspect.signature(Client.embed).return_annotation is Embeddings


def test_ready_asks_every_variant(client, server):
    readiness = client.ready()
    assert readiness and readiness.router
    assert readiness.variants == dict.fromkeys(VARIANTS, True)
    assert routers_at(server.url) == ("nac",)


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"budget": 0.5, "min_score": 0.9}, "--budget, --min-score"),
        ({"budget": 0}, "budget is 0"),
        ({"budget": 1.5}, "budget is 1.5"),
        ({"budget": float("nan")}, "budget is nan"),
        ({"min_score": -1}, "min_score"),
        ({"max_latency_ms": float("inf")}, "max_latency_ms"),
        ({"top": 0}, "top: found 0"),
        ({"budget": 0.01}, "0.01"),
        ({"min_score": 0.9}, "saccade bench"),
        ({"budget": 0.5, "policy": "auto"}, "Found --budget, --policy together"),
        ({"policy": "auto", "max_risk": 0.1}, "Found --policy, --max-risk together"),
        ({"budget": 0.5, "max_latency_ms": 5}, "Found --budget, --max-latency-ms together"),
        ({"policy": "auto", "max_latency_ms": 0}, "max_latency_ms is 0, expected a finite"),
        ({"policy": "auto", "max_latency_ms": 5}, "nac has no policies. Run `saccade calibrate`"),
        ({"max_risk": 1}, "max_risk is 1, expected a number of at least 0 and below 1"),
        ({"max_risk": "low"}, "max_risk is 'low', expected"),
        ({"strict": True}, "Found --strict without --policy or --max-risk"),
        ({"policy": "0.01"}, "nac has no policies. Run `saccade calibrate`"),
        ({"max_risk": 0}, "nac has no policies. Run `saccade calibrate`"),
        ({"policy": "auto", "labels": ["a"]}, "Found labels together with a policy"),
    ],
)
def test_wrong_choice(client, digit, wrong, words):
    with pytest.raises(SaccadeError, match=words) as error:
        client.classify([digit], **wrong)
    assert error.value.exit_code == 2


def test_slots_of_another_number_follow_no_policy(client, digit):
    with pytest.raises(SaccadeError, match="Found --slots 3 together with a policy"):
        client.segment([digit], slots=3, policy="auto")
    with pytest.raises(SaccadeError, match="Found --budget, --max-risk together"):
        client.segment([digit], budget=1, max_risk=0.1)


@pytest.mark.parametrize(
    "given, words",
    [
        ([], "Found no image"),
        ("digit.png", "list"),
        (["missing.png"], "missing.png"),
        ([np.zeros((8, 8))], "uint8"),
        ([np.zeros((8, 8, 2), np.uint8)], r"\[8, 8, 2\]"),
        (np.zeros((8, 8, 1), np.uint8), r"\[n, h, w, c\]"),
        ([3], "int"),
        ([b"no image at all"], "JPEG, PNG or WebP"),
    ],
)
def test_wrong_image(client, given, words):
    with pytest.raises(SaccadeError, match=words) as error:
        client.classify(given)
    assert error.value.exit_code == 2
    assert "Traceback" not in str(error.value) and "/" not in str(error.value)


def test_empty_file_is_refused_before_it_is_sent(tmp_path):
    (tmp_path / "empty.png").touch()
    with pytest.raises(SaccadeError, match=r"empty\.png: found an empty file"):
        Client("127.0.0.1:9", "nac").classify([tmp_path / "empty.png"])


def test_server_that_is_not_there(digit):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    began = time.monotonic()
    for call in (lambda c: c.classify([digit]), lambda c: c.embed([digit]), lambda c: c.ready()):
        with Client(f"127.0.0.1:{port}", "nac") as client:
            with pytest.raises(ServerFailed, match="saccade serve") as error:
                call(client)
        assert f"127.0.0.1:{port}" in str(error.value) and error.value.exit_code == 3
    assert time.monotonic() - began < 30  # the time limit of one of these calls


def test_silent_server_meets_the_deadline(digit):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        url = f"127.0.0.1:{holder.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ServerFailed, match=r"within 0\.3 s"):
            Client(url, "nac", timeout_s=0.3).classify([digit])
        assert time.monotonic() - began < 20
    with pytest.raises(SaccadeError, match="timeout_s"):
        Client(url, "nac", timeout_s=0)


def test_unknown_model_and_a_variant_as_router(server, digit):
    with Client(server.url, "sparo") as client:
        with pytest.raises(SaccadeError, match=r"no model 'sparo'\. This server has: "):
            client.classify([digit])
    with Client(server.url, VARIANTS[0]) as client:
        with pytest.raises(SaccadeError, match="not a router"):
            client.ready()


def test_a_circuit_is_not_drawn_against_another(server, digit, tmp_path, capsys):
    image, out = tmp_path / "digit.png", tmp_path / "looked.png"
    image.write_bytes(png(digit[..., 0]))
    where = ("--model", server.model, "--url", server.url, "--out", str(out))
    assert cli.run(["show", str(image), "--against", "other", *where]) == 2
    assert "--against other: nac is a NAC" in capsys.readouterr().err and not out.exists()


def test_embeddings_of_different_variants_do_not_mix(client, digit, tmp_path):
    path = tmp_path / "embeddings.npz"
    cheap, full = client.embed([digit], budget=0.125), client.embed([digit, digit])
    save_embeddings(path, cheap, ["a"])
    before = path.read_bytes()
    with pytest.raises(SaccadeError, match="--append"):
        save_embeddings(path, cheap, ["a"])
    with pytest.raises(SaccadeError, match=f"{VARIANTS[3]}.*{VARIANTS[0]}"):
        save_embeddings(path, full, ["b", "c"], append=True)
    other_bytes = Embeddings(cheap.vectors, cheap.variant, "0" * 64)
    with pytest.raises(SaccadeError, match="different variants"):
        save_embeddings(path, other_bytes, ["b"], append=True)
    assert path.read_bytes() == before
    save_embeddings(path, cheap, ["b"], append=True)
    embeddings, names = load_embeddings(path)
    assert names == ("a", "b") and embeddings.vectors.shape == (2, cheap.vectors.shape[1])
    assert (embeddings.variant, embeddings.sha256) == (cheap.variant, cheap.sha256)
    save_embeddings(path, full, ["b", "c"], force=True)
    assert load_embeddings(path)[0].variant == VARIANTS[0]


@pytest.mark.parametrize("content", [b"", b"text", "pickle", "foreign"])
def test_foreign_file_is_not_appended_to(tmp_path, content):
    path = tmp_path / "embeddings.npz"
    if content == "pickle":
        np.savez(path, schema=np.array([{}], dtype=object))
    elif content == "foreign":
        np.savez(path, vectors=np.zeros((1, 2)))
    else:
        path.write_bytes(content)
    with pytest.raises(SaccadeError, match="found no embeddings of"):
        check_embeddings_file(path, append=True)
    with pytest.raises(SaccadeError, match="expected at most one"):
        check_embeddings_file(path, append=True, force=True)


def test_the_client_needs_neither_torch_nor_grpc_to_be_imported():
    heavy = ["torch", "onnx", "onnxruntime", "tritonclient.grpc", "grpc", "pytriton"]
    code = (
        "import sys; from saccade import AsyncClient, Client;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
