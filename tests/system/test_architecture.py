# SPDX-License-Identifier: Apache-2.0
"""The shape of the tree: arrows, sizes, one copy of every module, no machine's traces."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import LINKED, PACKAGE, ROOT
from source_measures import (
    MODULES,
    SOURCES,
    imported_modules,
    imported_names,
    statements,
)

from saccade.exporter.runtimes.runtime import RUNTIMES
from saccade.models.families import FAMILIES

LAYERS = ("plugins", "models", "exporter", "serving")
# Each package imports those of lines above its own; a package stands for the packages in it, too,
# but for those that have a place of their own. One family imports nothing of another.
ORDER = (
    {"core"},
    {"plugins"},
    {"models.shipped"},
    {"models"},
    {"models.layers"},
    {"models.scores"},
    {"models.data"},
    {"models.training"},
    {package.removeprefix("saccade.") for package in FAMILIES.values()},
    {"models.official"},
    {"exporter.artefact"},
    {"exporter.runtimes"},
    {"exporter.policy"},
    {"exporter.graph"},
    {"exporter.runtimes.tensorrt", "exporter.runtimes.openvino"},
    {"exporter.gate"},
    {"exporter.quantization"},
    {"exporter.evaluation"},
    {"exporter"},
    {"serving.client"},
    {"serving.repository"},
    {"serving.local"},
    {"serving.web"},
    {"serving.server"},
    {"serving.bulk"},
    {"serving.bench"},
    {"serving.commands"},
)
# Pure files of the router that `serving` applies too.
OF_THE_ROUTER = {"routes", "choose", "confidence", "spaces", "tracing"}
PLACE = {package: line for line, packages in enumerate(ORDER) for package in packages}
ALL_CODE = sorted({*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")})


def name_of(path: Path) -> str:
    """Within the package, or from the root."""
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT))


def package_of(module: str) -> str:
    """The package with a place in the order; of `saccade` itself, the core."""
    while module and module not in PLACE:
        module = module.rpartition(".")[0]
    return module or "core"


def test_every_package_has_a_place():
    packages = {module.rpartition(".")[0] for module in MODULES if module.startswith(LAYERS)}
    packages -= {"", *LAYERS}
    assert not {
        package for package in packages if package_of(package) in ("core", "models", "exporter")
    }


def test_imports_follow_the_arrows():
    wrong = [
        f"{module} imports {other}"
        for module in sorted(MODULES.keys() - {"", "__main__", "serving"})
        for other in imported_modules(MODULES[module])
        if not may_import(package_of(module), other)
    ]
    assert not wrong


def may_import(own: str, other: str) -> bool:
    if other.startswith("model_repository"):
        return own.startswith("serving.") and other.rpartition(".")[2] in OF_THE_ROUTER
    package = package_of(other)
    return package == own or PLACE[package] < PLACE[own]


def test_folders_of_the_root_are_imported_as_parts_of_saccade():
    """In a clone, the current folder would let `import serving` load a second copy of a module."""
    bare = {folder.resolve().name for folder in LINKED}
    first = {path: {name.partition(".")[0] for name in imported_names(path)} for path in ALL_CODE}
    assert len(bare) == 5 and not [name_of(path) for path in ALL_CODE if bare & first[path]]


def test_only_training_and_its_command_import_training():
    for module, path in MODULES.items():
        # The package's own names are imported when they are asked for.
        if module and ".training" not in module and not module.startswith("serving.commands"):
            trained = {module for module in imported_modules(path) if ".training" in module}
            assert not trained, f"{module} imports {sorted(trained)}"


def compared_texts(tree: ast.AST) -> set[str]:
    """The texts that code asks for: in comparisons, keys, sets, subscripts, Literals, patterns."""
    asked: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            asked += [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            asked += node.keys
        elif isinstance(node, ast.Set):
            asked.append(node)
        elif isinstance(node, ast.Subscript):
            asked.append(node.slice)
        elif isinstance(node, ast.MatchValue):
            asked.append(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked += node.args if node.func.attr in {"get", "pop", "startswith", "require"} else []
    return {text for node in asked if node is not None for text in texts_of(node)}


def texts_of(node: ast.AST) -> set[str]:
    """A text, or the texts of a tuple, list or set."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    inner = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else ()
    return {text for each in inner for text in texts_of(each)}


def test_a_family_is_named_in_its_own_folder_alone():
    """Differences between families are in their entries; converters name theirs as data."""
    official = PACKAGE / "models" / "official"
    others = [
        path
        for path in SOURCES
        if not path.is_relative_to(official) and name_of(path) != "models/families.py"
    ]
    asked = {name_of(path): names for path in others if (names := other_families(path))}
    assert not asked, "put it into the FamilyEntry"


def other_families(path: Path) -> set[str]:
    """The families with another folder whose names the code of a file compares."""
    folders = {name: PACKAGE / "models" / name.replace("-", "_") for name in FAMILIES}
    others = {name for name, folder in folders.items() if not path.is_relative_to(folder)}
    names = others | {folders[name].name for name in others}
    text = path.read_text()
    if not re.search(f"['\"]({'|'.join(names)})['\"]", text):
        return set()
    return compared_texts(ast.parse(text)) & names


@pytest.mark.parametrize(
    "code",
    ["x == 'vqa'", "x in ('nac', 'vqa')", "{'vqa': 1}", "x = {'vqa'}", "Literal['nac', 'vqa']",
     "x['vqa']", "x.get('vqa')", "match x:\n  case 'vqa': pass"],
)  # fmt: skip
def test_names_that_are_asked_for_are_found(code):
    assert "vqa" in compared_texts(ast.parse(code))
    assert "vqa" not in compared_texts(ast.parse("train('vqa', x == 'other')"))


def test_what_runs_in_the_server_imports_nothing_of_saccade():
    for path in (PACKAGE / "model_repository").rglob("*.py"):
        assert not imported_modules(path), name_of(path)


def test_processes_of_our_own_are_workers():
    """Server and proxy are no programs of ours, what cleans up behind them has to outlive its
    parent, and what answers web clients inherits a socket.
    """
    assert {name_of(path) for path in SOURCES if "Popen" in path.read_text()} == {
        "core/worker.py",
        "serving/server/envoy_process.py",
        "serving/server/process.py",
        "serving/server/run_folder.py",
        "serving/server/web_process.py",
    }
    forked = re.compile(r"multiprocessing|ProcessPoolExecutor|os\.fork|sys\.executable, \"-m\"")
    assert not [name_of(path) for path in SOURCES if forked.search(path.read_text())]


# Where a runtime's name may stand. The second is the server's side of each: its checks know models
# and options of `serving`, of which `export` imports nothing.
OF_RUNTIMES = ("exporter/runtimes/", "serving/repository/runtimes/")
# The same word is the name of a package, or of a folder of the server; nobody compares it there.
NOT_THE_RUNTIME = {
    "core/errors.py", "core/machine.py", "plugins/availability.py", "exporter/component_files.py",
    "serving/repository/installation.py", "serving/server/process.py",
}  # fmt: skip
OF_A_PACKAGE = {"require", "find_spec"}  # calls that take a package's name


def names_of_runtimes(tree: ast.AST, *, only_compared: bool = False) -> list[int]:
    """The lines on which a runtime is named, or compared with one that is."""
    nodes = list(ast.walk(tree))
    compared = [
        operand
        for node in nodes
        if isinstance(node, ast.Compare | ast.MatchValue)
        for side in ([node.value] if isinstance(node, ast.MatchValue) else operands(node))
        for operand in (side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side])
    ]
    of_packages = {
        argument
        for node in nodes
        if isinstance(node, ast.Call) and called(node) in OF_A_PACKAGE
        for argument in node.args
    }
    named = [] if only_compared else [node for node in nodes if node not in of_packages]
    defaults = [name for name in compared if isinstance(name, ast.Name) and name.id == "DEFAULT"]
    constants = [
        name
        for name in (*compared, *named)
        if isinstance(name, ast.Constant) and name.value in tuple(RUNTIMES)
    ]
    return sorted({name.lineno for name in (*defaults, *constants)})


def operands(node: ast.Compare) -> list[ast.expr]:
    return [node.left, *node.comparators]


def called(node: ast.Call) -> str | None:
    return getattr(node.func, "attr", getattr(node.func, "id", None))


def test_nobody_compares_the_name_of_a_runtime():
    comparisons = {}
    for path in SOURCES:
        name = name_of(path)
        text = path.read_text()
        written = re.search(f"DEFAULT|['\"]({'|'.join(RUNTIMES)})['\"]", text)
        if written and not name.startswith(OF_RUNTIMES):
            tree = ast.parse(text)
            lines = names_of_runtimes(tree, only_compared=name in NOT_THE_RUNTIME)
            comparisons |= {name: lines} if lines else {}
    assert not comparisons


@pytest.mark.parametrize(
    "code",
    [
        "a == 'tensorrt'",
        "a.runtime not in ('onnxruntime', 'tensorrt')",
        "a != DEFAULT",
        "b = {'tensorrt-rtx': 1}[a]",
        "match a:\n    case 'onnxruntime':\n        pass",
        "RTX = 'tensorrt-rtx'",
        "a.startswith('tensorrt')",
    ],
)
def test_names_of_runtimes_are_found(code):
    assert names_of_runtimes(ast.parse(code))


def test_a_package_of_the_same_name_is_none():
    assert not names_of_runtimes(ast.parse("require('onnxruntime', extra='cpu')"))
    assert not names_of_runtimes(ast.parse("x = DEFAULT\nf(runtime=DEFAULT)"))


def test_files_are_short_and_say_what_they_are():
    found = {name_of(path): faults for path in ALL_CODE if (faults := [*faults_of(path)])}
    assert not found


def faults_of(path: Path) -> Iterator[str]:
    text = path.read_text()
    lines = text.splitlines()
    # Most thoughts take 100 to 250 lines.
    if len(lines) > 500:
        yield f"{len(lines)} lines: look for the noun that is hiding in it"
    if lines[0] != "# SPDX-License-Identifier: Apache-2.0":
        yield "its first line is not the license"
    tree = ast.parse(text)
    if not ast.get_docstring(tree):
        yield "a file says in one line what it is"
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = node.end_lineno - node.lineno + 1 - docstring_lines(node)
            if size > 60:
                yield f"{node.name} has {size} lines"


def docstring_lines(node: ast.AST) -> int:
    first = node.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first.end_lineno - first.lineno + 1 if is_text else 0


def test_vague_names_are_not_used():
    vague = {"utils", "helpers", "common", "base", "manager", "misc"}
    assert not [name_of(path) for path in ALL_CODE if path.stem in vague]


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "tests"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "saccade",
        "saccade.serving.client.client",
        "saccade.serving.commands.cli",
        "saccade.exporter.artefact.folder",
    ],
)
def test_importing_does_not_load_frameworks(module):
    heavy = ["torch", "onnx", "onnxruntime", "onnxscript", "sklearn", "matplotlib"]
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_repository_names_no_machine():
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\0")
    pattern = re.compile(r"/(home|root|Users|tmp|work)/[a-zA-Z_.]|index-url|find-links")
    for name in filter(None, files):
        path = ROOT / name
        if path.suffix in {".png", ".safetensors", ".npz"} or path == Path(__file__).resolve():
            continue
        match = path.is_file() and pattern.search(path.read_text(errors="replace"))
        assert not match, f"{name}: {match.group(0) if match else ''}"
