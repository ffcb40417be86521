# SPDX-License-Identifier: Apache-2.0
"""Notebooks of docs: what they call exists, and they are stored without outputs.

`make check-notebooks` runs them.
"""

import ast
import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def code_of(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_there_are_some():
    assert {path.stem for path in NOTEBOOKS} == {"export-to-serve", "choosing-a-budget"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs(path):
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_calls_exists(path):
    assert not unknown(code_of(path))


@pytest.mark.parametrize("line", ["nothing", "ExportOptions\nExportOptions(outs=1)"])
def test_what_does_not_exist_is_found(line):
    assert unknown(f"from saccade import {line}")


def unknown(code: str) -> list[str]:
    """Names of saccade, and keywords of what is called by them, that do not exist."""
    tree = ast.parse(code)
    names: dict[str, Any] = {}
    missing = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("saccade"):
            module = import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    missing.append(f"{node.module}.{alias.name}")
                    continue
                names[alias.asname or alias.name] = getattr(module, alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            known = inspect.signature(names[node.func.id]).parameters
            missing += [
                f"{node.func.id}({word.arg}=)" for word in node.keywords if word.arg not in known
            ]
    return missing
