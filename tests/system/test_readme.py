# SPDX-License-Identifier: Apache-2.0
"""Every command that the documents show is one that the command line takes."""

import functools
import re
import shlex

import pytest
from places import ROOT

from saccade.serving.commands import cli
from saccade.serving.commands import command as command_module
from saccade.serving.commands.command import Answer
from saccade.serving.commands.examples import examples

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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
    lines = [line for block in examples().values() for line in block.splitlines()]
    return [line.partition(" > ")[0] for line in lines if not line.startswith("#")]


def test_every_command_has_two_examples_that_fit_a_terminal():
    assert set(examples()) == set(cli.COMMANDS)
    for command, block in examples().items():
        said, typed, also_said, also_typed = block.splitlines()
        assert said[:2] == also_said[:2] == "# ", command
        assert [line.split()[:2] for line in (typed, also_typed)] == [["saccade", command]] * 2
        assert max(map(len, block.splitlines())) <= 80 - len("  "), command


@pytest.mark.parametrize("command", [*shown_commands(), *typed_examples()])
def test_command_is_understood(command, monkeypatch):
    name, *arguments = shlex.split(command)[1:]
    taken = []

    @functools.wraps(cli.COMMANDS[name])
    def stub(*values, **named):
        taken.append(named)
        return Answer({})

    monkeypatch.setitem(cli.COMMANDS, name, stub)
    monkeypatch.setattr(command_module, "closing_of", lambda *_: None)
    assert cli.run([name, *arguments]) == 0
    assert taken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_into_the_repository_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target
