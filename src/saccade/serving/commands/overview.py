# SPDX-License-Identifier: Apache-2.0
"""`saccade --help`: the commands in the order in which they are used, a line each."""

import shutil
import textwrap
from collections.abc import Mapping

from saccade.serving.commands.examples import examples

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Make a model": ("train", "convert", "models", "select", "evaluate"),
    "Export and prove": ("export", "verify", "build"),
    "Measure and choose": ("bench", "sweep", "choose", "calibrate", "plan"),
    "Serve": ("repository", "preflight", "serve", "proxy", "bulk"),
    "Ask a server": ("classify", "embed", "segment", "answer", "caption", "edit"),
    "Look": ("show", "explore", "inspect", "demo", "ops", "doctor", "completion"),
}
_HEAD = """\
usage: saccade [--version] [-q] [-v] COMMAND ...

Take a checkpoint of an attention-structured vision model to a served model.
"""
_FOOT = """\
Options of every command:
  -h, --help     show what the command takes, with two examples
  --json         print a machine-readable answer on standard output
  -q, --quiet    no progress and no notes
  -v, --verbose  more logging on standard error

Start with:
  saccade export shipped:digits-sum --out build/digits-sum"""


def overview(summaries: Mapping[str, str]) -> str:
    """The commands in groups, each with the line that is given for it."""
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
    """Examples, as the help of a command ends with them."""
    return "examples:\n" + textwrap.indent(examples()[command], "  ")
