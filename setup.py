# SPDX-License-Identifier: Apache-2.0
"""Create the links in src/saccade again if an archive was unpacked without them, as pip does.

Everything else is in pyproject.toml.
"""

from pathlib import Path

from setuptools import setup

for place in Path("src", "saccade").iterdir():
    if place.is_file() and not place.suffix:  # the text of a link
        folder = place.read_text()
        place.unlink()
        place.symlink_to(folder)

setup()
