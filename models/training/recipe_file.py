# SPDX-License-Identifier: Apache-2.0
"""Recipe files: the options of `saccade train` as TOML or YAML, read and written.

A key is the name of an option, such as `learning_rate`; `family` is the model's family and `set` a
table of configuration fields. All paths are read as on the command line.
"""

import inspect
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from saccade.core import limits
from saccade.core.checks import check_one_of
from saccade.core.errors import SaccadeError, require
from saccade.core.files import read_regular
from saccade.core.schema import WrongValue, typed
from saccade.models.families import FAMILIES
from saccade.models.training.options import TrainOptions, overrides_words, parse_overrides

FAMILY = "family"
_OF_ONE_CALL = ("resume", "force")  # what they ask for was done when the file is written
_YAML = (".yaml", ".yml")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_HEAD = """\
# Options of `saccade train`. To use them: saccade train --recipe-file FILE
# Options on the command line take precedence.
"""


def read_recipe(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Return the family that a recipe file names, and its options as arguments of TrainOptions.

    Raises: SaccadeError if it cannot be read, or a key or a value is not one of an option;
        MissingPackage for YAML without its parser.
    """
    content = _parsed(path)
    kinds = _kinds()
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        check_one_of(f"{path}: an option", name, kinds, "See: saccade train FAMILY --help")
        if name in values:
            raise SaccadeError(f"{path}: gives {name} twice. Give it once.")
        values[name] = _checked(path, name, kinds[name], value)
    family = values.pop(FAMILY, None)
    if family is not None:
        check_one_of(f"{path}: family", family, FAMILIES)
    return family, values


def recipe_text(family: str, options: TrainOptions, resolved: Mapping[str, Any]) -> str:
    """Return a recipe file of a run's options; `resolved` replaces those left to the family.

    Options without a value are left out.
    """
    values = {name: getattr(options, name) for name in _DEFAULTS if name not in _OF_ONE_CALL}
    lines = [_HEAD, f"{FAMILY} = {_toml(family)}"]
    for name, value in (values | dict(resolved)).items():
        if name != "set" and value not in (None, (), {}):
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join([*lines, *_table(options.set), ""])


def recipe_example(family: str, options: TrainOptions) -> str:
    """Return a recipe file of all options, each with its help; those without value as comments."""
    helps = _helps()
    lines = [_HEAD, f"{FAMILY} = {_toml(family)}"]
    for name, default in _DEFAULTS.items():
        value = getattr(options, name)
        if name != "set":
            lines += ["", *(f"# {line}" for line in helps.get(name, ()))]
            unset = value == default and value in (None, (), False)
            shown = _toml(value) if value is not None else "..."
            lines.append(f"# {name} = {shown}" if unset else f"{name} = {shown}")
    lines += ["", *(f"# {line}" for line in helps.get("set", ()))]
    table = _table(options.set) if options.set else ["# [set]", "# dim = 64"]
    return "\n".join([*lines, *(line for line in table if line), ""])


_DEFAULTS = vars(TrainOptions(Path()))  # of every option; the only one without has Path()


def _kinds() -> dict[str, Any]:
    """Return the type of each key: as in the options, with text for paths."""
    written = {Path: str, Path | None: str | None}
    hints = get_type_hints(TrainOptions)
    return {FAMILY: str} | {name: written.get(hints[name], hints[name]) for name in _DEFAULTS}


def _checked(path: Path, name: str, kind: Any, value: Any) -> Any:
    try:
        if name == "set" and isinstance(value, list):
            return parse_overrides(typed(tuple[str, ...], value, ""))
        checked = typed(kind, value, "")
        json.dumps(checked)  # a date is a value of TOML, but of no option
    except WrongValue as error:
        raise SaccadeError(
            f"{path}: {name}: found {value!r:.60}, expected {error.expected}. Correct the value."
        ) from error
    except TypeError as error:
        raise SaccadeError(
            f"{path}: {name}: found {value!r:.60}, expected texts, numbers, true or false, or "
            "lists of them. Correct the value."
        ) from error
    return checked


def _parsed(path: Path) -> dict[Any, Any]:
    if path.suffix not in (".toml", *_YAML):
        raise SaccadeError(
            f"{path}: expected a recipe file whose name ends in .toml, .yaml or .yml. Rename it."
        )
    try:
        text = read_regular(path, limits.RECIPE_BYTES).decode()
        if any(line.count(".") > limits.RECIPE_DOTS for line in text.splitlines()):
            raise ValueError(f"a line with more than {limits.RECIPE_DOTS} dots")
        content = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
        repr(content)  # a number in base 16 has no limit of digits, but a message about it has
    except FileNotFoundError as error:
        raise SaccadeError(
            f"{path}: no such file. Write one with: saccade train FAMILY --print-recipe"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise SaccadeError(
            f"{path}: cannot be read as {path.suffix[1:].upper()} ({reason:.300}). Correct it, or "
            "write one with: saccade train FAMILY --print-recipe"
        ) from error
    if not isinstance(content, dict):
        raise SaccadeError(
            f"{path}: found {type(content).__name__}, expected options by name. See: saccade train "
            "FAMILY --print-recipe"
        )
    return content


def _yaml(text: str) -> Any:
    yaml: Any = require("yaml", extra="yaml")

    class Loader(yaml.SafeLoader):
        """Plain values; no anchors, which can multiply a small file, and no key given twice."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise ValueError(f"an alias in line {mark.line + 1}; write the value again")
            return super().compose_node(parent, index)

        def compose_scalar_node(self, anchor: Any) -> Any:
            node = super().compose_scalar_node(anchor)
            # In version 1.1, which the parser reads, 1:30 is a number, and each colon multiplies.
            if node.tag in _NUMBERS and ":" in node.value:
                node.tag = "tag:yaml.org,2002:str"
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            mapping = super().construct_mapping(node, deep=True)
            if len(mapping) < len(node.value):
                raise ValueError(f"a key twice in the mapping of line {node.start_mark.line + 1}")
            return mapping

    # Likewise, 1e-3 is text in version 1.1.
    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _table(overrides: Mapping[str, Any]) -> list[str]:
    """Return the lines of `set`; as on the command line if TOML lacks a value of it."""
    if not overrides:
        return []
    try:
        return ["", "[set]", *(f"{_key(key)} = {_toml(value)}" for key, value in overrides.items())]
    except TypeError:
        return ["", f"set = {_toml(overrides_words(overrides))}"]


def _toml(value: Any) -> str:
    """Return a value as TOML.

    Raises: TypeError for None, which TOML lacks.
    """
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    raise TypeError(f"TOML has no {value!r}")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


_FIELD = re.compile(r"    (\w+): [^#]*(?:# (.*))?")


def _helps() -> dict[str, tuple[str, ...]]:
    """Return the comments at each option, which are its help on the command line."""
    helps: dict[str, tuple[str, ...]] = {}
    above: list[str] = []
    try:
        source = inspect.getsource(TrainOptions)
    except OSError:  # installed without sources
        return helps
    for line in source.splitlines():
        if line.startswith("    # "):
            above.append(line.removeprefix("    # "))
            continue
        if (found := _FIELD.fullmatch(line)) is not None:
            helps[found[1]] = (*above, *filter(None, (found[2],)))
        above = []
    return helps
