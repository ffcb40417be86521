# SPDX-License-Identifier: Apache-2.0
"""The list of what each results file measured, and how its age is computed."""

import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch

import pytest
from places import ROOT, module_at

FILES = tomllib.loads((ROOT / "benchmarks" / "measured.toml").read_text())["files"]


@pytest.mark.parametrize("name", FILES)
def test_what_was_measured_is_there(name):
    tool, program = FILES[name]["again"].split()[:2]
    paths = [f"benchmarks/results/{name}", *FILES[name]["code"]]
    if tool == "make":
        assert f"\n{program}:" in (ROOT / "Makefile").read_text()
    else:
        paths.append(program)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_result_is_listed_or_of_a_finished_experiment():
    _, finished = (ROOT / "benchmarks" / "README.md").read_text().split("## Finished experiments")
    known = [*FILES, *re.findall(r"`results/([^`]+)`", finished)]
    names = [path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    assert [name for name in names if not any(fnmatch(name, one) for one in known)] == []


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository with a figure of ten lines of code, and `fresh` for it."""
    fresh = module_at(ROOT / "benchmarks" / "fresh.py")
    monkeypatch.setattr(fresh, "ROOT", tmp_path)
    for folder in ("code", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
    listed = '[files]\n"a.json" = { code = ["code"], readme = true, again = "python a.py" }\n'
    (tmp_path / "benchmarks" / "measured.toml").write_text(listed)
    (tmp_path / "benchmarks" / "results" / "a.json").write_text("{}")
    change(tmp_path, "old\n" * 10)
    return fresh


def change(place, text):
    """Commit a text as the code."""
    (place / "code" / "a.py").write_text(text)
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for words in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "change")):
        subprocess.run(("git", "-C", place, *words), check=True)


@pytest.mark.parametrize(("new", "code"), [(0, 0), (5, 0), (6, 1)])
def test_a_figure_of_the_readme_is_too_old_once_most_of_its_code_is_newer(
    clone, tmp_path, capsys, new, code
):
    if new:
        change(tmp_path, "new\n" * new + "old\n" * (10 - new))
    assert clone.main() == code
    said = capsys.readouterr().out
    assert f"{10 * new}% of its code is newer  README" in said
    assert ("measure again: python a.py" in said) == bool(code)


def test_without_history_no_age_is_known(clone, tmp_path, capsys):
    shutil.rmtree(tmp_path / ".git")
    assert clone.main() == 0
    assert "is not known" in capsys.readouterr().out
