# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests to the HTTP API: forms of inputs, and fields. No server is needed."""

import base64

import pytest

from saccade.serving.web.bodies import (
    MOST_INPUTS,
    ClassifyBody,
    EmbeddingsBody,
    WebRefusal,
    read_body,
    read_inputs,
)

IMAGE = b"\x89PNG and more"
TEXT = base64.b64encode(IMAGE).decode()
URL = f"data:image/png;base64,{TEXT}"
FORMS = {
    "text": ("a red circle", "a red circle"),
    "text with a colon": ("data: what it is, and how", "data: what it is, and how"),
    "text in an object": ({"type": "text", "text": URL}, URL),
    "an address as text": ({"text": "https://a.example"}, "https://a.example"),
    "data URL": (URL, IMAGE),
    "data URL in capitals": (f"DATA:image/PNG;BASE64,{TEXT}", IMAGE),
    "chat": ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, IMAGE),
    "responses": ({"type": "input_image", "image_url": URL}, IMAGE),
    "base64": ({"image": TEXT}, IMAGE),
    "an address within a text": ("see https://a.example", "see https://a.example"),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_an_input(name):
    given, expected = FORMS[name]
    assert read_inputs(given) == [expected]
    assert read_inputs(["a", given]) == ["a", expected]


REFUSED = [
    {"image_url": {"url": "http://127.0.0.1:8002/metrics"}}, {"image": "file:///etc/passwd"},
    "FTP://a.example/b", {"image": "//a.example/b.png"}, {"image": URL[:-3]},
    {"image": f"{TEXT}\n"}, "data:image/svg+xml,%3Csvg%3E",
    {"image": 7}, {}, {"image": TEXT, "text": "both"}, {"video": TEXT}, [], ["nested"], [1, 2], 1,
    True, None, 0.5, {"image_url": {"url": None}},
]  # fmt: skip


@pytest.mark.parametrize("given", REFUSED, ids=str)
def test_other_inputs_are_refused(given):
    with pytest.raises(WebRefusal, match=r"input\[1\]: found") as refused:
        read_inputs(["a", given])
    assert (refused.value.status, refused.value.param) == (400, "input[1]")


def test_as_many_inputs_as_vector_stores_send():
    assert len(read_inputs(["a"] * MOST_INPUTS)) == 2048
    with pytest.raises(WebRefusal, match="2049"):
        read_inputs(["a"] * (MOST_INPUTS + 1))


def test_null_is_as_good_as_no_value():
    body = read_body(EmbeddingsBody, {"model": "m", "input": "a", "user": None, "dimensions": None})
    assert body == EmbeddingsBody(model="m", input="a")
    assert read_body(ClassifyBody, {"model": "m", "input": "a", "labels": ["b"]}).labels == ("b",)
    with pytest.raises(WebRefusal, match="The body has no input"):
        read_body(EmbeddingsBody, {"model": "m", "input": None})


@pytest.mark.parametrize("field", ["labels", "prompt", "__class__"])
def test_no_field_is_dropped_silently(field):
    with pytest.raises(WebRefusal) as refused:
        read_body(EmbeddingsBody, {"model": "m", "input": "a", field: 1})
    assert refused.value.param == field
