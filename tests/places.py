# SPDX-License-Identifier: Apache-2.0
"""Paths of files that tests in any folder use."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PACKAGE = ROOT / "src" / "saccade"
# Folders of the root that are packages: `src/saccade` has a link to each.
LINKED = sorted(path for path in PACKAGE.iterdir() if path.is_symlink())


def package_files(pattern: str = "*.py") -> list[Path]:
    """Return the files of the package, each below the name of its module; `rglob` skips links."""
    return sorted(path for folder in (PACKAGE, *LINKED) for path in folder.rglob(pattern))
