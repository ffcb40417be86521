# SPDX-License-Identifier: Apache-2.0
"""Every command exists in Python under its name, with the same options, typed and documented."""

import inspect
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

import saccade
from saccade.core.progress import bar
from saccade.serving.commands import cli

# `saccade.models` is a package; a completion is of a shell alone.
OTHER_NAMES = {"models": "list_models"}
OF_THE_COMMAND_LINE = {"completion"}
# Flags that are something else in Python, and what.
OTHERWISE = {
    ("verify", "bisect"): "saccade.bisect(report)",
    ("bench", "op_library"): "a check: BenchOptions.op_library runs kernels where there are some",
    ("sweep", "op_library"): "the same",
    ("repository", "op_library"): "the same",
    ("convert", "checkpoint"): "its path",
    ("train", "recipe_file"): "TrainOptions, whose fields are its keys",
    ("train", "print_recipe"): "the same",
    ("serve", "print_command"): "a text for a shell",
    ("serve", "container"): "a text for a shell",
}
SHOWS_PROGRESS = {
    "train", "evaluate", "export", "verify", "build", "bench", "sweep", "calibrate",
    "preflight", "bulk", "download",
}  # fmt: skip
TABLE = Path(saccade.__file__).with_name("__init__.pyi")
VERBS = sorted(set(cli.COMMANDS) - OF_THE_COMMAND_LINE)


@pytest.mark.parametrize("command", VERBS)
def test_command_is_a_function(command):
    name = OTHER_NAMES.get(command, command)
    assert name in saccade.__all__
    function = getattr(saccade, name)
    assert inspect.isfunction(function) and inspect.getdoc(function)
    hints, typed = get_type_hints(function), get_type_hints(cli.COMMANDS[command].verb)
    parameters = inspect.signature(function).parameters
    assert set(hints) >= {*parameters, "return"}
    positional = [
        parameter
        for parameter in inspect.signature(cli.COMMANDS[command].verb).parameters.values()
        if parameter.default is inspect.Parameter.empty and not is_dataclass(typed[parameter.name])
    ]
    assert len(parameters) >= len(positional)
    for option, kind in typed.items():
        if is_dataclass(kind):
            options = [of for of in hints.values() if kind in (of, *getattr(of, "__args__", ()))]
            assert options, f"takes no {kind.__name__}"
            assert getattr(saccade, kind.__name__) is kind
            assert fields(kind)
        elif option not in (*(each.name for each in positional), "return"):
            assert option in parameters or (command, option) in OTHERWISE
    assert ("progress" in parameters) == (command in SHOWS_PROGRESS)
    if command in SHOWS_PROGRESS:
        assert parameters["progress"].default is bar


def test_every_public_name_is_where_the_table_says():
    for name, module in saccade._HOME.items():
        assert f"from {module} import {name} as {name}\n" in TABLE.read_text()
        assert getattr(saccade, name) is getattr(import_module(module), name)


def test_importing_the_package_imports_no_verb():
    code = "import sys, saccade; print([m for m in sys.modules if m.startswith('saccade.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
