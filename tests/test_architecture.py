# SPDX-License-Identifier: Apache-2.0
"""The shape of the tree: arrows, sizes, one copy of every module, no machine's traces."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("plugins", "models", "export", "serving")
SOURCES = sorted(
    path
    for folder in ("saccade", *LAYERS, "model_repository")
    for path in (ROOT / folder).rglob("*.py")
)
CORE = {"__version__", "interruption"}  # of the package itself, below every layer
ALL_CODE = sorted({*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")})


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_layers(path: Path) -> set[str]:
    """Layers of saccade that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name_of(path)}: write imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("saccade.")}
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_follow_the_arrows(layer):
    allowed = set(LAYERS[: LAYERS.index(layer) + 1])
    if layer == "serving":
        allowed |= {"model_repository"}
    for path in (ROOT / layer).rglob("*.py"):
        extra = imported_layers(path) - allowed - CORE
        assert not extra, f"{name_of(path)} imports {sorted(extra)}"


def test_what_runs_in_the_server_imports_nothing_of_saccade():
    for path in (ROOT / "model_repository").rglob("*.py"):
        assert not imported_layers(path), name_of(path)


@pytest.mark.parametrize("path", ALL_CODE, ids=name_of)
def test_file_is_short_and_says_what_it_is(path):
    text = path.read_text()
    lines = text.splitlines()
    # Most thoughts take 100 to 250 lines; what is larger is rarely one.
    assert len(lines) <= 500, f"{len(lines)} lines: look for the noun that is hiding in it"
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a file says in one line what it is"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = node.end_lineno - node.lineno + 1 - docstring_lines(node)
            assert size <= 40, f"{node.name} has {size} lines"


def docstring_lines(node: ast.AST) -> int:
    first = node.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first.end_lineno - first.lineno + 1 if is_text else 0


def test_vague_names_are_not_used():
    vague = {"utils", "helpers", "common", "base", "manager", "misc"}
    assert not [name_of(path) for path in ALL_CODE if path.stem in vague]


def test_every_package_of_the_tree_is_listed():
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    found = {"saccade"}
    for folder in (*LAYERS, "model_repository"):
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join(("saccade", *init.parent.relative_to(ROOT).parts)))
    assert found == listed


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "tests"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    ["saccade", "saccade.serving.client", "saccade.serving.cli", "saccade.export.manifest"],
)
def test_importing_does_not_load_frameworks(module):
    heavy = ["torch", "onnx", "onnxruntime", "onnxscript", "sklearn", "matplotlib"]
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_no_second_copy_of_a_layer_is_imported():
    # From the root `import models` would succeed too and make a second copy of everything.
    bare = [layer for layer in (*LAYERS, "model_repository") if layer in sys.modules]
    assert not bare


def test_repository_names_no_machine():
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\0")
    pattern = re.compile(r"/(home|root|Users|tmp|work)/[a-zA-Z_.]|index-url|find-links")
    for name in filter(None, files):
        path = ROOT / name
        if path.suffix in {".png", ".safetensors", ".npz"} or path == Path(__file__).resolve():
            continue
        found = path.exists() and pattern.search(path.read_text(errors="replace"))
        assert not found, f"{name}: {found.group(0) if found else ''}"
