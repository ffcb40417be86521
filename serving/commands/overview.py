# SPDX-License-Identifier: Apache-2.0
"""`saccade --help`: one line per command, in the order in which they are used."""

import shutil
import textwrap
from collections.abc import Mapping

from saccade.serving.commands.examples import examples

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Make a model": ("train", "convert", "upload", "download", "models", "select", "evaluate"),
    "Export and verify": ("export", "verify", "build"),
    "Measure and choose": ("bench", "sweep", "choose", "calibrate", "plan"),
    "Serve": ("repository", "preflight", "serve", "proxy"),
    "Answer without a server": ("predict", "bulk"),
    "Call a server": ("classify", "embed", "segment", "answer", "caption", "edit"),
    "Inspect": ("show", "explore", "inspect", "demo", "ops", "doctor", "completion"),
}
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


def overview(summaries: Mapping[str, str]) -> str:
    """Return the grouped list of commands, each with its summary line."""
    width = min(shutil.get_terminal_size().columns, 100)
    longest = max(map(len, summaries))
    lines = [_HEAD]
    for group, commands in GROUPS.items():
        lines.append(f"{group}:")
        for command in commands:
            lines += textwrap.wrap(
                summaries[command],
                width,
                initial_indent=f"  {command:<{longest}}  ",
                subsequent_indent=" " * (longest + 4),
            )
        lines.append("")
    return "\n".join([*lines, _FOOT])


def epilogue(command: str) -> str:
    """Return the examples that end the help of a command."""
    return "examples:\n" + textwrap.indent(examples()[command], "  ")
