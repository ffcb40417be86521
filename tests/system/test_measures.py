# SPDX-License-Identifier: Apache-2.0
"""The measures of size: what they count, and that a number may only fall."""

import tomllib

import measures
import pytest
from source_measures import MEASURES, circles_of, code_lines, tree_of


def test_code_lines(tmp_path):
    source = tmp_path / "code.py"
    source.write_text(
        '"""What it is.\n\nAnd more.\n"""\n\n# why\nx = 1  # here\n\n\ndef f():\n    """Doc."""\n'
        '    return """\n    a text\n    """\n\n\nclass C:\n    """Doc."""\n\n    y = 2\n'
    )
    assert code_lines(source) == len(["x", "def", "return", "a text", "end", "class", "y"])
    assert tree_of(source) is tree_of(source)


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"f"}, "f": {"e"}}
    assert circles_of(graph) == [("a", "b", "c"), ("e", "f")]
    assert circles_of({"a": {"b"}, "b": set()}) == [] == circles_of({})


def test_every_measure_has_a_limit():
    assert set(tomllib.loads(measures.LIMITS.read_text())["sources"]) == set(MEASURES)


@pytest.fixture
def limits(tmp_path, monkeypatch):
    """A file of limits, for a tree of 10 files."""
    path = tmp_path / "measures.toml"
    path.write_text('[sources]\n# Why.\n"files" = 11\n\n[walks]\nbench = [2, 1]\n')
    monkeypatch.setattr(measures, "LIMITS", path)
    monkeypatch.setattr(measures, "MEASURES", {"files": lambda: 10})
    return path


def test_a_number_that_has_risen_fails(limits, monkeypatch, capsys):
    assert measures.main([]) == 0
    assert "10 of 11 files" in capsys.readouterr().out
    monkeypatch.setattr(measures, "MEASURES", {"files": lambda: 12})
    assert measures.main(["--write"]) == 1
    assert (
        "files: may only fall" in capsys.readouterr().out and '"files" = 11' in limits.read_text()
    )


def test_numbers_that_have_fallen_are_written(limits):
    assert measures.main(["--write"]) == 0
    assert limits.read_text() == '[sources]\n# Why.\n"files" = 10\n\n[walks]\nbench = [2, 1]\n'
