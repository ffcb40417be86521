# SPDX-License-Identifier: Apache-2.0
"""No text of a file, a server or a file's name commands the terminal or page that shows it."""

import io
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_figures import figures, hostile

from saccade.core.errors import SaccadeError
from saccade.core.escaping import escaped, escaped_line, escaped_message
from saccade.core.progress import progress_of
from saccade.core.verbosity import EscapedFormatter
from saccade.models.attention_maps import MapRow, Panel
from saccade.serving.bench import report
from saccade.serving.client.client import Classification
from saccade.serving.commands import calls as call_commands
from saccade.serving.commands import cli
from saccade.serving.commands.command import Answer
from saccade.serving.commands.image_files import ImageAnswers
from saccade.serving.commands.pictures import maps_png

# Clears the screen; sets a title; turns letters round; half a pair; a C1 escape; rich's markup.
NASTY = "a\x1b[2J\x1b]0;owned\x07\u202egnp\u2066\ud800\x9b31m[/red]\u2028$x_"


def is_harmless(text: str) -> bool:
    return all(each.isprintable() or each in "\n\t" for each in text)


def test_commands_are_written_out_and_nothing_else_is_changed() -> None:
    assert escaped("\x1b[2J\x9b\u202e\ud800\U000e0041") == r"\x1b[2J\x9b\u202e\ud800\U000e0041"
    honest = "weiß, 猫, 👩‍👧, é: a\tb\nc — “x” ∞"
    assert escaped(honest) == honest
    assert escaped_line("cat\nsaccade: verified\tok\r") == r"cat\nsaccade: verified\tok\r"
    assert escaped_message("no\nsaccade: yes") == "no\n  saccade: yes"


@pytest.mark.parametrize("code", [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F)])
def test_every_control_is_written_out(code: int) -> None:
    assert escaped_line(chr(code)).isprintable()


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: Any) -> Any:
    """Output of the command line for an answer, or for an error."""

    def dispatch(arguments: object) -> tuple[Answer, bool]:
        if isinstance(answer, Exception):
            raise answer
        cli._print_text(answer)
        return Answer({}), False

    monkeypatch.setattr(cli, "_dispatch", dispatch)
    cli.run([])
    return capsys.readouterr()


@pytest.mark.parametrize("kind", [SaccadeError, RuntimeError])
def test_errors(
    kind: type[Exception], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = run(capsys, monkeypatch, kind(f"{NASTY}\nsaccade: all variants passed")).err
    assert is_harmless(printed) and r"\x1b[2J" in printed
    if kind is SaccadeError:
        assert "\n  saccade: all" in printed and "\nsaccade: all" not in printed


def test_texts_and_tables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Group
    from rich.table import Table

    table = Table(NASTY.replace("\ud800", ""), title=NASTY.replace("\ud800", ""))
    table.add_row("cell " + NASTY.replace("\ud800", ""))
    for answer in (NASTY, Group(table, "a line " + NASTY.replace("\ud800", ""))):
        printed = run(capsys, monkeypatch, answer).out
        assert is_harmless(printed) and r"\x1b[2J" in printed and "[/red]" in printed


def test_labels_of_a_server_stay_on_their_line(tmp_path: Path) -> None:
    found = Classification(labels=(("cat\nsaccade: verified", 0.5),), variant=f"v{NASTY}\nx")
    done = ImageAnswers((tmp_path / f"i{NASTY}\n.png",), (found,), {})
    answer = call_commands._labelled(done)
    assert answer.text.isprintable()
    # For a machine it is exact.
    assert json.loads(json.dumps(answer.data))[0]["variant"] == found.variant


def test_progress_and_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    error = io.StringIO()
    monkeypatch.setattr(error, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr", error)
    monkeypatch.setenv("TERM", "xterm")
    with progress_of("look", 1) as advance:
        advance(1, note=NASTY)
    assert "owned" in error.getvalue() and "\x1b]0;" not in error.getvalue()
    assert "\u202e" not in error.getvalue()
    record = logging.LogRecord("saccade.server", 20, "", 0, "%s", (f"{NASTY}\nfaked",), None)
    line = EscapedFormatter("%(message)s").format(record)
    assert is_harmless(line) and "\n  faked" in line


def test_page() -> None:
    page = report.page(hostile(figures(), '\u202e"<a>\x1b'), b"")
    assert r"\u202e&#34;&lt;a&gt;\x1b" in page
    assert not {"\u202e", "\x1b"} & {*page.replace(report._library(), "")}


def test_label_in_a_picture_is_no_formula() -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    row = MapRow("$x_$", (Panel("$\\frac$", weights=np.ones((2, 2))),), {})
    assert maps_png([row], pixels)[:4] == b"\x89PNG"
    assert maps_png([replace(row, title="plain")], pixels)[:4] == b"\x89PNG"
