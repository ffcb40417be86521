# SPDX-License-Identifier: Apache-2.0
"""`saccade` and `python -m saccade`."""

import sys


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        from saccade.serving.cli import run
    except KeyboardInterrupt:  # imports take a second, and nothing has begun
        print("saccade: interrupted.", file=sys.stderr)
        return 130
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
