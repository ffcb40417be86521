# SPDX-License-Identifier: Apache-2.0
"""Progress as a caller sees it: steps by gate pass and sample, the time left, silence."""

import io
import sys

import pytest
from quick_gate import FEW_SAMPLES

from saccade.core.progress import Step, StepCounter, bar, part_of, progress_of, reporting, silent
from saccade.core.verbosity import verbosity


def test_steps_of_an_export_and_of_the_gate(tiny_checkpoint, tmp_path, traced_before):
    """Several per file, ever forward, to the end; the note names file, pass and sample."""
    from saccade.exporter.export import ExportOptions, export
    from saccade.exporter.gate.gate import verify

    options = ExportOptions(tmp_path / "tiny", name="tiny", budget=("1", "0.5"))
    for label, files in (("export", 2), ("verify", 2)):
        steps: list[Step] = []
        if label == "export":
            export(tiny_checkpoint, options, FEW_SAMPLES, progress=steps.append)
        else:
            verify(options.out, FEW_SAMPLES, progress=steps.append)
        assert {step.label for step in steps} == {label}
        done = [step.done for step in steps]
        assert done == sorted(done)
        assert done[-1] == pytest.approx(steps[-1].total)
        assert len(set(done)) > 10 * files, "a step for every batch of every pass"
        notes = [step.note for step in steps]
        samples = FEW_SAMPLES.real_inputs + FEW_SAMPLES.random_inputs
        for name in ("tiny-b1000-fp32", "tiny-b0500-fp32"):
            mine = [note for note in notes if note.startswith(name)]
            assert any(f"reference in float64, 8 of {samples}" in note for note in mine)
            assert any("the exported file, " in note for note in mine)


def test_time_left():
    assert Step("x", 0, 4, "", 3).seconds_left is None
    assert Step("x", 1, 4, "", 3).seconds_left == pytest.approx(9)
    assert Step("x", 4, 4, "", 3).seconds_left == 0


def test_a_piece_of_work_ends_at_its_last_step():
    """Also where a part of it was not needed."""
    steps: list[Step] = []
    with reporting(steps.append), progress_of("work", 4) as advance:
        own = StepCounter(advance, "first")
        done = part_of(own, 1, 8, "half")
        done(4)
        own.up_to(2)
    assert [step.done for step in steps] == [0, 0, 0.5, 2]
    assert [step.note for step in steps] == ["first", "first: half", "first: half, 4 of 8", "first"]


def test_what_is_nested_reports_to_the_same():
    steps: list[Step] = []
    with reporting(steps.append):
        with reporting(bar), progress_of("inner", 1) as advance:
            advance()
        with reporting(None), progress_of("unseen", 1) as advance:
            advance()
    assert [step.label for step in steps] == ["inner"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("quiet", [False, True])
def test_a_bar_is_drawn_on_a_terminal_unless_quiet(monkeypatch, quiet):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with verbosity(quiet=quiet), progress_of("work", 2) as advance:
        advance(1, "a note")
    assert ("work" in terminal.getvalue()) == (not quiet)
    silent(1, "nothing")


@pytest.mark.parametrize(
    ("quiet", "line_s", "printed"),
    [
        (False, 0, "work: 50 %, about 0.0 s left, a note\n"),
        (False, 30, ""),
        (True, 0, ""),
    ],
)
def test_a_log_gets_a_line_now_and_then_unless_quiet(monkeypatch, quiet, line_s, printed):
    monkeypatch.setattr("saccade.core.progress._LINE_S", line_s)
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with verbosity(quiet=quiet), progress_of("work", 2) as advance:
        advance(1, "a note")
    assert log.getvalue() == printed
