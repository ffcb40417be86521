# SPDX-License-Identifier: Apache-2.0
"""Escaping of foreign text for people: terminal commands become visible.

Labels, file names and messages of a server can contain escape sequences that clear the screen or
set its title, and marks that reverse the order of letters. Nothing is dropped: such characters
become `\\x1b` or `\\u202e`. JSON is for machines and stays exact.
"""

import re

# C0 except tab and line feed; delete; C1; direction marks; separators; lone surrogates, which
# cannot be printed; invisible marks that join characters or start annotations.
_CODES = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
)
_COMMANDS = re.compile(f"[{_CODES}]")
_COMMANDS_OF_A_LINE = re.compile(f"[\t\n{_CODES}]")


def escaped(text: str) -> str:
    """Escape the terminal commands in text of one or more lines."""
    return _COMMANDS.sub(_written_out, text)


def escaped_line(text: object) -> str:
    """Escape text that has to stay on one line, such as a label, including its line ends."""
    return _COMMANDS_OF_A_LINE.sub(_written_out, str(text))


def escaped_message(text: object) -> str:
    """Escape a message and indent its further lines, so that none looks like a new message."""
    return escaped(str(text)).replace("\n", "\n  ")


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x100:
        return {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}.get(code, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
