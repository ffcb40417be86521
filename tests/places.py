# SPDX-License-Identifier: Apache-2.0
"""Places of files, for tests in whichever folder."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PACKAGE = ROOT / "src" / "saccade"
