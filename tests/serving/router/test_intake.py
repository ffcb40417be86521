# SPDX-License-Identifier: Apache-2.0
"""Intake and answers of the router, without a server: inputs, axes, parameters, slots, texts."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from router_code import family_module, router_module

from saccade.models.slot_attention.initial import initial_states
from saccade.serving.client.answers import captions
from saccade.serving.client.wire import texts
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import notices

routing, checks = map(router_module, ("routes", "plain_family"))
Refused = router_module("choose").RequestRefused

IMAGE = routing.TensorRoute("image", "b 4 4 1", "uint8")
STATE = routing.TensorRoute("initial_state", "b k 6", "float32")
WORDS = routing.TensorRoute("words", "b n", "int64")
COUNT = routing.TensorRoute("n", "b", "int64")
SLOTS = routing.ComponentRoute((IMAGE, STATE), ("masks",), ("initial_state",), ("image",))
TEXT = routing.ComponentRoute((WORDS, COUNT), ("code",), (), ())


def route(**changes):
    """A variant; what it costs and scores is of no account here."""
    fields = {**dict.fromkeys(routing.Route._fields), "name": "m-b1000-fp32", "facts": {}}
    return routing.Route(**fields | changes)


def routes(**parts):
    return routing.Routes("m", "any", None, parts or {"": SLOTS, "text": TEXT}, (route(),))


@pytest.fixture
def captioner(pb):
    """The captioner's side of the router, and its module."""
    module = family_module("captioner")
    step = routing.ComponentRoute((COUNT,), (), (), ())
    components = routes(encode=routing.ComponentRoute((IMAGE,), (), (), ("image",)), step=step)
    return module.Family(components), module


def test_a_component_is_known_by_its_inputs(captioner):
    both = routes().components
    for given in ({"image"}, {"image", "initial_state"}):
        assert checks.component_for(both, given) == ""
    assert checks.component_for(both, {"words", "n"}) == "text"
    for given in ({"words"}, {"initial_state"}, {"image", "words"}, set()):
        with pytest.raises(Refused, match=r"expected image \[and initial_state\], or words and n"):
            checks.component_for(both, given)
    with pytest.raises(Refused, match="inputs are n; expected image"):
        checks.component_for(captioner[0].components(), {"n"})


def test_axes_of_one_name_are_of_one_size():
    def check(words, count):
        given = {"words": np.zeros(words, np.int64), "n": np.zeros(count, np.int64)}
        checks.check_axes(given, routes(), "text")

    check((3, 5), (3, 1))
    for shapes in (((3, 5), (2, 1)), ((3, 0), (3, 1)), ((3, 5), (3,)), ((3, 5), (3, 2))):
        with pytest.raises(Refused, match="has shape"):
            check(*shapes)
    image = {"image": np.zeros((2, 4, 5, 1), np.uint8)}
    with pytest.raises(Refused, match=r"input image has shape \[2, 4, 5, 1\], expected \[b 4 4 1"):
        checks.check_axes(image, routes(), "")
    # Encoded images have no axes yet.
    checks.check_axes({"image": np.array([[b"png"]], dtype=object)}, routes(), "")


def test_a_request_has_a_sample():
    rows = {"a": np.zeros((2, 3)), "b": np.zeros((2, 1))}
    assert checks.count_rows(rows) == 2
    with pytest.raises(Refused, match="has no sample"):
        checks.count_rows({"a": np.zeros((0, 3))})


def test_own_parameters_are_whole_and_in_their_range(captioner):
    slots, rule = family_module("slot_attention"), {"kind": "learned", "slots": [[0.0] * 6] * 5}
    known = route(facts={"initial_state": rule, "slots": 5})

    refused = slots.RequestRefused

    def taken(given=frozenset({"image"}), role="", **parameters):
        return slots.Family(routes()).read(known, role, set(given), parameters)

    assert taken(seed="3", slots=5.0, budget=1) == {"seed": 3, "slots": 5}
    assert taken() == {}
    for wrong in ({"seed": -1}, {"seed": 2**31}, {"slots": 0}, {"slots": 1.5}, {"slots": True}):
        with pytest.raises(refused, match="expected a whole number from"):
            taken(**wrong)
    with pytest.raises(
        slots.RequestRefused, match="slots is 6, expected 1 to 5, the number of learned slots"
    ):
        taken(slots=6)
    for inputs, role in (({"image", "initial_state"}, ""), ({"slots"}, "decode")):
        with pytest.raises(refused, match="seed draws the initial state"):
            taken(inputs, role, seed=1)
    family, module = captioner
    read = family.read(route(), "encode", {"image"}, {"end": 2, "beam": 64})
    assert read == {"end": "2", "beam": 64}
    for wrong, words in (({"beam": 65}, "from 1 to 64"), ({"end": True}, "a word or a token")):
        with pytest.raises(module.RequestRefused, match=words):
            family.read(route(), "encode", {"image"}, wrong)


def test_a_search_costs_its_hypotheses_steps(captioner):
    searching = route(facts={"beam": 3, "max_length": 20})
    plain = router_module("plain_family").PlainFamily(routes())
    assert plain.work(searching, 4, {}) == 4
    assert captioner[0].work(searching, 4, {}) == 4 * 3 * 20
    assert captioner[0].work(searching, 4, {"beam": 1, "max_length": 5}) == 4 * 5


def test_labels_are_scored_by_the_cosine(tmp_path):
    vectors = np.eye(3, dtype=np.float32)[:2]
    np.save(tmp_path / "classes.npy", vectors)
    labelled = route(classes="classes.npy", facts={"logit_scale": 10.0})
    known = checks.Labels(tmp_path, (labelled, route(name="other")))
    assert known.known(labelled, "image") and not known.known(labelled, "text")
    assert not known.known(route(name="other"), "image")
    scores = known.scores(labelled, np.array([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]], np.float32))
    np.testing.assert_allclose(scores["logits"], [[6, 8], [0, 0]], atol=1e-5)
    chances = 1 / (1 + np.exp(2.0))
    np.testing.assert_allclose(scores["probabilities"], [[chances, 1 - chances], [0.5, 0.5]], 1e-5)


def test_the_router_draws_by_the_numbers_of_the_request():
    rule = {"kind": "gaussian", "mean": [1.0] * 6, "std": [0.5] * 6, "positions": "uniform",
            "scale_mean": 0.1, "scale_std": 0.2}  # fmt: skip
    component = SimpleNamespace(optional=("initial_state",))
    family = family_module("slot_attention").Family(SimpleNamespace(components={"": component}))
    route = SimpleNamespace(facts={"initial_state": rule, "slots": 5})
    for parameters, expected in (
        ({}, initial_states(rule, 4, 5)),
        ({"seed": 3, "slots": 2, "first_image": 7}, initial_states(rule, 4, 2, seed=3, first=7)),
    ):
        inputs = {"image": None}
        family.fill(route, SimpleNamespace(role="", rows=4, parameters=parameters), inputs)
        np.testing.assert_array_equal(inputs["initial_state"], expected)


@pytest.mark.parametrize(
    ("inputs", "parameters", "found"),
    [
        ({"image", "initial_state"}, {}, "initial_state"),
        ({"image"}, {"slots": 4}, "slots"),
        ({"slots", "positions"}, {}, "positions"),
        ({"image"}, {"seed": 4}, None),
    ],
)
def test_a_policy_is_only_for_slots_that_are_drawn_as_in_the_calibration(inputs, parameters, found):
    family = family_module("slot_attention").Family(SimpleNamespace())
    ticket = SimpleNamespace(inputs=dict.fromkeys(inputs), parameters=parameters)
    if found is None:
        family.check_followed(ticket)
        return
    with pytest.raises(
        router_module("choose").RequestRefused, match=f"found {found} in a request with a policy"
    ):
        family.check_followed(ticket)


text_rows = checks.text_rows
SAID = ["a dog", "", "ein Hündchen, 狗"]


def answered(**outputs):
    """An answer as the server's client gives it."""
    return SimpleNamespace(as_numpy=outputs.get)


@pytest.mark.parametrize("said", [SAID, ["", ""], ["one"]])
def test_texts_come_back_from_rows_of_bytes(said):
    rows = text_rows(said)
    assert rows.dtype == np.uint8 and rows.shape[0] == len(said) and rows.size
    assert texts(answered(caption=rows), "caption") == said


def test_captions_are_read_with_their_attention():
    maps = np.zeros((3, 2, 1, 1), np.float32)
    maps[0, :2] = maps[2, :1] = 1
    read = captions(answered(caption=text_rows(SAID), attention=maps, variant=text_rows(["v"] * 3)))
    assert [(each.text, len(each.attention)) for each in read] == list(
        zip(SAID, (2, 0, 1), strict=True)
    )


def test_http_is_warned_of():
    assert [level for level, _ in notices(ServeOptions())] == [logging.INFO]
    warnings = list(notices(ServeOptions(http=True)))
    assert [level for level, _ in warnings] == [logging.WARNING, logging.INFO]
    assert "HTTP is on" in warnings[0][1] and "MemoryMax" in warnings[1][1]
