# SPDX-License-Identifier: Apache-2.0
"""Text of others where a person reads it: what would command the terminal is written out.

Labels, names of files, and what a server says can hold escapes that clear a screen or set a title,
and marks that turn the order of letters round. Nothing is left out: each becomes `\\x1b` or
`\\u202e`. JSON is for machines and stays exact.
"""

import re

# C0 but tab and line feed, delete, C1; marks of direction; separators; halves of pairs, which no
# terminal can be given; marks that are invisible and join or begin notes.
_CODES = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
)
_COMMANDS = re.compile(f"[{_CODES}]")
_COMMANDS_OF_A_LINE = re.compile(f"[\t\n{_CODES}]")


def escaped(text: str) -> str:
    """A text of several lines, its commands written out."""
    return _COMMANDS.sub(_written_out, text)


def escaped_line(text: object) -> str:
    """A text that has to stay on one line, such as a label: line ends are written out too."""
    return _COMMANDS_OF_A_LINE.sub(_written_out, str(text))


def escaped_message(text: object) -> str:
    """A message of which the first line alone begins at the margin, as no other message may."""
    return escaped(str(text)).replace("\n", "\n  ")


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x100:
        return {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}.get(code, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
