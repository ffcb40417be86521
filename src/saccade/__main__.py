# SPDX-License-Identifier: Apache-2.0
"""`saccade` and `python -m saccade`."""

import sys

from saccade import interruption


def main() -> int:
    """Run the command line and return its exit code."""
    interruption.leave_at_once()  # imports take seconds
    interruption.never_swallow()
    from saccade.serving.commands.cli import run

    try:
        code = run(sys.argv[1:])
        interruption.leave_at_once()
    except KeyboardInterrupt:  # after the command, before the line above
        code = interruption.tell()
    return code


if __name__ == "__main__":
    sys.exit(main())
