# SPDX-License-Identifier: Apache-2.0
"""A model that calls the ops in the embedded server's backend, with and without the library."""

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest
from one_node import one_node_model
from ops_implementations import built_library
from places import PACKAGE
from router_code import router_module

from saccade.plugins.ops import OPS

BACKEND = PACKAGE / "model_repository" / "onnxruntime_backend"


@pytest.fixture
def open_session(monkeypatch):
    """The backend's own function; what only the server provides is not needed for it."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    name = "triton_python_backend_utils"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "tracing", router_module("tracing"))  # lies beside it there
    spec = importlib.util.spec_from_file_location("backend_of_ops", BACKEND / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.open_session


def open_repository(open_session, folder, *, body, library=None):
    axes = {"Z": "b 4 4", "P": "b 4 4", "error": "b"}
    model = one_node_model(OPS["TVMax"], attributes={"lam": 0.1}, axes=axes, body=body)
    (folder / "1").mkdir(exist_ok=True)
    (folder / "1" / "model.onnx").write_bytes(model.SerializeToString())
    config = {"max_batch_size": 8}
    if library:
        config["model_operations"] = {"op_library_filename": [str(library)]}
    arguments = {"model_repository": str(folder), "model_version": "1"}
    return open_session(config, arguments)[1]


def test_config_names_the_library(open_session, tmp_path):
    z = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
    (exact, _) = OPS["TVMax"].reference(z, lam=0.1)
    # Without a body only the kernel can answer.
    p, error = open_repository(open_session, tmp_path, body=False, library=built_library()).run(
        None, {"Z": z}
    )
    np.testing.assert_allclose(p, exact, atol=1e-5)
    assert (error <= 1e-6).all()
    p, error = open_repository(open_session, tmp_path, body=True).run(None, {"Z": z})
    np.testing.assert_allclose(p, exact, atol=1e-5)
    assert (error <= 1e-5).all()


def test_without_library_and_body_the_model_is_refused(open_session, tmp_path):
    with pytest.raises(Exception, match="saccade"):
        open_repository(open_session, tmp_path, body=False)
