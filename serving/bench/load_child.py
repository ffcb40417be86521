# SPDX-License-Identifier: Apache-2.0
"""The parent's end of a process that loads a server: an order as a line of JSON, a line back."""

import json
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from saccade.errors import ServerFailed
from saccade.serving.server import die_with_parent as leash


class LoadChild:
    """Runs `module` while its block lasts; the process dies with its parent, too."""

    def __init__(self, module: str, url: str) -> None:
        self.url = url
        self._module = module
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        # Its own session: a Ctrl-C reaches the parent alone, which then ends this process.
        self._process = subprocess.Popen(
            leash.leashed([sys.executable, "-m", self._module]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None and self._process.stdin and self._process.stdout
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """What the process answers to an order.

        Raises: ServerFailed if it ends.
        """
        assert self._process is not None and self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ServerFailed(
                f"The load generator ended with code {self._process.wait()} while it loaded "
                f"{self.url}. Its own message is above."
            )
        answer: dict[str, Any] = json.loads(line)
        return answer
