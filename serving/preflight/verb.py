# SPDX-License-Identifier: Apache-2.0
"""Checks a repository in a throw-away process, and goes on where one of the checks ended it."""

import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from saccade.plugins.errors import SaccadeError
from saccade.plugins.progress import progress
from saccade.serving import leash
from saccade.serving.preflight.opened import opened
from saccade.serving.preflight.report import Finding, PreflightReport
from saccade.serving.preflight.target import Target, target_of

_START_S = 120.0
_UNLOADABLE = ("library", "failed")


@dataclass(frozen=True)
class PreflightOptions:
    """The server that the repository is checked for."""

    server_version: str | None = None  # a container's line, such as 26.07; default: the bundled
    tensorrt_version: str | None = None  # that server's, to hold plans against
    memory_mib: int | None = None  # what the server may use; default: what this machine has
    timeout_s: float = 300.0  # for one check of one model

    def __post_init__(self) -> None:
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise SaccadeError(f"--timeout-s is {self.timeout_s}, expected more than 0 seconds.")
        if self.memory_mib is not None and self.memory_mib < 1:
            raise SaccadeError(f"--memory-mib is {self.memory_mib}, expected at least 1.")


def preflight(folder: Path | str, options: PreflightOptions | None = None) -> PreflightReport:
    """Everything that would make a server fail late, or answer wrongly; nothing is served.

    Raises: SaccadeError if the folder describes no repository, or for a server that is unknown.
    """
    options, folder = options or PreflightOptions(), Path(folder)
    found = opened(folder)
    target = target_of(
        options.server_version,
        options.tensorrt_version,
        options.memory_mib,
        found.deployment.runtime,
    )
    findings: list[Finding] = []
    with progress("preflight", len(found.deployment.variants) + 1) as advance:
        done = False
        while not done:
            run = _Run(folder, findings, target, options.timeout_s)
            with closing(run.findings()) as told:
                for finding in told:
                    if not findings or finding.model != findings[-1].model:
                        advance(1, note=finding.model)
                    findings.append(finding)
            done = run.done
    return PreflightReport(str(folder), target.title, tuple(findings))


class _Run:
    """One process: the findings until it ends; one more where a check ended it."""

    def __init__(
        self, folder: Path, before: Sequence[Finding], target: Target, timeout_s: float
    ) -> None:
        failed = [each.model for each in before if (each.check, each.verdict) == _UNLOADABLE]
        words = [str(folder.resolve()), str(len(before)), json.dumps(asdict(target))]
        words.append(json.dumps(failed))
        self._process = subprocess.Popen(
            leash.leashed([sys.executable, "-P", "-m", "saccade.serving.preflight.child", *words]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1"},
            text=True,
        )
        self._timeout_s = timeout_s
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._last_words: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        self.done = False

    def findings(self) -> Generator[Finding, None, None]:
        """Each as it is told; the process is gone when they end or are closed."""
        begun: tuple[str, str] | None = None
        try:
            while (line := self._next(begun)) is not None:
                told = json.loads(line)
                if "finding" in told:
                    begun = None
                    yield Finding(
                        **{**told["finding"], "reasons": tuple(told["finding"]["reasons"])}
                    )
                elif "begins" in told:
                    begun = tuple(told["begins"])
                else:
                    self.done = True
        except queue.Empty:
            self._end()
            if begun is None:
                raise SaccadeError(self._stillborn("says nothing")) from None
            reason = f"the check did not end within {self._timeout_s:g} s."
            yield Finding(*begun, "failed", (reason,))
            return
        finally:
            self._end()
        if begun is not None:
            yield Finding(
                *begun, "failed", (f"what it loads ended the process ({self._ending()}).",)
            )
        elif not self.done:
            raise SaccadeError(self._stillborn(self._ending()))

    def _next(self, begun: tuple[str, str] | None) -> str | None:
        # Before and between checks Python itself loads and reads; a busy machine may take long.
        allowed = self._timeout_s if begun else max(_START_S, self._timeout_s)
        return self._lines.get(timeout=allowed)

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            self._last_words = [*self._last_words[-5:], line.strip()]

    def _end(self) -> None:
        if self._process.poll() is None and not self.done:
            self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(timeout=5)

    def _ending(self) -> str:
        code = self._process.wait()
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def _stillborn(self, how: str) -> str:
        said = " ".join(self._last_words[-2:])
        return f"The process of the checks ended before the first one ({how}). {said} Try again."
