# SPDX-License-Identifier: Apache-2.0
"""Sound files with other bytes, values and headers: each is read, or refused with a message.

The long form is tests/fuzz.py. A seed that failed there is kept in `FAILED`.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
pytest.importorskip("msgpack", reason="pip install '.[export]'")

from fuzz_seeds import with_seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_fuzz import outcome, readers, sound_bytes, write_changed

from saccade.core.json_text import parse_json

EXAMPLES = {"checkpoint": 60, "state of a run": 80, "weights .pt": 80}  # others: 150
EXAMPLES |= {f"samples .{kind}": 40 for kind in ("csv", "jsonl", "parquet", "tar")}
EXAMPLES |= dict.fromkeys(
    (
        *("masks .parquet", "masks .tar", "captions .json", "captions .parquet"),
        *("questions .json", "annotations .json", "negatives .json"),
    ),
    25,
)
# By reader, seeds whose files ended in a trace once.
FAILED: dict[str, tuple[int, ...]] = {
    "embeddings .npz": (62,),  # a text of a character that Python has not
    "weights .pt": (1, 51),  # a member that is not where the directory says
    "samples .parquet": (285,),  # a column whose name is not UTF-8
    "captions .json": (1014,),  # half of a surrogate pair in a caption
    "negatives .json": (100509,),  # the same in the name of an image
    "state of a run": (1, 100, 378),  # 378: a directory on several disks
}


@pytest.mark.parametrize("name", readers())
def test_reader(name: str, tmp_path: Path) -> None:
    reader = readers()[name]
    path = tmp_path / reader.name
    sound = sound_bytes(reader, path)
    assert outcome(reader, path) == "read"
    ended = set()

    def run(seed: int) -> None:
        write_changed(reader, sound, seed, path)
        ended.add(outcome(reader, path))

    for seed in FAILED.get(name, ()):
        write_changed(reader, sound, seed, path)
        outcome(reader, path)
    with_seeds(EXAMPLES.get(name, 150), run)
    assert "refused" in ended, "nothing that was changed was noticed"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(JSON, st.booleans())
def test_json_is_read_as_the_library_reads_it(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text) == json.loads(text)
    assert parse_json(text.encode()) == value
