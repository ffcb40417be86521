# SPDX-License-Identifier: Apache-2.0
"""What the listing of a bulk job has, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saccade.core.errors import SaccadeError
from saccade.serving.bulk.place import Place
from saccade.serving.bulk.sources import BulkSource, Columns, ModelInputs

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402 - after it is known to be there

IMAGE, NAMES = ModelInputs(("image",)), Columns()


def listed(source: Path, wanted: ModelInputs = IMAGE, columns: Columns = NAMES) -> Any:
    return BulkSource(Place(str(source)), columns, wanted).entries()


def test_lines_of_other_fields(tmp_path: Path) -> None:
    lines = [{"path": "a.png", "n": 1}, {"path": "b.png", "id": "x"}, {"path": "c.png", "id": 7}]
    table = tmp_path / "list.jsonl"
    table.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(SaccadeError, match="1 of 3 inputs has no id"):
        listed(table)
    with pytest.raises(SaccadeError, match="no column 'key'; it has 'path', 'n', 'id'"):
        listed(table, columns=Columns(id="key"))
    table.write_text("\n".join(map(json.dumps, lines[1:])))
    assert listed(table)["id"].to_pylist() == ["x", "7"]
    assert listed(table, columns=Columns(id="path"))["id"].to_pylist() == ["b.png", "c.png"]


def test_a_table_without_rows_beside_others(tmp_path: Path) -> None:
    (tmp_path / "none.csv").write_text("id,path\n")
    with pytest.raises(SaccadeError, match="found no input"):
        listed(tmp_path)
    (tmp_path / "some.csv").write_text("id,path\nx,a.png\n")
    table = listed(tmp_path)
    assert (table["id"].to_pylist(), table["file"].to_pylist()) == (["x"], ["some.csv"])
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(SaccadeError, match=r"empty.csv: .*the file is empty"):
        listed(tmp_path)


def test_a_number_has_the_name_of_its_input(tmp_path: Path) -> None:
    wanted = ModelInputs((), ("bounds",))
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "x.parquet")
    np.savez(tmp_path / "x.npz", id=np.array(["a"]))
    for name in ("x.parquet", "x.npz"):
        with pytest.raises(
            SaccadeError, match=r"'bounds'; it has 'id'. Write it under that name.$"
        ):
            listed(tmp_path / name, wanted)
