# SPDX-License-Identifier: Apache-2.0
"""A listing of inputs: the id and location of each, in one table for every kind of source.

Columns: `id`; `file`, the name of a file in the source; `path` of an image that a table names;
`row` of a table, an array or a tar; `offset` and `size` of contiguous bytes; `text`, a question.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from saccade.core.errors import SaccadeError, require
from saccade.models.data.samples.folders import SUFFIXES as SUFFIXES
from saccade.serving.bulk.place import EXTRA, Place

_NAMED = 3  # duplicate ids to name in a message


def schema() -> Any:
    """Return the columns of a listing."""
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
    """Make a listing from columns (lists or arrays); missing columns are null."""
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
    """Check that there are inputs, each with a unique id.

    Raises: SaccadeError that names some duplicate ids.
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
            f"{source}: {missing} of {listing.num_rows} inputs {'has' if missing == 1 else 'have'} "
            "no id. Fill in the id column, or choose another one with --id-column."
        )
    if pc.count_distinct(ids).as_py() == listing.num_rows:
        return
    counts = pc.value_counts(ids)
    twice = [entry["values"].as_py() for entry in counts if entry["counts"].as_py() > 1]
    raise SaccadeError(
        f"{source}: {len(twice)} id{' occurs' if len(twice) == 1 else 's occur'} more than once, "
        f"such as {', '.join(map(repr, twice[:_NAMED]))}. Each input needs a unique id: choose "
        "another column with --id-column, or leave it out for ids from file and row."
    )


def hash_of(listing: Any) -> str:
    """Return the SHA-256 of a listing's rows in their order, in hexadecimal."""
    digest = hashlib.sha256()
    for batch in listing.combine_chunks().to_batches(max_chunksize=65_536):
        for column in batch.columns:
            digest.update(repr(column.to_pylist()).encode())
    return digest.hexdigest()
