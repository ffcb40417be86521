# SPDX-License-Identifier: Apache-2.0
"""Generate the reference pages from the code: commands, Python API, error messages.

Run with the project's own Python, before MkDocs: python docs_site/reference.py
"""

import ast
import contextlib
import io
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "saccade"
PAGES = ROOT / "build" / "docs" / "pages" / "reference"
ERRORS = {
    "SaccadeError": 2, "ShapeError": 2, "Damaged": 2, "MissingPackage": 2, "GateFailed": 1,
    "ServerFailed": 3,
}  # fmt: skip
# Placeholder for a name or a number in a message.
GAP = "<...>"
# Headings for public names, by package.
GROUPS = (
    ("Checkpoints", "saccade.models"),
    ("Export, verify, build", "saccade.exporter"),
    ("Repository and server", "saccade.serving.repository"),
    ("Repository and server", "saccade.serving.server"),
    ("Clients", "saccade.serving.client"),
    ("Without a server", "saccade.serving.local"),
    ("Bulk jobs", "saccade.serving.bulk"),
    ("Measure", "saccade.serving.bench"),
    ("Commands as functions", "saccade.serving.commands"),
    ("Core", "saccade"),
)


def main() -> None:
    """Write the pages."""
    PAGES.mkdir(parents=True, exist_ok=True)
    (PAGES / "commands.md").write_text(commands_page())
    (PAGES / "api.md").write_text(api_page())
    (PAGES / "messages.md").write_text(messages_page())


def commands_page() -> str:
    """Return the page of all commands, with the output of `saccade COMMAND --help`."""
    from saccade.serving.commands import cli

    parts = [
        "# Command line\n",
        "The output of `saccade COMMAND --help` for every command, generated from the code. "
        "Exit codes are listed under [exit codes and errors](../errors.md).\n",
        f"```text\n{help_of()}\n```\n",
    ]
    for name, command in cli.COMMANDS.items():
        needs = f"\nNeeds the extra `{command.extra}`.\n" if command.extra else ""
        parts.append(f"## {name}\n\n```text\n{help_of(name)}\n```\n{needs}")
    return "\n".join(parts)


def help_of(*words: str) -> str:
    """Return what `--help` prints on a plain terminal."""
    from saccade.serving.commands import cli

    printed = io.StringIO()
    width = {"COLUMNS": "84", "LINES": "1000", "NO_COLOR": "1", "TERM": "dumb"}
    with mock.patch.dict(os.environ, width), contextlib.redirect_stdout(printed):
        with contextlib.suppress(SystemExit):
            cli.run([*words, "--help"])
    return "\n".join(unruled(printed.getvalue())).strip()


def unruled(text: str) -> Iterator[str]:
    """Yield the lines of a help without the rules under headings, and wrap the longest ones."""
    for line in text.splitlines():
        if line.startswith("usage:") and len(line) > 84:
            yield from textwrap.wrap(line.replace(",", ", "), 80, subsequent_indent="    ")
        elif set(line.strip()) != {"-"}:
            yield line.rstrip()


def homes() -> dict[str, str]:
    """Return the public names of `saccade` and the place of each, without importing it."""
    table = (SOURCES / "__init__.pyi").read_text()
    names = re.findall(r"^from (\S+) import (\w+)", table, re.M)
    return {name: f"{module}.{name}" for module, name in names}


def api_page() -> str:
    """Return the page of public names, for mkdocstrings to fill in."""
    groups: dict[str, list[str]] = {title: [] for title, _ in GROUPS}
    for name, home in sorted(homes().items()):
        title = next(title for title, package in GROUPS if home.startswith(f"{package}."))
        groups[title].append(_entry(home, f"saccade.{name}"))
    ops = ["sparsemax", "tvmax", "masked_tvmax", "svpn", "svpn_fast"]
    parts = [
        "# Python API\n",
        "All public names of `saccade`, generated from the code. Import them from the package, "
        "for example `from saccade import Client`. They are loaded on first use, so `import "
        "saccade` is fast and needs neither torch nor onnx. Every function raises "
        "[`SaccadeError`](../errors.md) for errors that its caller can fix.\n",
    ]
    parts += [f"## {title}\n\n" + "\n".join(names) for title, names in groups.items() if names]
    parts.append(
        "## Custom ops\n\nIn `saccade.plugins.ops`: "
        + ", ".join(f"`{name}`" for name in ops)
        + ". Each takes torch tensors (with gradients) or NumPy arrays. [Custom ops](../ops.md) "
        "has their formulas.\n\n" + _entry("saccade.plugins.ops.gfusedmax", "gfusedmax")
    )
    return "\n".join(parts)


def _entry(path: str, heading: str) -> str:
    return f'::: {path}\n    options:\n      heading: "{heading}"\n      toc_label: "{heading}"\n'


def messages_page() -> str:
    """Return the page of all error messages, by package, with placeholders for values."""
    by_part: dict[str, set[tuple[str, int]]] = {}
    # The packages are links, which `rglob` does not follow.
    folders = [SOURCES, *(place for place in SOURCES.iterdir() if place.is_symlink())]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        part = ".".join(path.relative_to(SOURCES).parts[:2]).removesuffix(".py")
        by_part.setdefault(part, set()).update(raised(ast.parse(path.read_text())))
    parts = [
        "# Error index\n",
        "All error messages of saccade with their exit codes, generated from the code; `<...>` "
        "stands for a name or a number. To find a message, search this page for a few of its "
        "words. A message says what was found, what was expected and what to do. [Exit codes and "
        "errors](../errors.md) explains the common ones.\n",
    ]
    for part, messages in by_part.items():
        if messages:
            rows = "\n".join(f"- `{text}` ({code})" for text, code in sorted(messages))
            parts.append(f"## {part}\n\n{rows}\n")
    return "\n".join(parts)


def raised(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield message and exit code of every error that a module creates with a literal message."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS and node.args:
            text = ": ".join(map(template, node.args[:2]))
            if len(text.replace(GAP, "").split()) > 2:
                yield text, ERRORS[node.func.id]


def template(node: ast.AST) -> str:
    """Return the text of a message, with placeholders for inserted values."""
    if isinstance(node, ast.Constant):
        return " ".join(str(node.value).split()).replace("`", "'")
    if isinstance(node, ast.JoinedStr):
        return " ".join("".join(map(_piece, node.values)).split())
    if isinstance(node, ast.BinOp):
        return f"{template(node.left)} {template(node.right)}"
    return GAP


def _piece(node: ast.AST) -> str:
    return str(node.value).replace("`", "'") if isinstance(node, ast.Constant) else GAP


if __name__ == "__main__":
    main()
