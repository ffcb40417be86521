# SPDX-License-Identifier: Apache-2.0
"""Full disks, taken ports, and repositories that change or vanish while they are served."""

import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from chaos.process_faults import kill_router, kill_server, kill_variant
from chaos.scene import Scene
from chaos.service import serve_command

HELD_S = 3.0
UPDATE_S = 15.0
# A small disk that only the service sees; needs no privileges if namespaces are allowed.
_SMALL_DISK = 'mount -t tmpfs -o size={mib}m disk "$TMPDIR" && exec "$@"'
_MARK = """
import pathlib
pathlib.Path({mark!r}).write_text("ran")
"""


def small_disk(mib: int) -> list[str]:
    """Return a command prefix that puts the temporary folder on a disk of this size."""
    return ["unshare", "-rm", "sh", "-c", _SMALL_DISK.format(mib=mib), "sh"]


def namespaces_allowed() -> bool:
    """True if this machine allows mounting a small disk for one process."""
    with suppress(OSError):
        command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=1m disk /mnt"]
        return subprocess.run(command, capture_output=True).returncode == 0
    return False


def disk_full_at_start(scene: Scene) -> None:
    """Leave no space for the copy of the server's parts."""
    _refused(scene, [*small_disk(1), *serve_command(scene.service.repository)], "TMPDIR")


def disk_full(scene: Scene) -> None:
    """Fill the service's small disk (see the driver) for some seconds."""
    inside = Path(f"/proc/{scene.service.process.pid}/root{scene.service.temporary}/filling")
    with suppress(OSError), inside.open("wb") as file:
        while True:
            file.write(bytes(2**20))
            file.flush()
    filled = inside.exists() and inside.stat().st_size > 0
    scene.checks.append(("the disk could be filled", filled))
    kill_variant(scene)
    time.sleep(HELD_S)
    inside.unlink(missing_ok=True)


def port_taken_at_start(scene: Scene) -> None:
    """Let another program listen on the service's port before it starts."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        command = serve_command(scene.service.repository, "--grpc-port", port)
        _refused(scene, command, f"Port {port}")


def port_taken(scene: Scene) -> None:
    """Let another program take the port before the restart, and release it after a while."""
    host, port = scene.service.grpc.split(":")
    kill_server(scene)
    other = socket.socket()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    end = time.monotonic() + HELD_S
    with other:
        while time.monotonic() < end:
            try:
                other.bind((host, int(port)))
                other.listen()
                time.sleep(max(0.0, end - time.monotonic()))
            except OSError:
                time.sleep(0.005)


def http_port_taken(scene: Scene) -> None:
    """Let another program have the port of HTTP, which is off."""
    with suppress(OSError):  # else some other program has it already
        other = socket.create_server(("127.0.0.1", 8000))
        scene.until_over.append(other.close)
    kill_server(scene)


def change_repository(scene: Scene) -> None:
    """Change the router's code: unchecked code must not run, even if the router restarts."""
    mark = scene.service.place / "ran"
    for name in (scene.models.router, scene.models.cheap):
        for code in (scene.service.repository / name).rglob("model.py"):
            code.write_text(_MARK.format(mark=str(mark)) + code.read_text())
    kill_router(scene)
    scene.until_over.append(
        lambda: scene.checks.append(("the changed code did not run", not mark.exists()))
    )


def remove_repository(scene: Scene) -> None:
    """Remove the repository: serving must not depend on the folder that it was read from."""
    scene.service.repository.rename(scene.service.repository.with_name("elsewhere"))
    kill_variant(scene)


def reload_same(scene: Scene) -> None:
    """Send the signal for an update of an unchanged repository, and measure the time."""
    begun = scene.service.servers_begun()
    scene.service.process.send_signal(signal.SIGHUP)
    end = time.monotonic() + UPDATE_S
    while time.monotonic() < end and scene.service.servers_begun() == begun:
        time.sleep(0.1)
    time.sleep(HELD_S + scene.service.start_s)
    _still_serving(scene)


def reload_broken(scene: Scene) -> None:
    """Update to a repository that cannot be served: the old one must still be served."""
    shutil.rmtree(scene.service.repository / scene.models.full)
    scene.service.process.send_signal(signal.SIGHUP)
    time.sleep(HELD_S)
    _still_serving(scene)


def _still_serving(scene: Scene) -> None:
    def look() -> None:
        code = scene.service.process.poll()
        scene.checks.append(("`saccade serve` goes on", code is None))

    scene.until_over.append(look)


def _refused(scene: Scene, command: list[str], word: str) -> None:
    """Check that the command exits with 2, says what is wrong, and leaves nothing."""
    import os

    place = scene.service.place / "refused"
    place.mkdir()
    environment = {**os.environ, "TMPDIR": str(place)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    scene.checks += [
        (f"exit code {done.returncode}, wanted 2", done.returncode == 2),
        (f"the message names {word}", word in done.stderr),
        ("no stack trace", "Traceback" not in done.stderr),
        ("nothing is left", not any(place.iterdir())),
    ]
