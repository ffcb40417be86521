# SPDX-License-Identifier: Apache-2.0
"""A model that calls the ops in the embedded server's backend, with and without the library."""

import importlib.util

import numpy as np
import pytest
from one_node import one_node_model
from ops_implementations import built_library
from places import PACKAGE

from saccade.plugins.ops import OPS

BACKEND = PACKAGE / "model_repository" / "onnxruntime_backend"


@pytest.fixture
def open_session(pb):
    """The backend's own function."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    spec = importlib.util.spec_from_file_location("backend_of_ops", BACKEND / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel().open


def open_repository(open_session, folder, *, body, library=None):
    axes = {"Z": "b 4 4", "P": "b 4 4", "error": "b"}
    model = one_node_model(OPS["TVMax"], attributes={"lam": 0.1}, axes=axes, body=body)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    names = {"op_library_filename": [str(library)]} if library else {}
    return open_session({"model_operations": names}, folder / "model.onnx")


def test_config_names_the_library(open_session, tmp_path):
    z = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
    (exact, _) = OPS["TVMax"].reference(z, lam=0.1)
    # Without a body only the kernel can answer.
    run = open_repository(open_session, tmp_path, body=False, library=built_library())
    p, error = run(None, {"Z": z})
    np.testing.assert_allclose(p, exact, atol=1e-5)
    assert (error <= 1e-6).all()
    p, error = open_repository(open_session, tmp_path, body=True)(None, {"Z": z})
    np.testing.assert_allclose(p, exact, atol=1e-5)
    assert (error <= 1e-5).all()


def test_without_library_and_body_the_model_is_refused(open_session, tmp_path):
    with pytest.raises(Exception, match="saccade"):
        open_repository(open_session, tmp_path, body=False)
