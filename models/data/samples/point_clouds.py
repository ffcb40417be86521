# SPDX-License-Identifier: Apache-2.0
"""Point clouds in files: .npy, columns of text, .ply and .off; meshes become points."""

import io
import struct
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np

from saccade.core.archives import ArchiveRefused, read_array
from saccade.models.data.samples.source import RowUnreadable

FILE_BYTES = 256 * 2**20  # of one file; a scan of a million points in text has 60 MB
MESH_POINTS = 10_000  # drawn on the surface of a mesh
_MOST_VALUES = 10**8


class _Cloud(NamedTuple):
    """Points, and the corners of triangles between them, if the file is a mesh.

    Shapes: points [n c] float64, x y z first; triangles [m 3] int64.
    """

    points: np.ndarray
    triangles: np.ndarray | None = None


def read_points(data: bytes, suffix: str) -> np.ndarray:
    """Return the points in a file: x, y, z and further columns, such as normals.

    On a mesh, 10,000 points are drawn, evenly over its surface and the same each time.

    Shapes: -> float32 [n c], c at least 3.
    Raises: RowUnreadable.
    """
    try:
        cloud = READERS[suffix](data)
        points = cloud.points
        if cloud.triangles is not None and len(cloud.triangles):
            points = on_surface(points[:, :3], cloud.triangles, MESH_POINTS)
        if points.ndim != 2 or points.shape[1] < 3 or not len(points):
            raise ValueError(f"its points are {points.shape}, expected (points, 3 or more)")
        points = points.astype(np.float32)
        if not np.isfinite(points).all():
            raise ValueError("it has NaN or infinity")
    except (ArchiveRefused, ValueError, IndexError, KeyError, struct.error) as error:
        raise RowUnreadable(
            f"cannot be read as points ({error!s:.200}), expected x y z per point. Write it again"
        ) from error
    return points


def on_surface(points: np.ndarray, triangles: np.ndarray, count: int) -> np.ndarray:
    """Draw points that are distributed evenly over the triangles.

    Shapes: points [n 3], triangles [m 3] -> [count 3].
    Raises: ValueError for a corner beyond the points, or a mesh without area.
    """
    if triangles.min() < 0 or triangles.max() >= len(points):
        raise ValueError(f"a face has corner {triangles.max()}, expected 0 to {len(points) - 1}")
    a, b, c = (points[triangles[:, corner]] for corner in range(3))
    area = np.linalg.norm(np.cross(b - a, c - a), axis=1)
    if not area.sum() > 0:
        raise ValueError("its faces have no area")
    rng = np.random.default_rng(0)
    face = rng.choice(len(area), count, p=area / area.sum())
    # The square root spreads points evenly, where two plain shares would crowd at one corner.
    u, v = np.sqrt(rng.random((count, 1))), rng.random((count, 1))
    return (1 - u) * a[face] + u * (1 - v) * b[face] + u * v * c[face]


def _npy(data: bytes) -> _Cloud:
    array = read_array(io.BytesIO(data), "the array", len(data))
    if array.dtype.kind not in "fiu":
        raise ValueError(f"its values are {array.dtype}, expected numbers")
    return _Cloud(array.astype(np.float64))


def _columns(data: bytes) -> _Cloud:
    """Read lines of numbers, separated by spaces or commas; a first line may count them (.pts)."""
    lines = [line for line in data.decode().splitlines() if line.strip() and line[0] not in "#/"]
    rows = [line.replace(",", " ").replace(";", " ").split() for line in lines]
    if rows and len(rows[0]) == 1 and rows[0][0].isdigit():
        rows = rows[1:]
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        odd = next(place for place, row in enumerate(rows) if len(row) != len(rows[0]))
        raise ValueError(f"point {odd + 1:,} has {len(rows[odd])} values, but the first has others")
    return _Cloud(np.array(rows, dtype=np.float64).reshape(len(rows), -1))


def _off(data: bytes) -> _Cloud:
    lines = (line.partition("#")[0].split() for line in data.decode().splitlines())
    rows = (row for row in lines if row)
    first = next(rows, [""])
    if not first[0].endswith("OFF") and not first[0].startswith("OFF"):
        raise ValueError(f"it begins with {first[0]!r:.20}, expected OFF")
    # Some files of ModelNet have the counts in the first line, even without a space.
    counts = [first[0].partition("OFF")[2], *first[1:]] if first[0] != "OFF" else first[1:]
    counts = [count for count in counts if count] or next(rows, [])
    if len(counts) < 2:
        raise ValueError("it has no numbers of points and faces in its first lines")
    vertices, faces = (int(count) for count in counts[:2])
    points = [row[:3] for row in islice(rows, _sized(vertices))]
    polygons = [[int(corner) for corner in row] for row in islice(rows, _sized(faces))]
    if len(points) < vertices or len(polygons) < faces:
        raise ValueError(f"it ends before its {vertices:,} points and {faces:,} faces")
    corners = [polygon[1 : 1 + polygon[0]] for polygon in polygons]
    return _Cloud(np.array(points, dtype=np.float64).reshape(-1, 3), _triangles(corners))


def _triangles(polygons: list[list[int]]) -> np.ndarray:
    """Cut polygons into triangles that share their first corner.

    Shapes: -> int64 [m 3].
    """
    fans = [
        (corners[0], corners[place], corners[place + 1])
        for corners in polygons
        for place in range(1, len(corners) - 1)
    ]
    return np.array(fans, dtype=np.int64).reshape(-1, 3)


_PLY_TYPES = {
    **dict.fromkeys(("char", "int8"), "i1"),
    **dict.fromkeys(("uchar", "uint8"), "u1"),
    **dict.fromkeys(("short", "int16"), "i2"),
    **dict.fromkeys(("ushort", "uint16"), "u2"),
    **dict.fromkeys(("int", "int32"), "i4"),
    **dict.fromkeys(("uint", "uint32"), "u4"),
    **dict.fromkeys(("float", "float32"), "f4"),
    **dict.fromkeys(("double", "float64"), "f8"),
}
_PLY_FORMS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}


class _Element(NamedTuple):
    """Part of a .ply: its name, the number of rows, and their values; of lists also the length."""

    name: str
    rows: int
    values: list[tuple[str, str, str]]  # name, type, type of the length or nothing


class _Values:
    """The values behind the header of a .ply, as words or in binary, taken one after the other."""

    def __init__(self, data: bytes, order: str) -> None:
        self._data, self._order, self._at = data, order, 0
        self._words = None if order else data.decode().split()

    def take(self, kind: np.dtype, count: int) -> np.ndarray:
        """Return the next values."""
        if self._words is not None:
            taken = np.array(self._words[self._at : self._at + count], dtype=np.float64)
            self._at += count
            return taken
        taken = np.frombuffer(self._data, kind, count, self._at)
        self._at += kind.itemsize * count
        return taken

    def table(self, element: _Element) -> np.ndarray:
        """Return the values of an element without lists.

        Shapes: -> float64 [rows values].
        """
        width, kinds = (
            len(element.values),
            [(name, self.kind(of)) for name, of, _ in element.values],
        )
        if self._words is not None:
            return self.take(np.dtype("f8"), element.rows * width).reshape(element.rows, width)
        kinds = [(name, self.kind(of)) for name, of, _ in element.values]
        rows = self.take(np.dtype(kinds), element.rows)
        return np.stack([rows[name].astype(np.float64) for name, _ in kinds], 1)

    def lists(self, element: _Element) -> list[list[int]]:
        """Return the lists of an element that has one per row."""
        _, of, length = element.values[0]
        return [
            self.take(self.kind(of), int(self.take(self.kind(length), 1)[0])).astype(int).tolist()
            for _ in range(element.rows)
        ]

    def kind(self, name: str) -> np.dtype:
        """Return the type that a header names."""
        return np.dtype(self._order + _PLY_TYPES[name])


def _ply(data: bytes) -> _Cloud:
    end = data.find(b"end_header")
    if not data.startswith(b"ply") or end < 0:
        raise ValueError("it has no header of PLY")
    order, elements = _ply_header(data[:end].decode())
    values = _Values(data[data.index(b"\n", end) + 1 :], order)
    points: np.ndarray | None = None
    polygons: list[list[int]] = []
    for element in elements:
        lists = [value for value in element.values if value[2]]
        if element.name == "face" and len(element.values) == len(lists) == 1:
            polygons = values.lists(element)
            continue
        if lists:
            break  # what follows is neither points nor faces
        table = values.table(element)
        if element.name == "vertex":
            names = [name for name, _, _ in element.values]
            first = [names.index(axis) for axis in "xyz"]
            points = table[:, [*first, *(i for i in range(len(names)) if i not in first)]]
    if points is None:
        raise ValueError("it has no element vertex")
    return _Cloud(points, _triangles(polygons))


def _ply_header(text: str) -> tuple[str, list[_Element]]:
    order, elements = None, list[_Element]()
    for line in text.splitlines()[1:]:
        words = line.split() or [""]
        if words[0] == "format":
            order = _PLY_FORMS[words[1]]
        elif words[0] == "element":
            elements.append(_Element(words[1], _sized(int(words[2])), []))
        elif words[0] == "property" and elements:
            listed = words[1] == "list"
            found = (words[-1], words[3], words[2]) if listed else (words[-1], words[1], "")
            elements[-1].values.append(found)
    if order is None:
        raise ValueError("its header has no format")
    return order, elements


def _sized(count: int) -> int:
    if not 0 <= count <= _MOST_VALUES:
        raise ValueError(f"it claims {count} rows, expected at most {_MOST_VALUES}")
    return count


READERS: Mapping[str, Callable[[bytes], _Cloud]] = {
    ".npy": _npy,
    **dict.fromkeys((".txt", ".xyz", ".pts", ".asc", ".csv"), _columns),
    ".off": _off,
    ".ply": _ply,
}


def in_unit_sphere(points: np.ndarray) -> np.ndarray:
    """Move the mean of x, y, z to 0 and scale them so that the farthest point has distance 1.

    Shapes: [n c] -> float32 [n c]; columns after the third stay.
    """
    where = points[:, :3].astype(np.float64)
    where = where - where.mean(0)
    farthest = np.linalg.norm(where, axis=1).max()
    scaled = where / farthest if farthest > 0 else where
    return np.concatenate([scaled, points[:, 3:]], 1).astype(np.float32)
