# SPDX-License-Identifier: Apache-2.0
"""`saccade upload` and `saccade download`: checkpoint folders on a Hugging Face hub.

Nothing else in saccade uses the network for models. A token comes from the environment variable
HF_TOKEN alone, and is never printed.
"""

import hashlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from saccade.core import limits
from saccade.core.errors import SaccadeError, require
from saccade.core.files import DOWNLOADED, json_bytes, new_folder, refuse_existing
from saccade.core.options import Options
from saccade.core.progress import Report, bar, progress_of, reporting
from saccade.models.checkpoint import load
from saccade.models.checkpoint_folder import CARD, CONFIG, WEIGHTS, is_checkpoint_folder

_ENDINGS = (".safetensors", ".json", ".txt", ".md")
_WEIGHTS_ENDING = ".safetensors"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class UploadOptions(Options):
    """Options of an upload."""

    repo: str  # repository on the hub: USER/NAME; it is created if it does not exist
    revision: str = "main"  # branch to commit to
    message: str = "Upload a checkpoint of saccade"  # message of the commit
    private: bool = False  # create the repository as a private one


@dataclass(frozen=True)
class DownloadOptions(Options):
    """Options of a download."""

    out: Path  # folder to write
    force: bool = False  # overwrite an existing folder at --out


@dataclass(frozen=True)
class HubFile:
    """One file of a repository."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class HubResult:
    """What was uploaded or downloaded, at which commit."""

    repo: str
    revision: str  # the commit's hash
    asked: str  # the branch, tag or hash that was asked for
    files: tuple[HubFile, ...]
    left_out: tuple[str, ...]  # names of files that were not copied
    folder: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def to_text(self) -> str:
        """Return the files and the commit as lines."""
        lines = [f"{self.repo} at {self.revision}:"]
        lines += [f"  {file.name}  {file.bytes:,} bytes" for file in self.files]
        if self.left_out:
            shown = ", ".join(self.left_out[:5]) + (", ..." if len(self.left_out) > 5 else "")
            lines.append(f"  left out: {shown}")
        return "\n".join(lines)


def upload(folder: Path, options: UploadOptions) -> HubResult:
    """Upload a checkpoint folder of saccade, as one commit.

    Raises: SaccadeError if the folder is not a checkpoint's, or the hub refuses.
    """
    folder = Path(folder)
    _check_repo(options.repo)
    _check_revision(options.revision)
    if not is_checkpoint_folder(folder):
        raise SaccadeError(
            f"{folder}: found no {CONFIG} of a saccade checkpoint, expected a checkpoint folder. "
            "Write one with: saccade convert CHECKPOINT.safetensors --out FOLDER"
        )
    load(folder)  # damaged weights, and a config.json that differs, are refused
    names = [name for name in (CONFIG, CARD, WEIGHTS) if (folder / name).is_file()]
    files = tuple(_described(folder / name) for name in names)
    others = sorted(path.name for path in folder.iterdir() if path.name not in names)
    api = _api()
    with _refused(options.repo):
        api.create_repo(options.repo, private=options.private or None, exist_ok=True)
        commit = api.upload_folder(
            repo_id=options.repo,
            folder_path=folder,
            allow_patterns=names,
            revision=options.revision,
            commit_message=options.message,
        )
    return HubResult(options.repo, str(commit.oid), options.revision, files, tuple(others))


def download(repo: str, options: DownloadOptions, *, progress: Report | None = bar) -> HubResult:
    """Download a repository's safetensors, JSON, text and card into a folder, at one commit.

    `repo` is USER/NAME, or USER/NAME@REVISION with a branch, a tag or a commit's hash; without it,
    `main`. `saccade_download.json` in the folder records the commit and each file's SHA-256.
    Raises: SaccadeError if the hub refuses, or the repository has no safetensors, too large a file,
        or one that arrives damaged.
    """
    repo, _, asked = repo.partition("@")
    asked = asked or "main"
    _check_repo(repo)
    _check_revision(asked)
    refuse_existing(options.out, force=options.force)
    api = _api()
    with _refused(f"{repo}@{asked}"):
        info = api.repo_info(repo, revision=asked, files_metadata=True)
        wanted, others = _chosen(repo, info.siblings or ())
    commit = str(info.sha)
    if not _COMMIT.fullmatch(commit):
        raise SaccadeError(
            f"{repo}: the hub names the commit {commit!r:.60}, expected 40 hexadecimal digits. "
            "Check HF_ENDPOINT."
        )
    with reporting(progress), new_folder(options.out, force=options.force) as folder:
        files = tuple(_fetched(api, repo, commit, wanted, folder))
        result = HubResult(repo, commit, asked, files, others)
        record = {key: value for key, value in result.to_dict().items() if key != "folder"}
        (folder / DOWNLOADED).write_bytes(json_bytes(record))
    return replace(result, folder=str(options.out))


def _chosen(repo: str, siblings: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Return the files to download, after checking their sizes, and the names of all others."""
    wanted = [
        file
        for file in siblings
        if _NAME.fullmatch(file.rfilename)
        and file.rfilename.endswith(_ENDINGS)
        and file.rfilename != DOWNLOADED
    ]
    others = tuple(sorted(file.rfilename for file in siblings if file not in wanted))
    if not any(file.rfilename.endswith(_WEIGHTS_ENDING) for file in wanted):
        raise SaccadeError(
            f"{repo}: found no .safetensors file ({', '.join(others[:5]) or 'an empty repository'}"
            "), and other weights may contain code. Ask its author to convert them, or choose "
            "another revision with @REVISION."
        )
    total = 0
    for file in wanted:
        most = limits.WEIGHTS_BYTES
        if not file.rfilename.endswith(_WEIGHTS_ENDING):
            most = limits.JSON_BYTES
        if type(file.size) is not int or not 0 <= file.size <= most:
            raise SaccadeError(
                f"{repo}: {file.rfilename} has {file.size} bytes, expected at most {most:,}."
            )
        total += file.size
    if total > limits.WEIGHTS_BYTES:
        raise SaccadeError(
            f"{repo}: its files have {total:,} bytes, expected at most {limits.WEIGHTS_BYTES:,}."
        )
    return wanted, others


def _fetched(
    api: Any, repo: str, commit: str, wanted: list[Any], folder: Path
) -> Iterator[HubFile]:
    """Write the files under the listed names; nothing else that the hub says becomes a path."""
    hub: Any = import_module("huggingface_hub")
    get = import_module("huggingface_hub.file_download").http_get  # continues after a break
    headers = hub.utils.build_hf_headers(token=api.token, library_name=api.library_name)
    with progress_of(f"download {repo}", len(wanted)) as advance:
        for file in wanted:
            name = file.rfilename
            url = hub.hf_hub_url(repo, name, revision=commit, endpoint=api.endpoint)
            with _refused(repo), _Capped(folder / name, file.size) as target:
                get(url, target, headers=headers)
            described = _described(folder / name)
            kind, found, listed = "SHA-256", described.sha256, getattr(file.lfs, "sha256", None)
            if listed is None:
                kind, found, listed = "Git hash", _git_hash(folder / name), file.blob_id
            if described.bytes != file.size or listed not in (None, found):
                raise SaccadeError(
                    f"{repo}: {name} arrived with {described.bytes:,} bytes and {kind} {found}, "
                    f"but the hub lists {file.size:,} and {listed}. Try again."
                )
            yield described
            advance()


class _Capped(io.FileIO):
    """A new file that takes no more bytes than the hub lists."""

    def __init__(self, path: Path, most: int) -> None:
        super().__init__(path, "x")
        self._most = most

    def write(self, data: Any) -> int:
        """Write the bytes.

        Raises: OSError if they are too many.
        """
        if self.tell() + len(data) > self._most:
            raise OSError(f"the file is longer than the {self._most:,} bytes that it lists")
        return super().write(data)


def _git_hash(path: Path) -> str:
    """Return the hash of a file that Git has stored itself, as small files are."""
    start = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: start).hexdigest()


def _described(path: Path) -> HubFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return HubFile(path.name, path.stat().st_size, digest.hexdigest())


def _api() -> Any:
    hub: Any = require("huggingface_hub", extra="hub")
    import_module("huggingface_hub.utils").disable_progress_bars()  # saccade shows its own
    # False: without HF_TOKEN, a token that another program stored on this machine is not sent.
    token = os.environ.get("HF_TOKEN") or False
    return hub.HfApi(
        endpoint=os.environ.get("HF_ENDPOINT") or None, token=token, library_name="saccade"
    )


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Turn what the hub or the connection refuses into one error, without the token."""
    try:
        yield
    except SaccadeError:
        raise
    except Exception as error:  # the package and its HTTP library raise many types for odd answers
        text = " ".join(str(error).split())
        if token := os.environ.get("HF_TOKEN"):
            text = text.replace(token, "***")
        raise SaccadeError(
            f"{what}: the hub refused or did not answer ({text:.300}). Check the name and the "
            "connection. A private or gated repository, and every upload, needs a token in "
            "HF_TOKEN."
        ) from error


def _check_repo(repo: str) -> None:
    if not _REPO.fullmatch(repo) or ".." in repo:
        raise SaccadeError(
            f"{repo!r:.120} is not the name of a repository, expected USER/NAME, for example "
            "facebook/dinov2-small."
        )


def _check_revision(revision: str) -> None:
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise SaccadeError(
            f"{revision!r:.120} is not a revision, expected a branch, a tag or a commit's hash."
        )
