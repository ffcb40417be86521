# SPDX-License-Identifier: Apache-2.0
"""The wheel holds what the editable install shows, and a missing extra explains itself."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata

import pytest
from places import PACKAGE, ROOT, module_at, package_files

import saccade
import saccade_serving
from saccade.core import errors
from saccade.core.errors import DISTRIBUTION, MissingPackage, install, require
from saccade.core.machine import version_of


@pytest.fixture(scope="module")
def builder():
    """The script that builds wheels."""
    return module_at(ROOT / "supply_chain" / "wheel.py")


@pytest.fixture(scope="module")
def names():
    """All files that are no build's: those that are not committed yet, too."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return list(filter(None, listed.stdout.split("\0")))


@pytest.fixture(scope="module")
def wheel(builder, names, tmp_path_factory):
    """A wheel built from a copy, so that nothing is left in the tree."""
    return builder.build(ROOT, tmp_path_factory.mktemp("wheel"), pure=True, names=names)


def test_what_a_zip_file_keeps_of_the_machine_is_put_away(builder, tmp_path):
    def zipped(name, order, when, mode):
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            for each in order:
                entry = zipfile.ZipInfo(each, when)
                entry.external_attr = mode << 16
                file.writestr(entry, b"b,1\na,2\n" if order[0] == "a" else b"a,2\nb,1\n")
        builder.normalise(tmp_path / name, tmp_path / f"same-{name}")
        return (tmp_path / f"same-{name}").read_bytes()

    record = "x.dist-info/RECORD"
    first = zipped("one", ["a", record], (2026, 1, 1, 0, 0, 0), 0o600)
    second = zipped("two", [record, "a"], (1999, 1, 1, 0, 0, 0), 0o664)
    assert first != second  # the file `a` differs
    names = [each.filename for each in zipfile.ZipFile(tmp_path / "same-two").infolist()]
    assert names == ["a", record]
    lists = [zipfile.ZipFile(tmp_path / f"same-{name}").read(record) for name in ("one", "two")]
    assert lists[0] == lists[1]
    modes = {
        (each.date_time, each.external_attr >> 16)
        for name in ("one", "two")
        for each in zipfile.ZipFile(tmp_path / f"same-{name}").infolist()
    }
    assert modes == {((1980, 1, 1, 0, 0, 0), 0o100644)}


@pytest.mark.journey
def test_wheel_holds_every_source_file(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    for path in package_files("*"):
        if (
            path.suffix in {".py", ".html", ".yaml", ".safetensors"}
            and "__pycache__" not in path.parts
        ):
            assert str(path.relative_to(PACKAGE.parent)) in inside
    assert {"saccade/py.typed", "saccade/__init__.pyi", "saccade_serving.py"} <= inside


@pytest.mark.journey
def test_a_zip_archive_gives_the_same_wheel(builder, names, wheel, tmp_path):
    """pip unpacks a link in a zip file as a file that contains the place it leads to."""
    for name in names:
        source, copy = ROOT / name, tmp_path / "tree" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.write_text(str(source.readlink()))
        elif source.is_file():
            shutil.copyfile(source, copy)
    made = builder.build(tmp_path / "tree", tmp_path / "built", pure=True, names=names)
    assert made.read_bytes() == wheel.read_bytes()


@pytest.mark.journey
def test_wheel_runs_without_the_tree(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys;"
        f"sys.path.insert(0, {str(tmp_path)!r});"
        "import saccade.serving.commands.cli as c; print(c.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_a_clone_beside_a_script_does_not_hide_the_package(tmp_path):
    (tmp_path / "saccade" / "src").mkdir(parents=True)  # where somebody cloned the repository
    script = tmp_path / "ask.py"
    script.write_text("from saccade import Client; print(Client.__module__)")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "saccade.serving.client.client\n"), done.stderr


def test_missing_extra_names_the_pip_command():
    with pytest.raises(MissingPackage, match=r"pip install '\S+\[export\]'"):
        require("a_package_that_is_not_there", extra="export")


def test_what_is_not_published_is_installed_from_a_clone(monkeypatch):
    assert install("cpu") == "pip install '.[cpu]' (in a clone of the repository)"
    monkeypatch.setattr(errors, "PUBLISHED", True)
    assert install("cpu") == f"pip install '{DISTRIBUTION}[cpu]'"


@pytest.mark.skipif(errors.PUBLISHED, reason="the distribution is on PyPI")
def test_nothing_tells_to_install_what_is_not_published(names):
    told = re.compile(rf"pip install [^\n`]*{DISTRIBUTION}(?!-)")
    shown = [name for name in names if name.endswith((".py", ".md", ".ipynb", ".sh", ".toml"))]
    found = {name: told.findall((ROOT / name).read_text()) for name in shown}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_nothing_tells_to_install_the_other_project_called_saccade(names):
    told = re.compile(r"""pip install [^\n`]*?(?<![\w/-])saccade(?![\w-])""")
    texts = (".py", ".md", ".txt", ".toml", ".yaml", ".sh", "Makefile", "Dockerfile")
    found = {
        name: match[0]
        for name in names
        if name.endswith(texts) and (match := told.search((ROOT / name).read_text()))
    }
    assert found == {}


def test_the_distribution_is_what_the_messages_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION


def distribution(folder, **files):
    """The metadata of an installed distribution called `saccade`, and its package."""
    place = folder / "saccade-0.1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.4\nName: saccade\nVersion: 0.1.0\n")
    for name, text in files.items():
        (place / f"{name}.txt").write_text(text)
    return place


COMMAND = [sys.executable, "-c", "import saccade_serving, sys; sys.exit(saccade_serving.main())"]


@pytest.mark.parametrize("command", [[sys.executable, "-m", "saccade"], COMMAND])
def test_beside_the_other_project_called_saccade_nothing_runs(command, tmp_path):
    place = distribution(tmp_path)
    if command is COMMAND:  # an editable installation of ours comes behind what is installed
        (tmp_path / "saccade").mkdir()
        (tmp_path / "saccade" / "__init__.py").write_text("raise ImportError('not ours')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*command, "--help"], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"saccade: found another project called `saccade` ({place})")
    assert "pip uninstall saccade. Then reinstall this one, in a clone with: pip install" in line
    assert DISTRIBUTION in line


def test_our_own_distribution_under_its_old_name_is_no_other_project(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "gone"), str(tmp_path)])
    assert saccade_serving.other_project() is None
    place = distribution(tmp_path, entry_points="[console_scripts]\nother = other:main\n")
    assert saccade_serving.other_project() == place
    own = "[console_scripts]\nsaccade = saccade.__main__:main\n"
    (place / "entry_points.txt").write_text(own)
    assert saccade_serving.other_project() is None


def test_versions_are_found_under_either_distribution(monkeypatch):
    assert version_of("saccade") == saccade.__version__

    def version(name):
        if name == "onnxruntime-gpu":
            return "1.31.1"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert version_of("onnxruntime") == "1.31.1"
    with pytest.raises(metadata.PackageNotFoundError):
        version_of("onnx")
