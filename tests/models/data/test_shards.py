# SPDX-License-Identifier: Apache-2.0
"""Which member or field of a WebDataset shard is the label, and what is damaged."""

import tarfile
from pathlib import Path

import pytest
from labelled_sets import add_member, digits

from saccade.core.errors import SaccadeError
from saccade.models.data.asked import DataAsked
from saccade.models.data.datasets import load_data
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
    asked = DataAsked(tmp_path / "names.txt")
    assert load_data(data, "all", preprocessing=DIGITS, asked=asked).labels.tolist() == [label]


def test_a_damaged_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        SaccadeError, match=r"x.tar: a.json: cannot be read as .*\(Expecting property name"
    ):
        load_data(shard(tmp_path, png=digits()[0].data, json=b"{"), "all", preprocessing=DIGITS)
