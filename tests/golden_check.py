# SPDX-License-Identifier: Apache-2.0
"""Run every recorded case of the authors' code in a folder: python tests/golden_check.py FOLDER.

The folder's name is that of the family. tests/golden has a subset of the cases, which the test
suite runs.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

CASES = Path(__file__).with_name("golden_cases")
FAMILIES = tuple(sorted(path.stem for path in CASES.glob("*.py")))


def cases_of(family: str) -> ModuleType:
    """Import the module that runs a family's cases, with `check(folder)` and `count(folder)`."""
    return importlib.import_module(f"golden_cases.{family}")


def main(arguments: list[str]) -> int:
    """Return 0 if every case passes, 1 if one fails, 2 for a folder without cases."""
    if len(arguments) != 1 or Path(arguments[0]).resolve().name not in FAMILIES:
        print(f"expected a folder with one of these names: {', '.join(FAMILIES)}", file=sys.stderr)
        return 2
    folder = Path(arguments[0]).resolve()
    cases = cases_of(folder.name)
    failures = cases.check(folder)
    left_out = getattr(cases, "left_out", lambda _: {})(folder)
    print("\n".join([*failures, *(f"{name}: left out, {why}" for name, why in left_out.items())]))
    rest = f", {len(left_out)} left out" if left_out else ""
    print(f"{folder.name}: {cases.count(folder)} cases, {len(failures)} failures{rest}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
