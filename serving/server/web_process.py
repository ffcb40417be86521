# SPDX-License-Identifier: Apache-2.0
"""The process that answers web clients, next to the server, and what starts it again.

It has its own interpreter, so that parsing JSON delays no supervision. The supervising process
keeps the socket open: callers that connect while there is no process wait for the next one.
"""

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from saccade.core.die_with_parent import dying_with_parent
from saccade.core.errors import SaccadeError, require
from saccade.core.files import read_bounded
from saccade.serving.client.connection import is_loopback
from saccade.serving.server.addresses import ServeOptions, address, port_in_use
from saccade.serving.server.log import report
from saccade.serving.server.process import exit_text
from saccade.serving.server.supervisor import Patience

LOGGER = logging.getLogger("saccade.openai")
KEY_CHARACTERS = 16  # fewer could be guessed
_KEY_FILE_BYTES = 2**16
_BACKLOG = 1024
_LONGEST_PAUSE_S = 16.0
_PACKAGES = ("starlette", "uvicorn", "httptools", "uvloop", "orjson")


class WebProcess(threading.Thread):
    """The thread that keeps the process running until `stop`.

    Raises: SaccadeError if the port is in use.
    """

    def __init__(self, options: ServeOptions, model: str, keys: tuple[str, ...]) -> None:
        super().__init__(name="saccade-openai", daemon=True)
        assert options.openai is not None
        try:
            self._listener = socket.create_server((options.host, options.openai), backlog=_BACKLOG)
        except OSError as error:
            raise port_in_use(options.host, options.openai, "--openai", error) from error
        self._grace_s = options.grace_s
        self._settings = {
            "url": address(options.host, options.grpc_port),
            "model": model,
            "keys": keys,
            "grace_s": options.grace_s,
        }
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        """Process id of the present process; 0 while there is none."""
        return self._process.pid if self._process else 0

    def run(self) -> None:
        """Start the process, and start it again whenever it ends."""
        patience = Patience()
        while not self._ending.is_set():
            began_s = time.monotonic()
            try:
                how = f"ended ({self._one_life()})"
            except (OSError, ValueError) as error:  # the second if the socket was just closed
                how = f"could not be started ({error})"
            if self._ending.is_set():
                return
            pause_s = patience.after(time.monotonic() - began_s)
            pause_s = _LONGEST_PAUSE_S if pause_s is None else pause_s
            due = f"in {pause_s:g} s" if pause_s else "now"
            text = f"The process for --openai {how}. Starting it again {due}."
            report(logging.ERROR, "openai_restarting", text, pause_s=pause_s)
            self._ending.wait(pause_s)

    def _one_life(self) -> str:
        """Start the process, log what it writes until it ends, and return how it exited."""
        handle = self._listener.fileno()
        command = [sys.executable, "-P", "-m", "saccade.serving.web.main", str(handle)]
        process = self._process = subprocess.Popen(
            dying_with_parent(command),
            pass_fds=(handle,),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C must not reach it before us
        )
        assert process.stdin is not None and process.stderr is not None
        if self._ending.is_set():
            process.terminate()
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(self._settings).encode() + b"\n")
        for line in process.stderr:
            LOGGER.warning("%s", line.decode(errors="replace").rstrip())
        process.wait()
        return exit_text(process)

    def stop(self, *, at_once: bool = False) -> None:
        """Let the requests finish, for at most the options' grace, and free the port."""
        self._ending.set()
        self._listener.close()
        if process := self._process:
            process.terminate()
            try:
                process.wait(0 if at_once else self._grace_s + 1)
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
                process.kill()
                if isinstance(error, KeyboardInterrupt):
                    raise
        self.join()


def read_keys(options: ServeOptions) -> tuple[str, ...]:
    """Return the keys of which callers have to send one; none if every caller may ask.

    Raises: SaccadeError if a key is missing, or if the file cannot be used; MissingPackage.
    """
    if options.openai is None:
        if options.openai_key_file is not None:
            raise SaccadeError("Found --openai-key-file without --openai. Pass both or neither.")
        return ()
    for name in _PACKAGES:
        require(name, extra="openai")
    path = options.openai_key_file
    if path is None:
        if is_loopback(options.host):
            return ()
        raise SaccadeError(
            f"--host {options.host} --openai: other machines could send requests there. Pass a "
            "file with a secret key that callers must send: --openai-key-file FILE."
        )
    try:
        lines = read_bounded(path, _KEY_FILE_BYTES).decode("ascii").splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise SaccadeError(f"--openai-key-file {path}: cannot be read ({why}).") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys or min(map(len, keys)) < KEY_CHARACTERS:
        raise SaccadeError(
            f"--openai-key-file {path}: expected one key per line, each of at least "
            f"{KEY_CHARACTERS} characters. Make one with: openssl rand -hex 32"
        )
    return keys
