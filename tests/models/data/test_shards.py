# SPDX-License-Identifier: Apache-2.0
"""Which member or field of a WebDataset shard is the label, and what is damaged."""

import tarfile
from pathlib import Path

import pytest
from labelled_sets import add_member, digits

from saccade.core.errors import SaccadeError
from saccade.models.data.datasets import load_data
from saccade.models.data.options import DataOptions
from saccade.models.data.samples.shards import shard_members
from saccade.models.preprocessing import Preprocessing

DIGITS = Preprocessing(8, 8, 1, (0.0,), (1.0,))


def shard(folder: Path, **contents: bytes) -> Path:
    """A shard of one sample, by the suffixes of its members."""
    with tarfile.open(folder / "x.tar", "w") as tar:
        for suffix, data in contents.items():
            add_member(tar, f"a.{suffix}", data)
    return folder / "x.tar"


@pytest.mark.parametrize(
    ("beside", "label"),
    [
        ({"json": b'{"cls": 3}'}, 3),
        ({"json": b'{"cls": 0, "label": 3}'}, 3),
        ({"json": b'{"class": 0, "cls": 3}'}, 3),
        ({"json": b'{"label": 3, "txt": "a"}'}, 3),
        ({"json": b'{"label": 0}', "cls": b"3"}, 3),
        ({"json": b"{", "cls": b"3"}, 3),
    ],
)
def test_a_label_in_a_shard_is_that_of_a_member_or_the_first_usual_field(
    beside: dict[str, bytes], label: int, tmp_path: Path
) -> None:
    data = shard(tmp_path, png=digits()[0].data, **beside)
    (tmp_path / "names.txt").write_text("0\n1\n2\n3\n")
    asked = DataOptions(tmp_path / "names.txt")
    assert load_data(data, "all", preprocessing=DIGITS, asked=asked).labels.tolist() == [label]


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The block of a member of that size."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


LONG_NAME = header("././@LongLink", 2, tarfile.GNUTYPE_LONGNAME) + b"a\0".ljust(512, b"\0")
HOSTILE = {
    "names of names": (LONG_NAME * 5_000 + header("a.png", 0), "recursion"),
    "back to the beginning": (header("a.cls", 0) + header("a.png", -512), "'a.png' has -512 bytes"),
    "a folder before itself": (header("a", -1024, tarfile.DIRTYPE), "'a' has -1024 bytes"),
    "2^80 bytes": (header("a.cls", 0) + header("a.png", 2**80), "cannot fit 'int'"),
    "a name of 2^62": (header("a", 2**62, tarfile.GNUTYPE_LONGNAME), "MemoryError"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused(case: str, tmp_path: Path) -> None:
    data, words = HOSTILE[case]
    (tmp_path / "x.tar").write_bytes(data + bytes(1024))
    with pytest.raises(SaccadeError, match=rf"x.tar: cannot be read as a tar file.*{words}"):
        for _ in zip(range(9_999), shard_members(tmp_path / "x.tar"), strict=False):
            pass
    with pytest.raises(SaccadeError, match=r"x.tar: cannot be read as a tar file"):
        load_data(tmp_path / "x.tar", "all", preprocessing=DIGITS)


def test_a_damaged_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SaccadeError, match=r"x.tar: a.json: cannot be read as .*\(Expecting property name"
    ):
        load_data(shard(tmp_path, png=digits()[0].data, json=b"{"), "all", preprocessing=DIGITS)
