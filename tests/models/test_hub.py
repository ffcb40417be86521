# SPDX-License-Identifier: Apache-2.0
"""Upload to and download from a hub: a server of this process that answers as Hugging Face's."""

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tiny_families

pytest.importorskip("huggingface_hub", reason="huggingface-hub: pip install '.[hub]'")

from saccade.core import limits
from saccade.core.errors import SaccadeError
from saccade.core.files import DOWNLOADED
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.hub import DownloadOptions, UploadOptions, download, upload

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secretsecretsecret"


class Hub(ThreadingHTTPServer):
    """One repository, `user/model`, and the requests that came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.listed: dict[str, dict[str, Any]] = {}  # what the list says instead
        self.commit = COMMIT
        self.answer: dict[str, str] = {}  # headers of the answer to each file
        self.code, self.endless, self.sent = 200, False, 0
        self.seen: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.committed: list[Any] = []

    def siblings(self) -> list[dict[str, Any]]:
        """Return the list of files, as the hub gives it."""
        return [
            {
                "rfilename": name,
                "size": len(data),
                "blobId": "0" * 40,
                "lfs": {
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "size": len(data),
                    "pointerSize": 1,
                },
            }
            | self.listed.get(name, {})
            for name, data in self.files.items()
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Keep the log empty."""

    def _send(self, content: Any, code: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content_Length": str(len(data)), **headers}.items():
            if value:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self) -> None:
        self.server.seen.append((self.command, self.path))
        self.server.tokens.add(self.headers["Authorization"])
        if re.match(r"/api/models/user/model(/revision/[^/?]+)?(\?|$)", self.path):
            content = {"id": "user/model", "sha": self.server.commit}
            self._send(content | {"siblings": self.server.siblings()})
        elif match := re.fullmatch(rf"/user/model/resolve/{COMMIT}/(.+)", self.path):
            data = self.server.files[match[1]]
            tag = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X_Repo_Commit": COMMIT}
            self._send(data, self.server.code, **tag | self.server.answer)
            while self.server.endless and self.command == "GET":
                try:
                    self.wfile.write(b"10000\r\n" + bytes(2**16) + b"\r\n")
                    self.server.sent += 2**16
                except OSError:
                    self.server.endless = False
        else:
            self._send({"error": "not found"}, 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        self.server.seen.append((self.command, self.path))
        self.server.tokens.add(self.headers["Authorization"])
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self._send({"url": "http://127.0.0.1/user/model", "id": "user/model"})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._send({"files": files})
        elif "/commit/" in self.path:
            self.server.committed = [json.loads(line) for line in body.splitlines()]
            url = f"http://127.0.0.1/user/model/commit/{COMMIT}"
            self._send({"commitUrl": url, "commitOid": COMMIT, "success": True})
        else:
            self._send({"errors": [], "warnings": []})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_families.tiny("sot", tmp_path_factory.mktemp("tiny") / "tiny.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_is_written_and_read_bit_for_bit(checkpoint: Checkpoint, tmp_path: Path) -> None:
    first = checkpoint.save_pretrained(tmp_path / "model")
    again = load(first.path.parent).save_pretrained(tmp_path / "again.safetensors")
    assert again.path.read_bytes() == checkpoint.path.read_bytes() == first.path.read_bytes()
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: saccade\ntags: [saccade, sot]\n")
    assert "pipeline_tag: image-classification\n---" in card
    with pytest.raises(SaccadeError, match="exists"):
        checkpoint.save_pretrained(tmp_path / "model", replace=False)


def test_what_is_uploaded_comes_back(
    checkpoint: Checkpoint, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = checkpoint.save_pretrained(tmp_path / "model").path.parent
    (folder / "notes.pkl").write_bytes(b"\x80\x04.")
    done = upload(folder, UploadOptions("user/model", message="first"))
    assert (done.revision, done.left_out) == (COMMIT, ("notes.pkl",))
    header, *files = hub.committed
    assert header["value"]["summary"] == "first"
    hub.files = {
        file["value"]["path"]: base64.b64decode(file["value"]["content"]) for file in files
    }
    assert set(hub.files) == {"config.json", "model.safetensors", "README.md"}
    assert hub.tokens - {None} == {f"Bearer {TOKEN}"}
    hub.files |= {"pytorch_model.bin": b"x", "onnx/model.onnx": b"x", "notes.txt": b"text"}
    got = download("user/model", DownloadOptions(tmp_path / "got"), progress=None)
    assert got.left_out == ("onnx/model.onnx", "pytorch_model.bin")
    found = contents(tmp_path / "got")
    record = json.loads(found.pop(DOWNLOADED))
    kept = {name: data for name, data in hub.files.items() if name not in got.left_out}
    assert found == kept
    assert (record["repo"], record["revision"], record["asked"]) == ("user/model", COMMIT, "main")
    assert {file["name"]: file["sha256"] for file in record["files"]} == {
        name: hashlib.sha256(data).hexdigest() for name, data in kept.items()
    }
    assert load(tmp_path / "got").sha256 == checkpoint.sha256
    # Every file is asked for by the commit, not by the branch.
    assert all(COMMIT in path for _, path in hub.seen if "/resolve/" in path)


def test_no_token_is_sent_but_the_environments(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"model.safetensors": b"x"}
    download("user/model@v1", DownloadOptions(tmp_path / "got"), progress=None)
    assert hub.tokens == {None}
    # Releases of the hub's client differ in how they spell a true parameter.
    asked = [path.lower() for _, path in hub.seen]
    assert "/api/models/user/model/revision/v1?blobs=true" in asked


DOWNLOADS: dict[str, tuple[str, dict[str, bytes], dict[str, dict[str, Any]], str]] = {
    "no repository": ("user/other", {}, {}, "user/other@main: the hub refused .*HF_TOKEN"),
    "no name": ("../model", {}, {}, "'../model' is not the name of a repository"),
    "no revision": ("user/model@../x", {}, {}, "'../x' is not a revision"),
    "pickles alone": (
        "user/model",
        {"pytorch_model.bin": b"x", "config.json": b"{}"},
        {},
        r"no .safetensors file \(pytorch_model.bin\), and other weights may contain code",
    ),
    "a path": ("user/model", {"../model.safetensors": b"x"}, {}, "no .safetensors file"),
    "large weights": (
        "user/model",
        {"model.safetensors": b"x"},
        {"model.safetensors": {"size": limits.WEIGHTS_BYTES + 1}},
        "model.safetensors has 17179869185 bytes, expected at most",
    ),
    "a large JSON": (
        "user/model",
        {"model.safetensors": b"x", "config.json": b"x"},
        {"config.json": {"size": limits.JSON_BYTES + 1}},
        "config.json has 33554433 bytes",
    ),
    "large together": (
        "user/model",
        {"a.safetensors": b"x", "b.safetensors": b"x"},
        {"a.safetensors": {"size": limits.WEIGHTS_BYTES}},
        "its files have 17,179,869,185 bytes",
    ),
    "another answer": (
        "user/model",
        {"model.safetensors": b"x"},
        {"model.safetensors": {"lfs": {"sha256": "0"}}},
        "the hub refused or did not answer",
    ),
    "another size": (
        "user/model",
        {"model.safetensors": b"x"},
        {"model.safetensors": {"size": 2}},
        "model.safetensors arrived with 1 bytes .* lists 2",
    ),
    "another hash": (
        "user/model",
        {"model.safetensors": b"x"},
        {"model.safetensors": {"lfs": {"sha256": "0" * 64, "size": 1, "pointerSize": 1}}},
        "arrived with .* but the hub lists 1 and 0000",
    ),
}


def listed_by_git(data: bytes) -> dict[str, Any]:
    """The entry of a file that is small enough for Git itself."""
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False)
    return {"lfs": None, "blobId": blob.hexdigest()}


def test_a_small_file_is_compared_with_its_git_hash(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"model.safetensors": b"x", "config.json": b"{}"}
    hub.listed = {"config.json": listed_by_git(b"{}")}
    download("user/model", DownloadOptions(tmp_path / "got"), progress=None)
    hub.listed = {"config.json": listed_by_git(b"[]")}
    with pytest.raises(SaccadeError, match=r"config.json arrived with 2 bytes and Git hash 9e26"):
        download("user/model", DownloadOptions(tmp_path / "again"), progress=None)
    assert not (tmp_path / "again").exists()


def test_no_header_becomes_a_path(hub: Hub, tmp_path: Path) -> None:
    """A tag with slashes would name a file to write, or one that is there already, to move."""
    (tmp_path / "mine").write_bytes(b"x")
    hub.files = {"model.safetensors": b"x"}
    for tag in (tmp_path / "mine", tmp_path / "new", Path("../../../../new")):
        hub.answer = {"ETag": f'"{tag}"', "Content_Disposition": f'filename="{tag}"'}
        options = DownloadOptions(tmp_path / "got", force=True)
        download("user/model", options, progress=None)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["got", "mine"]
        assert set(contents(tmp_path / "got")) == {"model.safetensors", DOWNLOADED}


ODD_ANSWERS: dict[str, tuple[int, dict[str, str]]] = {
    "to another kind of address": (302, {"Location": "file:///etc/hostname"}),
    "to no address": (302, {"Location": "http://[::1/x"}),
    "to no port": (302, {"Location": "http://127.0.0.1:99999999/x"}),
    "to a name of 300 characters": (302, {"Location": f"http://{'a' * 300}/"}),
    "to itself": (302, {"Location": f"/user/model/resolve/{COMMIT}/model.safetensors"}),
    "packed, but not so": (200, {"Content_Encoding": "gzip"}),
    "no length": (200, {"Content_Length": "-7"}),
}


@pytest.mark.parametrize("case", ODD_ANSWERS)
def test_an_odd_answer_is_refused(
    case: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = {"model.safetensors": b"x"}
    hub.code, hub.answer = ODD_ANSWERS[case]
    monkeypatch.setattr(time, "sleep", lambda _: None)  # before another try
    with pytest.raises(SaccadeError, match=r"the hub refused or did not answer|arrived with 0"):
        download("user/model", DownloadOptions(tmp_path / "got"), progress=None)
    assert not list(tmp_path.iterdir())


def test_a_list_of_no_names_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.files, hub.listed = {"model.safetensors": b"x"}, {"model.safetensors": {"rfilename": 7}}
    with pytest.raises(SaccadeError, match="the hub refused or did not answer"):
        download("user/model", DownloadOptions(tmp_path / "got"), progress=None)


def test_a_file_without_end_is_read_up_to_its_listed_size(hub: Hub, tmp_path: Path) -> None:
    hub.files, hub.endless = {"model.safetensors": b""}, True
    hub.listed = {"model.safetensors": {"size": 2**20}}
    hub.answer = {"Content_Length": "", "Transfer_Encoding": "chunked"}
    with pytest.raises(SaccadeError, match="longer than the 1,048,576 bytes that it lists"):
        download("user/model", DownloadOptions(tmp_path / "got"), progress=None)
    assert hub.sent < 2**26 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", DOWNLOADS)
def test_what_is_not_downloaded(
    case: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, hub.files, hub.listed, message = DOWNLOADS[case]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(SaccadeError, match=message) as error:
        download(repo, DownloadOptions(tmp_path / "got"), progress=None)
    assert TOKEN not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_hub_without_a_commit_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.files, hub.commit = {"model.safetensors": b"x"}, "main"
    with pytest.raises(SaccadeError, match="names the commit 'main', expected 40 hexadecimal"):
        download("user/model", DownloadOptions(tmp_path / "got"), progress=None)


def test_what_is_not_uploaded(checkpoint: Checkpoint, hub: Hub, tmp_path: Path) -> None:
    options = UploadOptions("user/model")
    with pytest.raises(SaccadeError, match=r"no config.json of a saccade checkpoint.*convert"):
        upload(tmp_path, options)
    folder = checkpoint.save_pretrained(tmp_path / "model").path.parent
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"answer 0"', '"other"'))
    with pytest.raises(SaccadeError, match=r"config\.json: id2label is"):
        upload(folder, options)
    with pytest.raises(SaccadeError, match="is not the name of a repository"):
        upload(folder, UploadOptions("user model"))
    assert not hub.seen
