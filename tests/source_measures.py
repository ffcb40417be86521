# SPDX-License-Identifier: Apache-2.0
"""What the sources measure: code lines, files, and how modules depend on each other."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
from places import PACKAGE, ROOT, package_files
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

ROUTER = PACKAGE / "model_repository" / "router"
SOURCES = package_files()
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# A module, or an object in one, that code names as text to import it late.
_AS_TEXT = re.compile(r"saccade((?:\.\w+)+)(?::\w+)?")


def module_of(path: Path) -> str:
    """The name under which a file is imported, without the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts).removesuffix("__init__").rstrip(".")


# The server imports the router's files by bare names, from their folder.
MODULES = {module_of(path): path for path in SOURCES}
_OF_ROUTER = {path.stem: module_of(path) for path in ROUTER.glob("*.py")}


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def code_lines(path: Path) -> int:
    """Lines that are neither blank, nor comment, nor docstring."""
    lines = map(str.strip, path.read_text().splitlines())
    code = {number for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    for node in statements(tree_of(path)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            code.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(code)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements, however deep. They are a fifth of the nodes, and expressions contain none."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        inner = ast.iter_child_nodes(node)
        left += [each for each in inner if isinstance(each, NESTING)]


NESTING = (ast.stmt, ast.excepthandler, ast.match_case)


def with_stub(path: Path) -> list[Path]:
    """The file, and the table of its names for type checkers if it has one."""
    return [file for file in (path, path.with_suffix(".pyi")) if file.is_file()]


@cache
def imported_names(path: Path) -> frozenset[str]:
    """The full names that a file imports anywhere in it, late or for its types."""
    names: set[str] = set()
    for node in (node for file in with_stub(path) for node in statements(tree_of(file))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: write imports in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """The modules that a file imports as parts of saccade."""
    imports = set()
    for name in imported_names(path):
        first, _, inner = name.partition(".")
        if first == "saccade":
            imports.add(inner if inner in MODULES else inner.rpartition(".")[0])
    return frozenset(imports - {""})


def neighbours(path: Path) -> set[str]:
    """The modules of saccade that a file imports; in the router, also by bare names."""
    found = set(imported_modules(path))
    if path.parent == ROUTER:
        found |= {_OF_ROUTER.get(name.partition(".")[0], "") for name in imported_names(path)}
    return found & MODULES.keys() - {module_of(path)}


@cache
def modules_named_as_text(path: Path) -> frozenset[str]:
    """The modules of saccade in texts like `saccade.models.nac.fold:FoldedNAC`."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = _AS_TEXT.fullmatch(node.value)
            if match and match[1][1:] in MODULES:
                found.add(match[1][1:])
    return frozenset(found)


def circles_of(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of modules that reach each other."""
    names = sorted(graph)
    place = {name: index for index, name in enumerate(names)}
    edges = [(place[name], place[other]) for name, others in graph.items() for other in others]
    starts, ends = zip(*edges, strict=True) if edges else ((), ())
    matrix = csr_array((np.ones(len(edges)), (starts, ends)), shape=(len(names), len(names)))
    _, groups = connected_components(matrix, connection="strong")
    members = [[name for name, own in zip(names, groups, strict=True) if own == group]
               for group in range(max(groups, default=-1) + 1)]  # fmt: skip
    return sorted(tuple(group) for group in members if len(group) > 1)


def circles() -> list[tuple[str, ...]]:
    """Circles of imports; late ones, those for types, and those written as text count."""
    own = MODULES.keys() - {"", "__main__"}  # public names are imported when they are asked for
    return circles_of(
        {
            module: (neighbours(path) | modules_named_as_text(path)) & own - {module}
            for module, path in MODULES.items()
            if module in own
        }
    )


def single_importers() -> list[str]:
    """Modules that one other imports: most have no noun of their own, and belong into that file."""
    importers = defaultdict(set)
    for module, path in MODULES.items():
        for other in neighbours(path):
            importers[other].add(module)
    return sorted(
        module
        for module, own in importers.items()
        if len(own) == 1 and MODULES[module].stem != "__init__"
    )


def repeated_class_names() -> list[str]:
    """Names of classes that stand in two or more files."""
    files = defaultdict(set)
    for path in SOURCES:
        for node in statements(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(path)
    return sorted(name for name, own in files.items() if len(own) > 1)


def _code(folder: str) -> int:
    return sum(code_lines(path) for path in (ROOT / folder).rglob("*.py"))


def _raises() -> int:
    return sum(
        isinstance(node, ast.Raise) for path in SOURCES for node in statements(tree_of(path))
    )


# The names are those of measures.toml.
MEASURES: dict[str, Callable[[], int]] = {
    "code lines": lambda: sum(code_lines(file) for path in SOURCES for file in with_stub(path)),
    "files": lambda: len(SOURCES),
    "raise statements": _raises,
    "files with one importer": lambda: len(single_importers()),
    "class names in two or more files": lambda: len(repeated_class_names()),
    "circles of imports": lambda: len(circles()),
    "code lines of tests": lambda: _code("tests"),
    "code lines of benchmarks": lambda: _code("benchmarks"),
}
