# SPDX-License-Identifier: Apache-2.0
"""Read Dockerfiles, for tests on machines without Docker."""

import re
from pathlib import Path


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, with lines joined and without comments."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word, rest)
        for word, _, rest in (line.partition(" ") for line in joined.split("\n"))
        if word
    ]
