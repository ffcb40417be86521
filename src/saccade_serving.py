# SPDX-License-Identifier: Apache-2.0
"""The `saccade` command, from outside the package: another project's package may hide ours.

That project is called `saccade` on PyPI, and its package is too. Installed in one environment, one
overwrites files of the other, or is found in its place.
"""

import sys
from pathlib import Path

_OWN = "saccade.__main__:main"  # the entry point of ours, which once had that name too


def main() -> int:
    """Run the command line and return its exit code; 2 beside the other project."""
    if place := other_project():
        print(f"saccade: {refusal(place)}", file=sys.stderr)
        return 2
    from saccade.__main__ import main

    return main()


def other_project() -> Path | None:
    """Metadata of the other project where it is installed; looks at names of files alone."""
    for folder in dict.fromkeys(sys.path):
        for place in Path(folder).glob("saccade-*.dist-info"):
            if not _is_ours(place):
                return place.absolute()
    return None


def _is_ours(place: Path) -> bool:
    try:
        return _OWN in (place / "entry_points.txt").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def refusal(place: Path) -> str:
    """One sentence on what was found, and how to get out of it."""
    return (
        f"found another project called `saccade` ({place}), whose package has the same name as "
        "that of saccade-serving and overwrites its files. Remove it with: pip uninstall saccade. "
        "Then install this one again with: pip install --force-reinstall --no-deps "
        "saccade-serving (in a clone: pip install --force-reinstall --no-deps .)"
    )
