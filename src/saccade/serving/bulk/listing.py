# SPDX-License-Identifier: Apache-2.0
"""A listing of inputs: an id for each, and where it lies. Whatever the source, one table.

Columns: `id`; `file`, the name of a file in the source; `path` of an image that a table names;
`row` of a table, an array or a tar; `offset` and `size` of bytes that lie in one piece; `text`, a
question.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from saccade.errors import SaccadeError, require
from saccade.serving.bulk.place import EXTRA, Place

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_NAMED = 3  # of the ids that are there twice


def schema() -> Any:
    """The columns of a listing."""
    pa = require("pyarrow", extra=EXTRA)
    return pa.schema(
        [
            ("id", pa.string()),
            ("file", pa.string()),
            ("path", pa.string()),
            ("row", pa.int64()),
            ("offset", pa.int64()),
            ("size", pa.int64()),
            ("text", pa.string()),
        ]
    )


def table_of(columns: Mapping[str, Any]) -> Any:
    """A listing of columns, lists or arrays; those that are left out are null."""
    import pyarrow as pa

    count = len(next(iter(columns.values())))
    filled = [
        pa.array(columns[field.name], field.type)
        if isinstance(columns.get(field.name), list)
        else columns[field.name].cast(field.type)
        if field.name in columns
        else pa.nulls(count, field.type)
        for field in schema()
    ]
    return pa.table(filled, schema=schema())


def check_ids(listing: Any, source: Place) -> None:
    """There is something, each has an id, and no two have the same.

    Raises: SaccadeError naming some that are there twice.
    """
    import pyarrow.compute as pc

    if listing.num_rows == 0:
        raise SaccadeError(
            f"{source}: found no input. Expected images ({', '.join(SUFFIXES)}), or .parquet, "
            ".csv, .jsonl, .tar or .npz files."
        )
    ids = listing["id"]
    if missing := ids.null_count + pc.sum(pc.equal(pc.utf8_length(ids), 0)).as_py():
        raise SaccadeError(
            f"{source}: {missing} of {listing.num_rows} inputs have no id. Fill the id column, or "
            "name another one with --id-column."
        )
    if pc.count_distinct(ids).as_py() == listing.num_rows:
        return
    counts = pc.value_counts(ids)
    twice = [entry["values"].as_py() for entry in counts if entry["counts"].as_py() > 1]
    raise SaccadeError(
        f"{source}: {len(twice)} ids are there more than once, such as "
        f"{', '.join(map(repr, twice[:_NAMED]))}. Each input needs an id of its own: name another "
        "column with --id-column, or leave it out for ids made of file and row."
    )


def hash_of(listing: Any) -> str:
    """SHA-256 of a listing's content, in hexadecimal: the same for the same rows in that order."""
    digest = hashlib.sha256()
    for batch in listing.combine_chunks().to_batches(max_chunksize=65_536):
        for column in batch.columns:
            digest.update(repr(column.to_pylist()).encode())
    return digest.hexdigest()
