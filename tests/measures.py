# SPDX-License-Identifier: Apache-2.0
"""Print what the sources measure, and fail if a number has risen: python tests/measures.py

measures.toml has the largest numbers. They may only fall: `--write` writes those of now. Who has to
raise one says in that file, beside the number, what for and what it replaced.
"""

import argparse
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from source_measures import MEASURES, circles, repeated_class_names, single_importers

LIMITS = Path(__file__).with_suffix(".toml")
# What a number stands for, shown if it has risen.
_DETAILS = {
    "files with one importer": single_importers,
    "class names in two or more files": repeated_class_names,
    "circles of imports": circles,
}


def risen(measured: dict[str, int], limits: dict[str, int]) -> list[str]:
    """Return the names of the numbers that are larger than their limits."""
    return [name for name, value in measured.items() if value > limits[name]]


def lowered(text: str, measured: dict[str, int]) -> str:
    """Return the file of limits with the numbers that have fallen; comments stay."""
    for name, value in measured.items():
        line = re.compile(rf'^("{re.escape(name)}" = )(\d+)', re.MULTILINE)
        text = line.sub(lambda found, now=value: found[1] + str(min(now, int(found[2]))), text)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the measures beside their limits; 1 if one has risen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--write", action="store_true", help="write the numbers that have fallen")
    given = parser.parse_args(arguments)
    limits = tomllib.loads(LIMITS.read_text())
    measured = {name: measure() for name, measure in MEASURES.items()}
    for name, value in measured.items():
        print(f"{value:>8,} of {limits['sources'][name]:,} {name}")
    for name, (places, files) in limits["walks"].items():
        print(f"         {name} gives a folder to at most {places} functions of {files} files")
    if given.write:
        LIMITS.write_text(lowered(LIMITS.read_text(), measured))
    wrong = risen(measured, limits["sources"])
    for name in wrong:
        shown = "".join(f"\n  {each}" for each in _DETAILS.get(name, list)())
        print(f"{name}: may only fall. Make it smaller, or say in {LIMITS.name} what for.{shown}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
