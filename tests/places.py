# SPDX-License-Identifier: Apache-2.0
"""Paths of files that tests in any folder use."""

import importlib.util
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PACKAGE = ROOT / "src" / "saccade"
# Folders of the root that are packages: `src/saccade` has a link to each.
LINKED = sorted(path for path in PACKAGE.iterdir() if path.is_symlink())


def package_files(pattern: str = "*.py") -> list[Path]:
    """Return the files of the package, each below the name of its module; `rglob` skips links."""
    return sorted(path for folder in (PACKAGE, *LINKED) for path in folder.rglob(pattern))


def module_at(path: Path) -> ModuleType:
    """Import a file that no package contains, anew each time; its own name is that of the file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
