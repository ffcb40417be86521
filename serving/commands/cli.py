# SPDX-License-Identifier: Apache-2.0
"""The command line: one table of commands, each of which calls a verb of the Python API."""

import io
import json
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from itertools import takewhile
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from saccade import __version__
from saccade.core import interruption
from saccade.core.errors import GateFailed, SaccadeError, ServerFailed, missing_package
from saccade.core.escaping import escaped, escaped_line
from saccade.core.files import is_full
from saccade.core.verbosity import note, say
from saccade.serving.commands import artefacts, calls, closings, models
from saccade.serving.commands.command import Answer, Command, Outcome, Result
from saccade.serving.commands.explore.explore import explore
from saccade.serving.commands.parsing import in_words, known_command, ways_to_write
from saccade.serving.commands.predict import predict

_HEAD = """\
usage: saccade [--version] [-q] [-v] COMMAND ...

Turn a checkpoint of an attention-structured vision model into a served one.
"""
_FOOT = """\
Options of every command:
  -h, --help     show the arguments and options, with two examples
  --json         print machine-readable output on standard output
  -q, --quiet    print no progress and no notes
  -v, --verbose  print more logs on standard error

Start with:
  saccade export shipped:digits-sum --out build/digits-sum"""

OUR_BUG = 70
_MANNERS = ("-q", "--quiet", "-v", "--verbose")  # also accepted in front of the command


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code.

    0: success. 1: a gate or check failed. 2: wrong input or a missing package. 3: the server
    failed. 70: a bug in saccade, with its stack trace. 130 and 143: interrupted by Ctrl-C and
    SIGTERM. Only the answer goes to standard output.
    """
    interruption.raise_on_signals()
    try:
        outcome = _dispatch(arguments)
        result = outcome.result
        _print(outcome)
        sys.stdout.flush()
        for line in outcome.closing:
            note(escaped_line(line))
    except SystemExit:
        raise
    except BrokenPipeError:
        # The reader has gone (`saccade ... | head`), so there is nobody left to write to.
        sys.stderr.close()
        return 0
    except BaseException as error:
        return _exit_code(error)
    return int(getattr(result, "exit_code", 0))


def _exit_code(error: BaseException) -> int:
    # Imported modules and callbacks may turn an interrupt into another exception.
    said_so = isinstance(error, GateFailed | ServerFailed)
    if isinstance(error, KeyboardInterrupt) or (interruption.received() and not said_so):
        return interruption.tell()
    error = missing_package(error) or error
    if isinstance(error, SaccadeError):
        say(str(error))
        return error.exit_code
    if isinstance(error, OSError) and is_full(error):
        _drop_output()
        place = f"{escaped(str(error.filename))}: " if error.filename else ""
        print(
            f"saccade: {place}found no space left to write to ({error.strerror}), expected some. "
            "Free space on that disk, and where TMPDIR and standard output are, then try again.",
            file=sys.stderr,
        )
        return SaccadeError.exit_code
    from saccade.core.resources import MORE_MEMORY, is_out_of_memory  # refused input does not wait

    if is_out_of_memory(error):
        reason = escaped(str(error).partition("\n")[0][-200:])
        print(
            f"saccade: found too little memory to continue ({reason or 'MemoryError'}). "
            f"{MORE_MEMORY}",
            file=sys.stderr,
        )
        return SaccadeError.exit_code
    trace = "".join(traceback.format_exception(error))
    print(escaped(trace), end="", file=sys.stderr)
    print("saccade: This is a bug in saccade. Please report it.", file=sys.stderr)
    return OUR_BUG


def _drop_output() -> None:
    """Discard unwritten output: Python would try to write it again on exit, and fail."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: Sequence[str]) -> Outcome:
    leading = [*takewhile(lambda word: word in _MANNERS, arguments)]
    words = [*arguments[len(leading) :], *leading]
    if arguments[len(leading) :] in ([], ["-h"], ["--help"]):
        return _overview(asked=bool(arguments[len(leading) :]))
    if words[0] == "--version":
        return Outcome(Answer({"saccade": __version__}, f"saccade {__version__}"))
    command = COMMANDS[known_command(words[0], COMMANDS)]
    _silence_grpc(words)
    _refuse_twice(words, "--set")
    try:
        with in_words(command, words):
            return _parsed(_with_signs(words, "--move"))
    except SystemExit as end:
        if not end.code and {"-h", "--help"} & set(words):
            print("examples:\n" + textwrap.indent(command.examples, "  "))
        raise


def _silence_grpc(words: Sequence[str]) -> None:
    """Without -v, leave gRPC's own log out: our message explains a failed connection.

    Only for commands with --url: others may start a server, whose log is needed.
    """
    if {"-v", "--verbose"}.isdisjoint(words) and "--url" in {w.partition("=")[0] for w in words}:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _parsed(words: Sequence[str]) -> Outcome:
    commands = {
        name: command.callable(words if name == words[0] else ())
        for name, command in COMMANDS.items()
    }
    outcome: Outcome = tyro.extras.subcommand_cli_from_dict(
        commands,
        prog="saccade",
        description="Turn a checkpoint of an attention-structured vision model into a served one.",
        args=words,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        registry=ways_to_write(),
    )
    return outcome


def _overview(*, asked: bool) -> Outcome:
    """Return the overview.

    Raises: SystemExit if the user did not ask for it, which means that a command is missing.
    """
    text = overview()
    if asked:
        return Outcome(Answer({name: one.summary for name, one in COMMANDS.items()}, text))
    print(text, file=sys.stderr)
    raise SystemExit(SaccadeError.exit_code)


def completion(
    shell: Annotated[Positional[Literal["bash", "zsh", "fish"]], arg(help="your shell")],
) -> Result:
    """Print a script that makes your shell complete commands and options.

    Examples:
        # complete commands and options in bash
        saccade completion bash > ~/.local/share/bash-completion/completions/saccade
        # the same in zsh, in a folder in your fpath
        saccade completion zsh > ~/.zfunc/_saccade
    """
    script = io.StringIO()
    with redirect_stdout(script), suppress(SystemExit):
        _parsed(["--tyro-print-completion", shell])
    return Answer({"shell": shell, "script": script.getvalue()}, script.getvalue().rstrip("\n"))


_TABLE = (
    Command(models.train, "Make a model", "export", closings.train, models.recipe_defaults),
    Command(models.convert, "Make a model", "export", closing=closings.train),
    Command(models.upload, "Make a model"),
    Command(models.download, "Make a model", "hub", closing=closings.download),
    Command(models.models, "Make a model"),
    Command(models.select, "Make a model", "export", closing=closings.select),
    Command(models.evaluate, "Make a model", "export", closing=closings.evaluate),
    Command(artefacts.export, "Export and verify", "export", closing=closings.export),
    Command(artefacts.verify, "Export and verify", "export", closing=closings.verify),
    Command(artefacts.group, "Export and verify", closing=closings.group),
    Command(artefacts.build, "Export and verify", "rtx", closing=closings.build),
    Command(artefacts.bench, "Measure and choose", "bench", closing=closings.bench),
    Command(artefacts.sweep, "Measure and choose", "export", closing=closings.sweep),
    Command(artefacts.choose, "Measure and choose"),
    Command(artefacts.calibrate, "Measure and choose", "bench", closing=closings.calibrate),
    Command(artefacts.plan, "Measure and choose"),
    Command(artefacts.repository, "Serve", closing=closings.repository),
    Command(artefacts.preflight, "Serve", closing=closings.preflight),
    Command(artefacts.serve, "Serve", "serve"),
    Command(artefacts.proxy, "Serve", closing=closings.output),
    Command(predict, "Answer without a server", "cpu", closing=closings.predict),
    Command(artefacts.bulk, "Answer without a server", "bulk", closing=closings.output),
    Command(calls.classify, "Call a server"),
    Command(calls.embed, "Call a server", closing=closings.output),
    Command(calls.segment, "Call a server", closing=closings.output),
    Command(calls.answer, "Call a server"),
    Command(calls.caption, "Call a server"),
    Command(calls.edit, "Call a server", closing=closings.output),
    Command(calls.replay, "Call a server"),
    Command(calls.show, "Inspect", closing=closings.output),
    Command(explore, "Inspect", "explore"),
    Command(artefacts.inspect, "Inspect"),
    Command(artefacts.demo, "Inspect", "export", closing=closings.demo),
    Command(artefacts.ops, "Inspect"),
    Command(artefacts.doctor, "Inspect"),
    Command(completion, "Inspect"),
)
COMMANDS = {command.name: command for command in _TABLE}


def _print(outcome: Outcome) -> None:
    if outcome.as_json:
        print(json.dumps(outcome.result.to_dict(), indent=1, allow_nan=False))
    elif (text := outcome.result.to_text()) is not None:
        _print_text(text)


def _print_text(text: Any) -> None:
    from rich.console import Console

    # A table that is piped into a file must not be cut off at 80 columns.
    width = None if sys.stdout.isatty() else 160
    # rich reads a table's title with the settings of the console, not with those of `print`.
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    wrap = isinstance(text, str)
    console.print(_EscapedText(text), highlight=False, soft_wrap=wrap, markup=False, emoji=False)


class _EscapedText:
    """Text or a table that may contain foreign text, with terminal commands in it escaped.

    Only the commands that the table itself makes reach the terminal.
    """

    def __init__(self, text: Any) -> None:
        self._text = escaped(text) if isinstance(text, str) else text

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for text, style, control in console.render(self._text, options):
            yield Segment(text if control else escaped(text), style, control)


def _refuse_twice(arguments: Sequence[str], flag: str) -> None:
    # The parser would use the last one and drop the others.
    if sum(word == flag or word.startswith(f"{flag}=") for word in arguments) > 1:
        raise SaccadeError(
            f"{flag} was given more than once. Pass it once: {flag} key=value key=value."
        )


def _with_signs(arguments: Sequence[str], flag: str) -> list[str]:
    """Join numbers such as -0.1,0.3 to their flag; on their own they would look like a flag."""
    words: list[str] = []
    for word in arguments:
        if words and words[-1] == flag and word.startswith("-") and word[1:2] in "0123456789.":
            words[-1] = f"{flag}={word}"
        else:
            words.append(word)
    return words


def overview() -> str:
    """Return the grouped list of commands, each with its summary line."""
    width = min(shutil.get_terminal_size().columns, 100)
    longest = max(map(len, COMMANDS))
    lines = [_HEAD]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines.append(f"{group}:")
        for command in COMMANDS.values():
            if command.group == group:
                lines += textwrap.wrap(
                    command.summary,
                    width,
                    initial_indent=f"  {command.name:<{longest}}  ",
                    subsequent_indent=" " * (longest + 4),
                )
        lines.append("")
    return "\n".join([*lines, _FOOT])
