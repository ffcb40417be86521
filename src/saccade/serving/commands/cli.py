# SPDX-License-Identifier: Apache-2.0
"""The command line: one table of commands, each a verb of the Python API."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, get_args, get_origin

import tyro

from saccade import interruption
from saccade.errors import GateFailed, SaccadeError, ServerFailed
from saccade.escaped import escaped, escaped_message
from saccade.files import is_full
from saccade.models.budget import BudgetLike
from saccade.models.entry import imported
from saccade.models.training.options import overrides_words, parse_overrides
from saccade.serving.commands import artefacts, calls, models
from saccade.serving.commands.command import Result, Verb, as_command

_VERBS: tuple[Verb, ...] = (
    models.train, models.convert, models.models, models.select, models.evaluate,
    artefacts.export, artefacts.verify, artefacts.build, artefacts.bench, artefacts.sweep,
    artefacts.choose, artefacts.plan, artefacts.repository, artefacts.preflight, artefacts.serve,
    artefacts.proxy, artefacts.bulk,
    calls.classify, calls.embed, calls.segment, calls.answer, calls.caption, calls.edit, calls.show,
    artefacts.demo, artefacts.ops, artefacts.doctor,
)  # fmt: skip
COMMANDS = {verb.__name__: verb for verb in _VERBS}
OUR_BUG = 70


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    0 done, 1 a gate or check failed, 2 wrong input or missing package, 3 the server failed,
    130 and 143 interrupted by Ctrl-C and SIGTERM, 70 our bug with its trace. Only the answer goes
    to standard output.
    """
    interruption.raise_on_signals()
    try:
        result, as_json = _dispatch(arguments)
        _print(result, as_json=as_json)
        sys.stdout.flush()
    except SystemExit:
        raise
    except BrokenPipeError:
        # The reader went away (`saccade ... | head`): nothing is left to tell it.
        sys.stderr.close()
        return 0
    except BaseException as error:
        return _exit_code(error)
    return int(getattr(result, "exit_code", 0))


def _exit_code(error: BaseException) -> int:
    # What is imported, or called back, makes other exceptions of an interrupt.
    said_so = isinstance(error, GateFailed | ServerFailed)
    if isinstance(error, KeyboardInterrupt) or (interruption.received() and not said_so):
        return interruption.tell()
    if isinstance(error, SaccadeError):
        print(escaped_message(f"saccade: {error}"), file=sys.stderr)
        return error.exit_code
    if isinstance(error, OSError) and is_full(error):
        _drop_output()
        place = f"{escaped(str(error.filename))}: " if error.filename else ""
        print(
            f"saccade: {place}found no room to write ({error.strerror}), expected some. "
            "Make room on that disk, also where TMPDIR and standard output lie, and try again.",
            file=sys.stderr,
        )
        return SaccadeError.exit_code
    trace = "".join(traceback.format_exception(error))
    print(escaped(trace), end="", file=sys.stderr)
    print("saccade: this is a bug in saccade, please report it.", file=sys.stderr)
    return OUR_BUG


def _drop_output() -> None:
    """Drop unwritten output, which would be tried again, and fail, at the end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: Sequence[str]) -> tuple[Result, bool]:
    _refuse_twice(arguments, "--set")
    outcome: tuple[Result, bool] = tyro.extras.subcommand_cli_from_dict(
        {name: as_command(verb) for name, verb in COMMANDS.items()},
        prog="saccade",
        description="Checkpoints of attention-structured vision models to a served model.",
        args=_with_signs(arguments, "--move"),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        registry=_ways_to_write(),
    )
    return outcome


def _print(result: Result, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.to_dict(), indent=1, allow_nan=False))
    elif (text := result.to_text()) is not None:
        _print_text(text)


def _print_text(text: Any) -> None:
    from rich.console import Console

    # A table that is piped into a file must not be cut at 80 columns.
    width = None if sys.stdout.isatty() else 160
    # A title of a table is read with the console's own settings, not with those of `print`.
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    wrap = isinstance(text, str)
    console.print(_Escaped(text), highlight=False, soft_wrap=wrap, markup=False, emoji=False)


class _Escaped:
    """A text or table whose cells may hold what others wrote: no command in it reaches the
    terminal but those of the table itself."""

    def __init__(self, text: Any) -> None:
        self._text = escaped(text) if isinstance(text, str) else text

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for text, style, control in console.render(self._text, options):
            yield Segment(text if control else escaped(text), style, control)


def _ways_to_write() -> tyro.constructors.ConstructorRegistry:
    """Values of one option are written `1,0.5,0.25`, fields of a model `dim=64 heads=4`.

    Of an option that is one of some names, the names are shown.
    """
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_values)
    registry.primitive_rule(_names)
    registry.primitive_rule(_overrides)
    return registry


Way = tyro.constructors.PrimitiveConstructorSpec
_READS: dict[Any, Callable[[str], Any]] = {float: float, int: int, str: str, BudgetLike: str}


def _values(info: tyro.constructors.PrimitiveTypeInfo) -> Way[Any] | None:
    kind, *rest = get_args(info.type) or (None,)
    if get_origin(info.type) is not tuple or rest != [...] or kind not in _READS:
        return None
    return Way(
        nargs=1,
        metavar="N[,N...]" if kind in (float, int) else "VALUE[,VALUE...]",
        instance_from_str=lambda words: tuple(map(_READS[kind], words[0].split(","))),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(_shown, value))],
    )


def _names(info: tyro.constructors.PrimitiveTypeInfo) -> Way[Any] | None:
    if (known := getattr(info.type, "names", None)) is None:
        return None
    return Way(
        nargs=1,
        metavar=f"{{{','.join(imported(known)())}}}",
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    )


def _overrides(info: tyro.constructors.PrimitiveTypeInfo) -> Way[Any] | None:
    if info.type != dict[str, Any]:
        return None
    return Way(
        nargs="*",
        metavar="KEY=VALUE",
        instance_from_str=parse_overrides,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=overrides_words,
    )


def _refuse_twice(arguments: Sequence[str], flag: str) -> None:
    # The parser would take the last one and forget the others.
    if sum(word == flag or word.startswith(f"{flag}=") for word in arguments) > 1:
        raise SaccadeError(f"{flag} is given twice. Give it once: {flag} key=value key=value.")


def _with_signs(arguments: Sequence[str], flag: str) -> list[str]:
    """Numbers such as -0.1,0.3 joined to their flag: alone they would look like a flag."""
    words: list[str] = []
    for word in arguments:
        if words and words[-1] == flag and word.startswith("-") and word[1:2] in "0123456789.":
            words[-1] = f"{flag}={word}"
        else:
            words.append(word)
    return words


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
