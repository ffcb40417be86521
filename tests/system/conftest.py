# SPDX-License-Identifier: Apache-2.0
"""The command line, run in the process of the tests."""

import pytest

from saccade.serving.commands import cli


@pytest.fixture
def saccade(capsys, monkeypatch):
    """Run the command line on a terminal of 80 columns; gives exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments):
        try:
            code = cli.run([*map(str, arguments)])
        except SystemExit as end:
            code = end.code
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    return call
