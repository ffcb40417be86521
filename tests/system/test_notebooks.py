# SPDX-License-Identifier: Apache-2.0
"""Notebooks of docs: what they call exists, and their outputs are those of their code.

`make check-notebooks` runs them; `docs_site/notebooks.py --run` stores what they print.
"""

import ast
import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from places import ROOT, module_at

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def code_of(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_there_are_some():
    assert {path.stem for path in NOTEBOOKS} == {"export-to-serve", "choosing-a-budget"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_the_outputs_of_its_code(path):
    site = module_at(ROOT / "docs_site" / "notebooks.py")
    notebook = json.loads(path.read_text())
    assert notebook["metadata"][site.CODE] == site.code_sha256(notebook), "run it again"
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] is None for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    said = json.dumps(outputs)
    assert not re.search(r"/(?:tmp|home|root|work)/|error|Traceback", said)
    assert any("image/png" in output.get("data", ()) for output in outputs)
    page = site.page(notebook, path.name)
    assert page.startswith("# ") and f'<a href="{path.name}" download>' in page
    assert page.count("```python\n") == len(cells) and page.count("<img ") >= 1
    assert all("".join(cell["source"]) in page for cell in notebook["cells"][1:])


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
