# SPDX-License-Identifier: Apache-2.0
"""The command line, for tests of what it prints."""

import pytest

from saccade.serving.commands import cli


@pytest.fixture
def saccade(capsys):
    """Run the command line here; gives exit code, standard output and standard error."""

    def call(*arguments):
        try:
            code = cli.run([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    return call
