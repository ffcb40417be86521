# SPDX-License-Identifier: Apache-2.0
"""What the documentation site is made of, as far as it can be checked without MkDocs.

`make docs` checks the rest: links and places in what was built, and that nothing is asked of
another host.
"""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from places import ROOT, module_at

import saccade
from saccade.exporter.export import ExportOptions
from saccade.serving.commands import cli

yaml = pytest.importorskip("yaml", reason="pyyaml is missing: pip install '.[dev]'")

SITE = ROOT / "docs_site"
# Made by scripts in docs_site, or taken over from elsewhere in the tree by the hook.
GENERATED = {
    *(f"reference/{name}.md" for name in ("api", "commands", "messages")),
    *(f"notebooks/{name}.md" for name in ("choosing-a-budget", "export-to-serve")),
}
TAKEN_OVER = {"changelog.md", "contributing.md", "measuring.md"}


def script(name: str) -> ModuleType:
    """A file of docs_site, which is no package."""
    return module_at(SITE / f"{name}.py")


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return script("reference")


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def leaves(tree: Any) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(tree, str):
        return [tree]
    branches = tree.values() if isinstance(tree, dict) else tree
    return [leaf for branch in branches for leaf in leaves(branch)]


def test_navigation_has_every_page_once(settings: dict[str, Any]) -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(leaves(settings["nav"])) == sorted(pages | GENERATED | TAKEN_OVER)


def test_nothing_of_the_theme_is_fetched(settings: dict[str, Any]) -> None:
    assert settings["theme"]["font"] is False
    assert not {"analytics", "social"} & set(settings["extra"])
    assert not any("//" in url for url in settings["extra_css"])
    assert "extra_javascript" not in settings
    assert settings["strict"] is True


def test_every_command_and_option_is_in_the_reference(reference: ModuleType) -> None:
    page = reference.commands_page()
    sections = dict(re.findall(r"^## (\S+)\n\n```text\n(.*?)```", page, re.M | re.S))
    assert list(sections) == list(cli.COMMANDS) and "Needs the extra `export`.\n" in page
    assert all(re.match(rf"\s*usage: saccade {name} ", text) for name, text in sections.items())
    for option in ExportOptions.__dataclass_fields__:
        assert f"--{option.replace('_', '-')}" in sections["export"], option
    assert max(map(len, page.splitlines())) < 200 and "\x1b" not in page and "│" not in page


def test_every_public_name_is_in_the_reference(reference: ModuleType) -> None:
    page = reference.api_page()
    entries = re.findall(r'^::: (\S+)\n    options:\n      heading: "(\S+)"', page, re.M)
    shown = {title.removeprefix("saccade.") for _, title in entries}
    assert shown >= set(saccade.__all__) - {"__version__"}
    for path, title in entries:
        module, _, name = path.rpartition(".")
        found = getattr(__import__(module, fromlist=[name]), name)
        if title.startswith("saccade."):
            assert found is getattr(saccade, title.removeprefix("saccade."))


def test_messages_of_errors_are_in_the_index(reference: ModuleType) -> None:
    page = reference.messages_page()
    rows = re.findall(r"^- `(.+)` \((\d)\)$", page, re.M)
    assert len(rows) > 300 and {code for _, code in rows} == {"1", "2", "3"}
    assert any("is not importable (<...>). Install it with: <...>" in text for text, _ in rows)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("SaccadeError(f'{a}: found {n}, ' 'expected one.')", "<...>: found <...>, expected one."),
        ("GateFailed('one ' + 'two three')", "one two three"),
        ("SaccadeError(message)", None),
        ("Damaged(path, f'has {n} rows')", "<...>: has <...> rows"),
    ],
)
def test_template_of_a_message(reference: ModuleType, source: str, text: str | None) -> None:
    import ast

    assert [found for found, _ in reference.raised(ast.parse(source))] == ([text] if text else [])


def test_exit_codes_are_those_of_the_errors(reference: ModuleType) -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d) \|", page, re.M))
    assert {name: int(code) for name, code in rows.items()} == reference.ERRORS
    for name, code in reference.ERRORS.items():
        assert getattr(saccade.core.errors, name).exit_code == code
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.M)}
    assert codes == {0, *reference.ERRORS.values(), cli.OUR_BUG, 130, 143}


LOADS = "index.html: loads "
PAGES = {
    "sound": ('<a href="b.html#place">b</a><img src="a.svg"><a href="https://x.org">x</a>', None),
    "script of another host": ('<script src="https://unpkg.com/x"></script>', LOADS),
    "picture without a scheme": ('<img src="//x.org/a.png">', LOADS),
    "font in a style": ('<p style="background: url(https://x.org/a)">', LOADS),
    "style sheet in the page": ("<style>@import 'https://x.org/a.css'</style>", LOADS),
    "no such page": ('<a href="c.html">c</a>', "c.html leads to no file"),
    "no such place": ('<a href="b.html#elsewhere">b</a>', "#elsewhere leads to no anchor"),
}


@pytest.mark.parametrize("name", PAGES)
def test_built_pages_are_checked(name: str, tmp_path: Path) -> None:
    text, sentence = PAGES[name]
    (tmp_path / "index.html").write_text(text)
    (tmp_path / "b.html").write_text('<h2 id="place">b</h2>')
    (tmp_path / "a.svg").write_text("<svg/>")
    found = list(script("check_built").faults(tmp_path))
    assert len(found) == (sentence is not None), found
    assert sentence is None or sentence in found[0]


def test_styles_of_another_host_are_found(tmp_path: Path) -> None:
    (tmp_path / "site.css").write_text("body { background: url('https://x.org/a.png') }")
    (tmp_path / "sound.css").write_text("body { background: url(data:image/png;base64,AA) }")
    assert list(script("check_built").faults(tmp_path)) == ["site.css: loads https://x.org/a.png"]


def test_tools_are_pinned() -> None:
    lines = (SITE / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines if line[0] != "#")


def test_answers_go_into_the_blocks_below_their_commands() -> None:
    tour = script("tour")
    page = "a\n```sh\nsaccade x\n```\n\n```text\nold\n```\nb\n```sh\nsaccade y\n```\n"
    first, second = tour.BLOCK.finditer(page)
    assert tour.filled(first, "new") == "```sh\nsaccade x\n```\n\n```text\nnew\n```\n"
    assert second[2] is None
