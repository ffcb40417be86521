# SPDX-License-Identifier: Apache-2.0
"""Build the wheel so that the same sources give the same bytes: python supply_chain/wheel.py

It is built from a copy of the tracked files, so that no other files get into it. Times, modes and
order in the zip file, which depend on the machine, are then set to fixed values.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
KERNELS = Path("plugins/native/lib")
# The earliest time that a zip file can store, unless SOURCE_DATE_EPOCH is set.
_OLDEST = 315532800


def build(source: Path, into: Path, *, pure: bool, names: Sequence[str] = ()) -> Path:
    """Build the wheel of a tree, with kernels for this platform unless `pure`.

    `names` are the files to use; default: those that git tracks.

    Raises: CalledProcessError if pip fails.
    """
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="saccade-wheel-") as folder:
        tree, built = Path(folder) / "source", Path(folder) / "built"
        for name in names or tracked(source):
            if (source / name).is_file() or (source / name).is_symlink():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, tree / name, follow_symlinks=False)
        if not pure:
            shutil.copytree(source / KERNELS, tree / KERNELS)
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        if not pure:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            command += [f"--config-settings=--build-option=--plat-name={platform}"]
        subprocess.run([*command, "-w", built, tree], check=True)
        (wheel,) = built.glob("*.whl")
        partial = into / f".{wheel.name}"
        normalise(wheel, partial)
        return partial.replace(into / wheel.name)


def normalise(wheel: Path, target: Path) -> None:
    """Rewrite a wheel with fixed times and modes and with its files sorted by name."""
    when = time.gmtime(max(_OLDEST, int(os.environ.get("SOURCE_DATE_EPOCH", _OLDEST))))[:6]
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(target, "w") as after:
        # RECORD comes last, as the format recommends.
        for name in sorted(before.namelist(), key=lambda name: (name.endswith("/RECORD"), name)):
            data = before.read(name)
            if name.endswith("/RECORD"):
                data = b"".join(sorted(data.splitlines(keepends=True)))
            entry = zipfile.ZipInfo(name, when)
            entry.create_system = 3  # Unix, on which the modes are
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            after.writestr(entry, data, compresslevel=9)


def tracked(source: Path) -> list[str]:
    """Return the files of a tree that git tracks."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    return list(filter(None, listed.stdout.split("\0")))


def main(into: Path = ROOT / "dist", pure: bool = False) -> None:
    """Build the wheel and print its path.

    Args:
        into: the output folder.
        pure: build without the compiled kernels, for any platform.
    """
    print(build(ROOT, into, pure=pure))


if __name__ == "__main__":
    tyro.cli(main)
