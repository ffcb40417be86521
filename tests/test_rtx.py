# SPDX-License-Identifier: Apache-2.0
"""TensorRT-RTX compiles every exported graph for its batch range; it needs no GPU for that."""

from pathlib import Path

import pytest
from rtx_builds import build, needs_rtx


@needs_rtx
@pytest.mark.parametrize("name", ["nac-b1000-fp32", "nac-b0125-fp32"])
def test_builds_an_engine(name: str, tiny_folder: Path) -> None:
    built = build(tiny_folder / f"{name}.onnx")
    assert built["inputs"] == {"image": "DataType.UINT8"}
    assert built["outputs"] == ["logits", "probabilities", "embedding"]
