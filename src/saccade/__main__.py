# SPDX-License-Identifier: Apache-2.0
"""Entry point of `saccade` and `python -m saccade`."""

import sys

import saccade_serving
from saccade.core import interruption


def main() -> int:
    """Run the command line and return its exit code."""
    interruption.leave_at_once()  # imports take seconds
    interruption.never_swallow()
    from saccade.serving.commands.cli import run

    try:
        code = run(sys.argv[1:])
        interruption.leave_at_once()
    except KeyboardInterrupt:  # between the end of the command and the line above
        code = interruption.tell()
    return code


if __name__ == "__main__":
    sys.exit(saccade_serving.main())
