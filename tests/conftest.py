# SPDX-License-Identifier: Apache-2.0
"""What several test files share: one tiny checkpoint, one folder exported from it."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def tiny_nac() -> Callable[..., Any]:
    """The maker of tiny checkpoints: `tiny_nac(path, modules=8)`."""
    pytest.importorskip("torch", reason="torch is not installed: pip install 'saccade[export]'")
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tiny_nac


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_nac: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 16 modules with random weights; treat it as read-only."""
    return tiny_nac(tmp_path_factory.mktemp("checkpoint") / "nac.safetensors").path


@pytest.fixture(scope="session")
def tiny_folder(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint exported as `nac` at budgets 1, 0.5, 0.25, 0.125; copy it to change it."""
    from saccade.export.exported import ExportOptions, export

    return export(
        tiny_checkpoint, ExportOptions(tmp_path_factory.mktemp("exported") / "nac")
    ).folder
