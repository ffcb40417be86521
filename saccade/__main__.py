# SPDX-License-Identifier: Apache-2.0
"""`saccade` and `python -m saccade`."""

import sys


def main() -> int:
    """Run the command line and return its exit code."""
    from saccade.serving.cli import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
