# SPDX-License-Identifier: Apache-2.0
"""The library in ONNX Runtime: kernel with it, body without it, and what it says to wrong input."""

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from one_node import one_node_model
from ops_implementations import built_library

from saccade.plugins.ops import OPS

X = np.random.default_rng(0).standard_normal((3, 5, 8)).astype(np.float32)
V0 = np.random.default_rng(1).standard_normal(8).astype(np.float32)
SIZES = np.array([[5, 8], [2, 3], [0, 4]])
FEEDS = {
    "Sparsemax": (X,),
    "TVMax": (X,),
    "MaskedTVMax": (X, SIZES),
    "SvPN": (X,),
    "SvPNFast": (X, V0),
}
WRONG = {
    "lam": (-1.0, np.inf, np.nan),
    "tolerance": (0.0, -1e-6, np.inf),
    "max_iterations": (0, -3),
    "alpha": (0.0, -0.5, 1.5, np.nan),
    "singular_values": (-1,),
    "iterations": (0, -1),
    "epsilon": (-1e-5, np.inf),
}


@pytest.fixture(scope="session")
def path() -> Path:
    return Path(built_library())


@pytest.fixture
def session(path: Path) -> Callable[..., Any]:
    """Makes a session of a model with the library."""

    def make(model: Any, *, with_library: bool = True, threads: int = 1, profile: str = "") -> Any:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        if with_library:
            options.register_custom_ops_library(str(path))
        if profile:
            options.enable_profiling, options.profile_file_prefix = True, profile
        return ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    return make


def feeds(name: str, *arrays: np.ndarray) -> dict[str, np.ndarray]:
    given = arrays or FEEDS[name]
    return {port.name: array for port, array in zip(OPS[name].inputs, given, strict=True)}


def node_model(name: str, **attributes: Any) -> Any:
    """A node called `here` with exactly these attributes, checked by nobody so far."""
    model = one_node_model(OPS[name], body=False)
    node = model.graph.node[0]
    node.name = "here"
    del node.attribute[:]
    node.attribute.extend(
        onnx.helper.make_attribute(*attribute) for attribute in attributes.items()
    )
    return model


def executed(session: Any) -> list[str]:
    """Operator types of the nodes that ran, from the runtime's own profile."""
    events = json.loads(Path(session.end_profiling()).read_text())
    return [
        event["args"]["op_name"]
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    ]


@pytest.mark.parametrize("name", OPS)
def test_kernel_with_the_library_and_body_without(
    name: str, session: Callable[..., Any], tmp_path: Path
) -> None:
    op = OPS[name]
    model = one_node_model(op, body=True)
    answers = {}
    for with_library in (True, False):
        profiled = session(
            model, with_library=with_library, profile=str(tmp_path / f"with-{with_library}")
        )
        answers[with_library] = profiled.run(None, feeds(name))
        ran = executed(profiled)
        if with_library:
            assert ran == [name]
        else:
            assert len(ran) > 3
            assert name not in ran
    expected = op.reference(*FEEDS[name], **op.defaults({}))
    for answer in answers.values():
        assert [each.dtype for each in answer] == [np.float32] * len(expected)
        away = np.abs(answer[0] - expected[0]) / op.scale(expected[0])
        assert away.max() <= op.tolerance["float32"]


@pytest.mark.parametrize("name", OPS)
def test_defaults_are_the_contract(name: str, session: Callable[..., Any]) -> None:
    bare = session(node_model(name)).run(None, feeds(name))
    written = session(one_node_model(OPS[name], body=False)).run(None, feeds(name))
    for one, other in zip(bare, written, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("name", "attribute", "value"),
    [
        (name, attribute, value)
        for name, op in OPS.items()
        for attribute in op.attributes
        for value in WRONG[attribute]
    ],
)
def test_an_attribute_out_of_range_fails_the_session(
    name: str, attribute: str, value: Any, session: Callable[..., Any]
) -> None:
    with pytest.raises(Exception) as refused:
        session(node_model(name, **{attribute: value}))
    allowed = OPS[name].attributes[attribute].allowed
    said = f"saccade::{name} (node 'here'): {attribute} is {value:g}, expected {allowed}."
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "attribute", "value", "words"),
    [
        ("TVMax", "lam", 1, "lam is an integer attribute, expected a float attribute"),
        ("TVMax", "lam", "much", "lam is neither a float nor an integer"),
        ("TVMax", "lam", [0.1, 0.2], "lam is neither a float nor an integer"),
        ("TVMax", "max_iterations", 5.0, "max_iterations is a float attribute, expected an int"),
        ("TVMax", "alpha", 0.5, "unknown attribute 'alpha'. It has: lam, tolerance, max_iter"),
        ("Sparsemax", "axis", 1, "unknown attribute 'axis'. It has: none."),
        ("SvPN", "epsilon", 1e-5, "unknown attribute 'epsilon'. It has: alpha."),
    ],
)
def test_a_wrong_attribute_fails_the_session(
    name: str, attribute: str, value: Any, words: str, session: Callable[..., Any]
) -> None:
    with pytest.raises(Exception) as refused:
        session(node_model(name, **{attribute: value}))
    assert f"saccade::{name} (node 'here'): {words}" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "arrays", "words"),
    [
        ("Sparsemax", (X[0, 0, 0],), "input X has shape [], expected X [... n]"),
        ("TVMax", (V0,), "input Z has shape [8], expected Z [... h w]"),
        ("SvPN", (V0,), "input Q has shape [8], expected Q [... m n]"),
        ("SvPNFast", (X, V0[:7]), "Q has shape [3, 5, 8], input v0 [7], expected Q [... m n]"),
        ("SvPNFast", (X, V0[None]), "input v0 [1, 8], expected"),
        ("MaskedTVMax", (X, SIZES[:2]), "input sizes [2, 2], expected Z [... h w], sizes [... 2]"),
        ("MaskedTVMax", (X, SIZES[0]), "input sizes [2], expected"),
        ("MaskedTVMax", (X, SIZES[:, :1]), "input sizes [3, 1], expected"),
        ("MaskedTVMax", (X, np.array(2)), "input sizes [], expected"),
        ("MaskedTVMax", (X, SIZES + np.array([0, 5])), "grid 0 are [5, 13], expected 0 to 5 and"),
        ("MaskedTVMax", (X, SIZES - np.array([0, 4])), "grid 1 are [2, -1], expected 0 to 5"),
    ],
)
def test_a_wrong_shape_fails_the_run(
    name: str, arrays: tuple, words: str, session: Callable[..., Any]
) -> None:
    made = session(node_model(name))
    with pytest.raises(Exception) as refused:
        made.run(None, feeds(name, *(np.asarray(array) for array in arrays)))
    assert f"saccade::{name} (node 'here'): " in str(refused.value)
    assert words in str(refused.value)
    # The session is as good as before.
    assert made.run(None, feeds(name))[0].shape == X.shape


def test_a_wrong_type_fails_the_session(session: Callable[..., Any]) -> None:
    model = node_model("Sparsemax")
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    with pytest.raises(Exception, match=r"tensor\(int32\).*Sparsemax.*here"):
        session(model)


@pytest.mark.parametrize("name", OPS)
def test_answers_do_not_depend_on_threads(name: str, session: Callable[..., Any]) -> None:
    first = np.random.default_rng(2).standard_normal((600, 16, 16)).astype(np.float32)
    rest = {"MaskedTVMax": (np.tile([[16, 9]], (600, 1)),), "SvPNFast": (V0.repeat(2),)}
    given = feeds(name, first, *rest.get(name, ()))
    alone = session(node_model(name)).run(None, given)
    together = session(node_model(name), threads=3).run(None, given)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_shapes_are_known_before_a_run(session: Callable[..., Any]) -> None:
    model = one_node_model(OPS["TVMax"], axes={"Z": "b 3 h 7"}, body=False)
    p, error = session(model).get_outputs()
    assert (p.shape, p.type) == (["b", 3, "h", 7], "tensor(float)")
    assert (error.shape, error.type) == (["b", 3], "tensor(float)")


def test_a_runtime_that_is_too_old_is_told(path: Path) -> None:
    create_status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    said = []

    @create_status
    def status(code: int, message: bytes) -> int:
        said.append(message.decode())
        return 1

    table = (create_status * 1)(status)
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)
    version = ctypes.create_string_buffer(b"1.16.3")

    class Base(ctypes.Structure):
        _fields_ = (("get_api", get_api), ("get_version", get_version))

    base = Base(
        get_api(lambda asked: ctypes.addressof(table) if asked < 17 else None),
        get_version(lambda: ctypes.addressof(version)),
    )
    register = ctypes.CDLL(str(path)).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, ctypes.byref(base)) == 1
    assert said == ["libsaccade_onnxruntime: this ONNX Runtime is 1.16.3, expected 1.17 or newer."]
