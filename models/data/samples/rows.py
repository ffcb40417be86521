# SPDX-License-Identifier: Apache-2.0
"""The rows of tables as samples: images with labels, sentences or masks, texts with labels."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.data.samples.masks import mask_in_file
from saccade.models.data.samples.source import (
    LABEL,
    SENTENCES,
    SPLIT,
    TEXT,
    Beside,
    Cell,
    DataDescription,
    LabelColumn,
    RowUnreadable,
    SampleSource,
    Texts,
    given_splits,
)
from saccade.models.data.samples.tables import Columns, Table, columns_in
from saccade.models.image_decoding import ImageInput

IMAGES: Mapping[Beside, tuple[str, ...]] = {
    "label": ("images", "labels"),
    "sentence": ("images", "sentences"),
    "mask": ("images",),
}


class TableRows(SampleSource):
    """The rows of tables with equal columns; `wanted` are names in `tables.USUAL`.

    Raises: SaccadeError if a column is missing, or a row has no text, label or known split.
    """

    def __init__(
        self, path: Path, tables: Iterable[Table], wanted: Sequence[str], given: DataDescription
    ) -> None:
        self.path, self._tables = path, tuple(tables)
        self._starts, self._columns = list[int](), Columns()
        self._labels, splits, texts = LabelColumn(), array("b"), Texts()
        also = ("masks", "splits") if given.beside == "mask" else ("splits",)
        for table in self._tables:
            self._starts.append(len(splits))
            if not table.names:
                continue
            self._columns = self._columns or columns_in(
                table.path, table.names, wanted, also, table.usual
            )
            used = [name for names in self._columns.values() for name in names]
            if missing := [name for name in used if name not in table.names]:
                raise SaccadeError(
                    f"{table.path}: has no column {missing[0]!r}, but "
                    f"{self._tables[0].path.name} has. Use files with equal columns."
                )
            own = columns_in(table.path, table.names, (), also, table.usual)
            if more := sorted(own.keys() - self._columns.keys()):
                raise SaccadeError(
                    f"{table.path}: has a column of {more[0]} ({own[more[0]][0]}), but "
                    f"{self._tables[0].path.name} has none. Use files with equal columns."
                )
            self._add(table, texts, splits)
        if not splits:
            raise SaccadeError(f"{path}: found no rows, expected one per sample.")
        if "labels" in wanted:
            known = self._tables[0].class_names(self._columns["labels"][0])
            self.labels, self.class_names = self._labels.classes(given, self.refused, known)
        else:
            self.without_classes(len(splits))
        self.sentences = texts if len(texts) else None
        self.split_of = given_splits(splits)
        self.masked = "masks" in self._columns

    def _add(self, table: Table, texts: Texts, splits: array) -> None:
        columns = self._columns
        files = [name for what in ("images", "masks") for name in columns.get(what, ())]
        values = {name: cell for what, cell in _CELLS.items() for name in columns.get(what, ())}
        for cells in table.rows([*values], files):
            split, said, refused = table.split, list[str](), partial(self.refused, len(splits))
            for (name, cell), value in zip(values.items(), cells, strict=True):
                checked = cell(value, refused, name)
                if cell is SPLIT:
                    split = checked
                elif cell is LABEL:
                    self._labels.add(checked)
                else:
                    said += [checked] if cell is TEXT else checked
            splits.append(split)
            if said:
                texts.append(said)

    def _place(self, row: int) -> tuple[Table, int]:
        """Return the table of a row, and the row in it."""
        place = bisect_right(self._starts, row) - 1
        return self._tables[place], row - self._starts[place]

    def read(self, row: int, most_bytes: int) -> bytes:
        """Return the bytes of the row's image."""
        table, own = self._place(row)
        return table.read(own, self._columns["images"][0], most_bytes)

    def row_name(self, row: int) -> str:
        """Return the row's number or key, with its file if there are several."""
        table, own = self._place(row)
        name = table.row_name(own)
        return name if len(self._tables) == 1 else f"{table.path.name}: {name}"

    def read_mask(self, row: int, wanted: ImageInput) -> np.ndarray:
        """Return the indices in the PNG of the row."""
        table, own = self._place(row)
        column = self._columns["masks"][0]
        name = table.file_name(own, column)
        try:
            data = table.read(own, column, wanted.max_image_mib * 2**20)
        except RowUnreadable as error:
            raise RowUnreadable(f"its mask {name}: {error}") from None
        return mask_in_file(data, name, wanted)


_CELLS: Mapping[str, Cell] = {
    "sentences": SENTENCES,
    "texts": TEXT,
    "pairs of texts": TEXT,
    "labels": LABEL,
    "splits": SPLIT,
}
