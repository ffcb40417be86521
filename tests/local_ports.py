# SPDX-License-Identifier: Apache-2.0
"""Ports of this machine for programs that tests start."""

import socket
import subprocess
import time
from pathlib import Path

PATIENCE_S = 60.0


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        return int(holder.getsockname()[1])


def wait_until_it_listens(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait for a program that was started; fail with its log if it does not listen."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        with socket.socket() as probe:
            probe.settimeout(0.1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(
        f"port {port}: nothing listens, exit code {process.returncode}: {log.read_text()}"
    )
