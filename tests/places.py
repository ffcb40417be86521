# SPDX-License-Identifier: Apache-2.0
"""Paths of files that tests in any folder use."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PACKAGE = ROOT / "src" / "saccade"
