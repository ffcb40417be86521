# SPDX-License-Identifier: Apache-2.0
"""The prose linter: each rule by its own examples, what it reads of a file, and its exceptions."""

import dataclasses
import importlib
import json
import re
import subprocess
import sys
import tomllib

import pytest
from places import ROOT

PROSE = ROOT / "prose"
SPDX = "# SPDX-License-Identifier: Apache-2.0\n"


def imported(*names):
    """Modules of the linter, without their bare names in the way of other tests."""
    sys.path.insert(0, str(PROSE))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(PROSE))
        for name in names:
            sys.modules.pop(name, None)


english, rules, check = imported("english", "rules", "check")
RULES = rules.Rules(PROSE / "rules.toml")


@pytest.fixture
def tree(tmp_path):
    """A clone with one file that has nothing to report."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "README.md").write_text("# Serving\n\nThe server reads the repository.\n")
    return tmp_path


@pytest.fixture
def run(tree, capsys):
    """The command in that clone: its exit code and lines."""

    def checked(*arguments):
        code = check.main(["--root", str(tree), *map(str, arguments)])
        return code, capsys.readouterr().out.splitlines()

    return checked


def passages(path, content):
    """What is read of a file: kind, line and words of each passage."""
    path.write_text(content)
    return [
        (passage.kind, passage.line, " ".join(passage.words.split()))
        for passage in english.passages_of(path)
        if passage.words.strip()
    ]


@pytest.mark.parametrize("rule", RULES.rules, ids=lambda rule: rule.name)
def test_a_rule_finds_its_bad_examples_and_leaves_the_good_ones(rule):
    assert rule.bad and rule.good and rule.why and rule.instead
    for words in rule.bad:
        assert list(rule.find(words)), f"not found: {words}"
    for words in rule.good:
        assert not list(rule.find(words)), f"found: {words}"


def test_each_exception_has_an_example_that_needs_it():
    for rule in RULES.rules:
        for unless in rule.unless:
            others = tuple(each for each in rule.unless if each is not unless)
            strict = dataclasses.replace(rule, unless=others)
            assert any(list(strict.find(good)) for good in rule.good), (rule.name, unless.pattern)


def test_words_that_the_glossary_forbids_are_found():
    page = (ROOT / "docs" / "glossary.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| **")]
    words = [row[0].strip("|* ") for row in rows]
    assert words == sorted(words)
    rule = next(rule for rule in RULES.rules if rule.name == "glossary")
    forbidden = [
        word
        for row in rows
        for word in re.split(r",\s*(?![^(]*\))", row[2].strip("| "))
        if word and "(" not in word
    ]
    assert len(forbidden) > 10
    for word in forbidden:
        assert list(rule.find(f"the {word} of it")), word
    for word in words:
        assert not list(rule.find(f"the {word} of it")), word


def test_markdown_is_read_without_its_code(tmp_path):
    content = (
        "# A heading\n\nText with `some code` and\n[a link](to.md).\n\n"
        "```sh\nsaccade serve\n```\n\n"
        '!!! note "A title"\n    Words of a note.\n\n    More.\n\n'
        "| a cell | another |\n|---|---|\n| x | y |\n"
    )
    assert passages(tmp_path / "page.md", content) == [
        ("markdown", 1, "A heading"),
        ("markdown", 3, "Text with `code` and a link."),
        ("markdown", 10, "A title Words of a note."),
        ("markdown", 13, "More."),
        ("markdown", 15, "a cell"),
        ("markdown", 15, "another"),
        ("markdown", 17, "x"),
        ("markdown", 17, "y"),
    ]


def test_python_is_read_as_docstrings_comments_and_messages(tmp_path):
    content = (
        f'{SPDX}"""Summary of a module.\n\nMore of it.\n\n    >>> code()\n"""\n\n'
        "# A comment on\n# two lines.\n"
        'KEY = "a-key"  # a trailing one\n'
        "def fail(path, count):\n"
        "    raise ValueError(\n"
        '        f"{path}: has # {count} of the"\n'
        '        " files that it needs"\n'
        "    )\n"
    )
    assert sorted(passages(tmp_path / "source.py", content), key=lambda passage: passage[1]) == [
        ("docstring", 2, "Summary of a module."),
        ("docstring", 4, "More of it."),
        ("comment", 9, "A comment on two lines."),
        ("comment", 11, "a trailing one"),
        ("message", 14, "{}: has # {} of the files that it needs"),
    ]


def test_other_files_are_read_as_comments_and_strings(tmp_path):
    content = f"{SPDX}# One GPU for\n# each pod.\nsummary: Requests are refused now\nkey: value\n"
    assert passages(tmp_path / "rules.yaml", content) == [
        ("message", 4, "Requests are refused now"),
        ("comment", 2, "One GPU for each pod."),
    ]
    page = "<p>One box holds\n<b>half</b> of the requests.</p>"
    assert passages(tmp_path / "page.html", page)[0] == ("message", 1, "One box holds")
    cell = {"cell_type": "markdown", "source": ["Words of\n", "a cell."]}
    code = {"cell_type": "code", "source": ["# not read"]}
    notebook = json.dumps({"cells": [code, cell]}, indent=1)
    read = passages(tmp_path / "book.ipynb", notebook)
    assert [words for _, _, words in read] == ["Words of a cell."]
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    assert english.passages_of(tmp_path / "image.png") == []


def test_bad_sentences_fail_the_command_with_their_lines(tree, run):
    assert run() == (0, [])
    (tree / "docs").mkdir()
    (tree / "docs" / "page.md").write_text(
        "# Page\n\nThe server starts. It takes\n64 samples\na request.\n"
    )
    (tree / "src").mkdir()
    (tree / "src" / "code.py").write_text(
        f'{SPDX}raise ValueError(\n    "the file is gone. "\n    "It is computed anew"\n)\n'
    )
    (tree / "LICENSE").write_text("Holds whoever stands.\n")
    code, lines = run()
    assert code == 1
    assert lines == [
        "docs/page.md:4: per: '64 samples a request': write 'per', or 'each'",
        f"src/code.py:4: archaic: 'anew': {instead('archaic')}",
    ]
    assert run(tree / "docs")[1] == lines[:1]
    code, lines = run("--summary")
    assert code == 1 and lines[0] == "archaic: 1"
    with pytest.raises(SystemExit, match="LICENSE: no file there"):
        run(tree / "LICENSE")


def instead(name):
    """What a rule says to write."""
    return next(rule.instead for rule in RULES.rules if rule.name == name)


def test_misspellings_and_british_spelling_are_found_and_artefact_is_not(tree, run):
    (tree / "README.md").write_text("An artefact folder.\nIts colour, and what\nyou recieve.\n")
    code, lines = run()
    assert code == 1
    assert lines == [
        "README.md:2: spelling: 'colour': write color",
        "README.md:3: spelling: 'recieve': write receive",
    ]


def test_a_marker_allows_its_rule_on_its_line_and_the_next(tree, run):
    page = tree / "README.md"
    page.write_text("<!-- prose: allow holds (a lock) -->\nThe thread holds two of them.\n")
    assert run() == (0, [])
    page.write_text("The thread holds two of them. <!-- prose: allow holds (a lock) -->\n")
    assert run() == (0, [])
    source = f"{SPDX}# prose: allow holds (a lock)\n# The thread holds two.\n"
    (tree / "src").mkdir()
    (tree / "src" / "code.py").write_text(source)
    assert run() == (0, [])


@pytest.mark.parametrize(
    ("marker", "rules"),
    [
        ("prose: allow holds", ["holds"]),  # without a reason
        ("prose: allow stands (a lock)", ["unused-marker", "holds"]),
        ("prose: allow holds (a lock) -->\n\n<!-- no more", ["unused-marker", "holds"]),
    ],
)
def test_a_marker_that_does_not_fit_allows_nothing(tree, run, marker, rules):
    (tree / "README.md").write_text(f"<!-- {marker} -->\nThe thread holds two of them.\n")
    code, lines = run()
    assert code == 1 and [line.split(": ")[1] for line in lines] == rules


def test_the_words_of_a_marker_are_no_hits(tree, run):
    (tree / "src").mkdir()
    (tree / "src" / "code.py").write_text(f"{SPDX}# prose: allow holds (nothing holds it)\n")
    code, lines = run()
    assert code == 1 and [line.split(": ")[1] for line in lines] == ["unused-marker"]


def test_a_rule_leaves_the_files_that_it_names():
    hears = english.Passage("markdown", 1, "The module hears another one.")
    assert list(RULES.find(hears, "docs/serving.md")) and not list(RULES.find(hears, "docs/nac.md"))


def test_limits_allow_as_many_hits_as_there_were(tmp_path):
    hits = [check.Hit("a.md", line, "long-sentence", "words", "split it") for line in (1, 2)]
    assert check.over_limits(hits, {}) == hits
    assert check.over_limits(hits, {"long-sentence": {"a.md": 2}}) == []
    assert check.over_limits(hits, {"long-sentence": {"a.md": 1}}) == hits
    assert check.over_limits(hits, {"holds": {"a.md": 2}}) == hits
    written = tmp_path / "limits.toml"
    check.write_limits(hits, written)
    assert tomllib.loads(written.read_text()) == {"long-sentence": {"a.md": 2}}


def test_long_sentences_of_documents_are_found():
    def found(kind, words):
        return [each.rule for each in RULES.find(english.Passage(kind, 1, words), "a.md")]

    longest = " ".join(["word"] * RULES.longest)
    assert found("markdown", f"{longest}. Then {longest[:-5]}.") == []
    assert found("markdown", f"It is. And {longest}.") == ["long-sentence"]
    assert found("comment", f"And {longest}.") == []


def test_make_check_runs_it_on_the_whole_tree(tree):
    recipe = (ROOT / "Makefile").read_text().partition("\ncheck: ")[2].partition("\n\n")[0]
    assert "\t$(BIN)/python prose/check.py\n" in recipe
    names = set(check.tracked(ROOT, RULES.files))
    assert {"README.md", "docs/serving.md", "src/saccade/core/errors.py", "Makefile"} <= names
    (tree / "README.md").write_text("One model a file.\n")
    command = [sys.executable, PROSE / "check.py", "--root", tree]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "prose: 1 hit\n")
