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
from saccade.models.training.options import overrides_words, parse_overrides
from saccade.serving.commands import artefacts as commands
from saccade.serving.commands import artefacts as engine_commands
from saccade.serving.commands import artefacts as preflight_commands
from saccade.serving.commands import calls as call_commands
from saccade.serving.commands import models as model_commands
from saccade.serving.commands import sweep as sweep_commands

COMMANDS: dict[str, Callable[..., commands.Answer]] = {
    "train": model_commands.train,
    "convert": model_commands.convert,
    "models": model_commands.models,
    "select": model_commands.select,
    "evaluate": model_commands.evaluate,
    "export": commands.export,
    "verify": commands.verify,
    "build": engine_commands.build,
    "bench": commands.bench,
    "sweep": sweep_commands.sweep,
    "choose": sweep_commands.choose,
    "repository": commands.repository,
    "preflight": preflight_commands.preflight,
    "serve": commands.serve,
    "classify": call_commands.classify,
    "embed": call_commands.embed,
    "segment": call_commands.segment,
    "answer": call_commands.answer,
    "caption": call_commands.caption,
    "edit": call_commands.edit,
    "show": call_commands.show,
    "demo": commands.demo,
    "ops": commands.ops,
    "doctor": commands.doctor,
}

OUR_BUG = 70
_HAD_OP_LIBRARY = ("repository", "bench", "sweep")  # as an option that was off


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    0 done, 1 a gate or check failed, 2 wrong input or missing package, 3 the server failed,
    130 and 143 interrupted by Ctrl-C and SIGTERM, 70 our bug with its trace. Only the answer goes
    to standard output.
    """
    interruption.raise_on_signals()
    try:
        answer = _dispatch(arguments)
        sys.stdout.flush()
    except SystemExit:
        raise
    except BrokenPipeError:
        # The reader went away (`saccade ... | head`): nothing is left to tell it.
        sys.stderr.close()
        return 0
    except BaseException as error:
        return _exit_code(error)
    return answer.exit_code


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
    """What could not be written to standard output would be tried again, and fail, at the end."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: Sequence[str]) -> commands.Answer:
    _refuse_twice(arguments, "--set")
    answer: commands.Answer = tyro.extras.subcommand_cli_from_dict(
        dict(COMMANDS),
        prog="saccade",
        description="Checkpoints of attention-structured vision models to a served model.",
        args=_with_signs(_without_default(arguments, "--op-library"), "--move"),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        registry=_ways_to_write(),
    )
    if answer.as_json:
        print(json.dumps(answer.data, indent=1, allow_nan=False))
    elif answer.text is not None:
        _print_text(answer.text)
    return answer


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
    """Values of one option are written `1,0.5,0.25`, fields of a model `dim=64 heads=4`."""
    registry = tyro.constructors.ConstructorRegistry()
    reads: dict[Any, Callable[[str], Any]] = {float: float, int: int, str: str, BudgetLike: str}

    @registry.primitive_rule
    def values(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        kind, *rest = get_args(info.type) or (None,)
        if get_origin(info.type) is not tuple or rest != [...] or kind not in reads:
            return None
        metavar = "N[,N...]" if kind in (float, int) else "VALUE[,VALUE...]"
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=lambda found: tuple(reads[kind](one) for one in found[0].split(",")),
            is_instance=lambda value: isinstance(value, tuple),
            str_from_instance=lambda value: [",".join(_shown(each) for each in value)],
        )

    @registry.primitive_rule
    def overrides(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if info.type != dict[str, Any]:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*",
            metavar="KEY=VALUE",
            instance_from_str=parse_overrides,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=overrides_words,
        )

    return registry


def _refuse_twice(arguments: Sequence[str], flag: str) -> None:
    # The parser would take the last one and forget the others.
    if sum(word == flag or word.startswith(f"{flag}=") for word in arguments) > 1:
        raise SaccadeError(f"{flag} is given twice. Give it once: {flag} key=value key=value.")


def _without_default(arguments: Sequence[str], flag: str) -> list[str]:
    """Without a flag that asks for what has become the default, and that scripts still give."""
    if flag not in arguments or arguments[0] not in _HAD_OP_LIBRARY:
        return list(arguments)
    opposite = f"--no-{flag.removeprefix('--')}"
    if opposite in arguments:
        raise SaccadeError(f"{flag} and {opposite} contradict each other. Give one of them.")
    return [word for word in arguments if word != flag]


def _with_signs(arguments: Sequence[str], flag: str) -> list[str]:
    """Numbers such as -0.1,0.3 joined to their flag: alone they would look like a flag."""
    found: list[str] = []
    for word in arguments:
        if found and found[-1] == flag and word.startswith("-") and word[1:2] in "0123456789.":
            found[-1] = f"{flag}={word}"
        else:
            found.append(word)
    return found


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"
