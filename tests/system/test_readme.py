# SPDX-License-Identifier: Apache-2.0
"""Every command that the documents show is one that the command line takes."""

import functools
import re
import shlex

import pytest
from places import ROOT

from saccade.serving.commands import cli
from saccade.serving.commands.command import Answer

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shown_commands() -> list[str]:
    """Lines of code blocks that start with `saccade`, comments cut off."""
    commands = []
    for document in DOCUMENTS:
        for block in re.findall(r"```(?:sh|console|bash)\n(.*?)```", document.read_text(), re.S):
            whole = block.replace("\\\n", " ").splitlines()
            lines = (line.removeprefix("$ ").split(" #")[0] for line in whole)
            commands += [
                line.strip().removesuffix(" &") for line in lines if line.startswith("saccade ")
            ]
    return sorted(set(commands))


def test_documents_show_every_command():
    assert {command.split()[1] for command in shown_commands()} == set(cli.COMMANDS)


@pytest.mark.parametrize("command", shown_commands())
def test_command_is_understood(command, monkeypatch):
    name, *arguments = shlex.split(command)[1:]
    taken = []

    @functools.wraps(cli.COMMANDS[name])
    def stub(*values, **named):
        taken.append(named)
        return Answer({})

    monkeypatch.setitem(cli.COMMANDS, name, stub)
    assert cli.run([name, *arguments]) == 0
    assert taken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_into_the_repository_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target
