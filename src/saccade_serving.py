# SPDX-License-Identifier: Apache-2.0
"""The `saccade` command, defined outside the package, which another project may overwrite.

That project and its package are called `saccade` on PyPI. If both are installed in the same
environment, one overwrites files of the other or is imported in its place.
"""

import sys
from pathlib import Path

_OWN = "saccade.__main__:main"  # our entry point: our distribution once had this name too


def main() -> int:
    """Run the command line and return its exit code; 2 if the other project is installed."""
    if place := other_project():
        print(f"saccade: {refusal(place)}", file=sys.stderr)
        return 2
    from saccade.__main__ import main

    return main()


def other_project() -> Path | None:
    """Return the metadata folder of the other project if it is installed; only reads file names."""
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
    """Return a message about what was found and how to fix it."""
    return (
        f"found another project called `saccade` ({place}). Its package has the same name as that "
        "of saccade-serving and overwrites its files. Remove it with: pip uninstall saccade. "
        "Then reinstall this one, in a clone with: pip install --force-reinstall --no-deps ."
    )
