# SPDX-License-Identifier: Apache-2.0
"""Runs every recorded case of the authors' codes in a folder: python tests/golden_check.py FOLDER.

The folder's name says which family's cases it holds; the copies in tests/golden are a part of
them, which the test suite runs.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

CASES = Path(__file__).with_name("golden_cases")
FAMILIES = tuple(sorted(path.stem for path in CASES.glob("*.py")))


def cases_of(family: str) -> ModuleType:
    """The module that runs a family's cases: `check(folder)` and `count(folder)`."""
    spec = importlib.util.spec_from_file_location(f"golden_{family}", CASES / f"{family}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main(arguments: list[str]) -> int:
    """0 if every case holds, 1 if one does not, 2 for a folder that holds none."""
    if len(arguments) != 1 or Path(arguments[0]).resolve().name not in FAMILIES:
        print(f"expected one folder named as one of: {', '.join(FAMILIES)}", file=sys.stderr)
        return 2
    folder = Path(arguments[0]).resolve()
    cases = cases_of(folder.name)
    failures = cases.check(folder)
    print("\n".join(failures))
    print(f"{folder.name}: {cases.count(folder)} cases, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
