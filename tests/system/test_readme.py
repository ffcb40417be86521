# SPDX-License-Identifier: Apache-2.0
"""Every command that the documents show is one that the command line takes."""

import ast
import functools
import importlib
import re
import shlex
from dataclasses import replace

import pytest
from places import ROOT

from saccade.exporter.runtimes.tensorrt.build import read_range
from saccade.serving.commands import cli
from saccade.serving.commands.command import Answer

README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").rglob("*.md"))]
# Generated when the site is built; test_docs_site.py holds them to the code.
REFERENCE = {ROOT / "docs/reference" / name for name in ("api.md", "commands.md", "messages.md")}
MOST_LINES = 200


def shown_commands() -> list[str]:
    """Lines of code blocks that start with `saccade`, comments cut off."""
    commands = []
    for document in DOCUMENTS:
        for block in re.findall(r"```(?:sh|console|bash)\n(.*?)```", document.read_text(), re.S):
            whole = block.replace("\\\n", " ").splitlines()
            # What the shell does with an answer is not the command's.
            lines = (line.removeprefix("$ ").split(" #")[0].split(" > ")[0] for line in whole)
            commands += [
                line.strip().removesuffix(" &") for line in lines if line.startswith("saccade ")
            ]
    return sorted(set(commands))


def test_documents_show_every_command():
    assert {command.split()[1] for command in shown_commands()} == set(cli.COMMANDS)


def typed_examples() -> list[str]:
    """The examples in the helps of the commands, without what the shell does with them."""
    lines = [line for one in cli.COMMANDS.values() for line in one.examples.splitlines()]
    return [line.partition(" > ")[0] for line in lines if not line.startswith("#")]


def test_every_command_has_two_examples_that_fit_a_terminal():
    for command, one in cli.COMMANDS.items():
        said, typed, also_said, also_typed = one.examples.splitlines()
        assert said[:2] == also_said[:2] == "# ", command
        assert [line.split()[:2] for line in (typed, also_typed)] == [["saccade", command]] * 2
        assert max(map(len, one.examples.splitlines())) <= 80 - len("  "), command


@pytest.mark.parametrize("command", [*shown_commands(), *typed_examples()])
def test_command_is_understood(command, monkeypatch, tmp_path):
    name, *arguments = shlex.split(command)[1:]
    if "--recipe-file" in arguments:  # which is read to know what is asked
        recipe = tmp_path / arguments[arguments.index("--recipe-file") + 1]
        recipe.parent.mkdir(parents=True, exist_ok=True)
        recipe.write_text('family = "nac"\n')
        monkeypatch.chdir(tmp_path)
    taken = []

    @functools.wraps(cli.COMMANDS[name].verb)
    def stub(*values, **named):
        taken.append(named)
        return Answer({})

    monkeypatch.setitem(cli.COMMANDS, name, replace(cli.COMMANDS[name], verb=stub, closing=None))
    assert cli.run([name, *arguments]) == 0
    assert taken


def test_batches_of_build_are_ranges():
    """They are read with the model, after the command line."""
    typed = [command.split() for command in (*shown_commands(), *typed_examples())]
    batches = [
        words[words.index("--batch") + 1]
        for words in typed
        if words[1] == "build" and "--batch" in words
    ]
    assert batches and all(read_range(batch, "--batch") for batch in batches)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_compiles_and_imports_what_there_is(document):
    """What other tests run line by line; here every block of every page, as far as that goes."""
    for text in re.findall(r"```python\n(.*?)```", document.read_text(), re.S):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("saccade"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), text


def test_ops_are_called_as_their_page_says():
    text = (ROOT / "docs" / "ops.md").read_text()
    values = {}
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], values)
    assert values["weights"].shape == (4, 64) and values["regions"].shape == (4, 8, 8)


def test_readme_is_short_and_begins_with_what_a_reader_needs():
    text = README.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    places = ["Hugging Face", "![", "## Two commands", "## Install", "## Your checkpoint"]
    places += ["## Several checkpoints", "## Without a checkpoint", "## What it cannot do"]
    places += ["## Families", "## Headline figures", "## Documentation"]
    assert [text.index(place) for place in places] == sorted(text.index(p) for p in places)
    assert text.index("## What it cannot do") < text.index("\n|")  # no table before
    assert text.index(".venv/bin/activate") < text.index("\nsaccade doctor\n")


def test_readme_shows_what_the_commands_answered():
    blocks = re.findall(r"```text\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) == 1 and all(block.strip() for block in blocks)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_into_the_repository_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
        path = document.parent / target
        assert path.exists() or path.resolve() in REFERENCE, target
