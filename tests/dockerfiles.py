# SPDX-License-Identifier: Apache-2.0
"""Dockerfiles as the tests read them, where no Docker is."""

import re
from pathlib import Path


def instructions(path: Path) -> list[tuple[str, str]]:
    """A Dockerfile's instructions with lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word, rest)
        for word, _, rest in (line.partition(" ") for line in joined.split("\n"))
        if word
    ]
