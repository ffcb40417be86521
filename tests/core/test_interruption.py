# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM of the command line: during imports, in a command, where it is swallowed."""

import subprocess
import sys
from pathlib import Path

import pytest

_AT_IMPORT = """
import os, signal, sys
number, when = int(sys.argv.pop(1)), int(sys.argv.pop(1))
seen = 0
def hook(event, given):
    global seen
    if event == "import":
        seen += 1
        if seen == when:
            os.kill(os.getpid(), number)
from saccade.__main__ import main
sys.addaudithook(hook)
sys.exit(main())
"""
_IN_COMMAND = """
import os, sys, time
from saccade.serving.commands import cli
from saccade.serving.commands.command import Answer, Command
from saccade.__main__ import main
class Swallows:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
def wraps():
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
    except KeyboardInterrupt as error:
        raise ImportError("cannot be imported") from error
def doctor() -> Answer:
    HERE
    for _ in range(500):
        time.sleep(0.01)
    return Answer({}, "not interrupted")
cli.COMMANDS["doctor"] = Command(doctor, "")
sys.argv = ["saccade", "doctor"]
"""


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize("number", [2, 15])
@pytest.mark.parametrize("when", [5, 150, 400])
def test_during_the_imports(number, when):
    done = run(_AT_IMPORT, number, when, "models")
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr == "saccade: interrupted.\n"


@pytest.mark.parametrize("number", [2, 15])
def test_interrupt_while_a_dataclass_is_made(tmp_path, number):
    # Of such a moment Python remembers more than the exception, see interruption.Interrupted.
    (tmp_path / "commands.py").write_text(
        "import sys\n"
        "from saccade.core import interruption\n"
        "interruption.raise_on_signals()\n"
        "try:\n"
        f"    exec('import os; os.kill(os.getpid(), {number}); str()')\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(interruption.tell())\n"
    )
    command = [sys.executable, "-m", "commands"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + number, "saccade: interrupted.\n")


@pytest.mark.parametrize("number", [2, 15])
@pytest.mark.parametrize("how", ["Swallows()", "wraps()"])
def test_where_it_is_swallowed_or_wrapped(number, how):
    code = _IN_COMMAND.replace("HERE", how).replace("int(sys.argv[1])", str(number))
    done = run(code + "sys.exit(main())\n")
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr == "saccade: interrupted.\n"


def test_standard_output_without_room():
    with Path("/dev/full").open("w") as full:
        code = _IN_COMMAND.replace("HERE", "return Answer({})")
        code = code.replace('"doctor"]\n', '"doctor", "--json"]\n')
        words = [sys.executable, "-c", code + "sys.exit(main())"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=500)
    assert done.returncode == 2
    assert "found no space left to write to" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("error", ["MemoryError()", 'RuntimeError("cannot allocate memory: 1 GB")'])
def test_an_allocation_that_fails_is_not_a_bug(error):
    """Estimates may be too small; libraries raise errors of their own for it."""
    code = _IN_COMMAND.replace("HERE", f"raise ValueError('no graph') from {error}")
    done = run(code + "sys.exit(main())\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert "found too little memory to continue (no graph)" in done.stderr
    assert "Traceback" not in done.stderr
