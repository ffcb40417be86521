# SPDX-License-Identifier: Apache-2.0
"""The wheel holds what the editable install shows, and a missing extra explains itself."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from saccade.plugins.errors import MissingPackage, require

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy, so that nothing is left in the tree."""
    work = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, tracked):
        target = work / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*command, "-w", str(work), str(work / "source")], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return next(work.glob("*.whl"))


def test_wheel_holds_every_source_file(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("plugins", "models", "export", "serving", "model_repository"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".html", ".safetensors"} and "__pycache__" not in path.parts:
                assert f"saccade/{path.relative_to(ROOT)}" in inside
    assert "saccade/py.typed" in inside


def test_wheel_runs_without_the_tree(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys;"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()];"
        f"sys.path.insert(0, {str(tmp_path)!r}); import saccade.serving.cli as c; print(c.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_missing_extra_names_the_pip_command():
    with pytest.raises(MissingPackage, match=r"pip install 'saccade\[export\]'"):
        require("a_package_that_is_not_there", extra="export")
