# SPDX-License-Identifier: Apache-2.0
"""Files of points: every format gives the same points, meshes become points, damage is refused."""

import io
import struct
from collections.abc import Callable

import numpy as np
import pytest

from saccade.models.data.samples.point_clouds import in_unit_sphere, on_surface, read_points
from saccade.models.data.samples.source import RowUnreadable

POINTS = np.random.default_rng(0).normal(3, 2, (20, 6)).astype(np.float32)
CORNERS = np.array([[0, 0, 0], [4, 0, 0], [4, 1, 0], [0, 1, 0], [9, 9, 9]], np.float64)


def lines(points: np.ndarray, between: str = " ") -> str:
    return "\n".join(between.join(f"{value!r}" for value in row) for row in points.tolist())


def npy(points: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, points)
    return file.getvalue()


HEADER = (
    "ply\nformat {} 1.0\ncomment by hand\nelement vertex 20\nproperty uchar red\n"
    "property float x\nproperty float y\nproperty float z\nproperty double a\nproperty double b\n"
    "property double c\nend_header\n"
)


def ply(order: str) -> bytes:
    form = {"": "ascii", "<": "binary_little_endian", ">": "binary_big_endian"}[order]
    text = HEADER.format(form).encode()
    if not order:
        rows = [f"7 {lines(row[None])}" for row in POINTS]
        return text + "\n".join(rows).encode()
    return text + b"".join(struct.pack(f"{order}B3f3d", 7, *row.tolist()) for row in POINTS)


def written(suffix: str) -> bytes:
    return {".npy": npy(POINTS), ".pts": f"20\n{lines(POINTS)}".encode()}.get(
        suffix, f"# x y z nx ny nz\n\n{lines(POINTS, ', ')}\n".encode()
    )


@pytest.mark.parametrize("suffix", [".npy", ".txt", ".xyz", ".pts", ".asc", ".csv"])
def test_every_format_gives_the_same_points(suffix: str) -> None:
    found = read_points(written(suffix), suffix)
    assert found.dtype == np.float32 and np.array_equal(found, POINTS)


@pytest.mark.parametrize("order", ["", "<", ">"])
def test_a_ply_has_its_coordinates_first(order: str) -> None:
    found = read_points(ply(order), ".ply")
    assert np.array_equal(found[:, [0, 1, 2, 4, 5, 6]], POINTS) and (found[:, 3] == 7).all()


SQUARE = "5 1 0\n" + lines(CORNERS) + "\n4 0 1 2 3\n"
FACES = (
    "ply\nformat {} 1.0\nelement vertex 5\nproperty double x\nproperty double y\n"
    "property double z\nelement face 1\nproperty list uchar int vertex_indices\nend_header\n"
)
MESHES = {
    "OFF": (f"OFF\n{SQUARE}".encode(), ".off"),
    "OFF of ModelNet": (f"OFF{SQUARE}".encode(), ".off"),
    "colors of faces": (f"OFF\n# a\n{SQUARE.strip()} 255 0 0 # red\n".encode(), ".off"),
    "PLY": (FACES.format("ascii").encode() + f"{lines(CORNERS)}\n4 0 1 2 3".encode(), ".ply"),
    "binary PLY": (
        FACES.format("binary_little_endian").encode()
        + CORNERS.astype("<f8").tobytes()
        + struct.pack("<B4i", 4, 0, 1, 2, 3),
        ".ply",
    ),
}


@pytest.mark.parametrize("form", MESHES)
def test_meshes_become_points_on_their_surface(form: str) -> None:
    found = read_points(*MESHES[form])
    assert found.shape == (10_000, 3) and np.array_equal(found, read_points(*MESHES[form]))
    assert (found[:, 2] == 0).all() and found.min() >= 0 and found[:, 0].max() <= 4
    assert found.mean(0) == pytest.approx([2, 0.5, 0], abs=0.05)
    assert found.std(0) == pytest.approx([4 / 12**0.5, 1 / 12**0.5, 0], rel=0.03)


def test_a_triangle_is_covered_evenly() -> None:
    corners = np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0]])
    drawn = on_surface(corners, np.array([[0, 1, 2]]), 20_000)
    near = (drawn[:, 0] + drawn[:, 1] < 0.5).mean()
    assert near == pytest.approx(0.25, abs=0.01), "a quarter of the area"


def test_points_are_moved_into_the_unit_sphere() -> None:
    found = in_unit_sphere(POINTS)
    assert np.array_equal(found[:, 3:], POINTS[:, 3:])
    distance = np.linalg.norm(found[:, :3], axis=1)
    assert found[:, :3].mean(0) == pytest.approx([0, 0, 0], abs=1e-6)
    assert distance.max() == pytest.approx(1)
    np.testing.assert_allclose(in_unit_sphere(found), found, atol=1e-6)
    assert not in_unit_sphere(np.full((3, 3), 5.0)).any()


WRONG: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "words": (lambda: b"1 2 3\na b c\n", ".txt", "could not convert"),
    "uneven": (lambda: b"1 2 3\n1 2\n", ".xyz", "point 2 has 2 values, but the first has others"),
    "two columns": (lambda: b"1 2\n3 4\n", ".txt", r"are \(2, 2\), expected \(points, 3 or more"),
    "nothing": (lambda: b"", ".txt", "cannot be read as points"),
    "NaN": (lambda: b"1 2 nan\n", ".txt", "it has NaN or infinity"),
    "objects": (lambda: npy(np.array([[None]])), ".npy", "Python objects"),
    "text in .npy": (lambda: npy(np.array([["a"]])), ".npy", "values are <U1, expected numbers"),
    "a shape of others": (
        lambda: npy(POINTS).replace(b"(20, 6)", b"(90, 6)"), ".npy", r"claims \(90, 6\)",
    ),
    "no OFF": (lambda: b"COFF2\n", ".off", "cannot be read as points"),
    "OFF that ends": (lambda: b"OFF\n9 2 0\n0 0 0\n", ".off", "ends before its 9 points"),
    "OFF of billions": (lambda: b"OFF\n999999999999 2 0\n0 0 0\n", ".off", "claims 999999999999"),
    "a corner beyond": (lambda: b"OFF\n1 1 0\n0 0 0\n3 0 1 2\n", ".off", "a face has corner 2"),
    "no area": (lambda: b"OFF\n3 1 0\n0 0 0\n0 0 0\n0 0 0\n3 0 1 2\n", ".off", "have no area"),
    "no PLY": (lambda: b"solid\n", ".ply", "it has no header of PLY"),
    "PLY that ends": (lambda: ply("<")[:-9], ".ply", "cannot be read as points"),
    "PLY of other axes": (
        lambda: ply("").replace(b"float x", b"float q"), ".ply", "'x' is not in list",
    ),
    "PLY of an unknown type": (lambda: ply("<").replace(b"uchar", b"huge"), ".ply", "huge"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_damaged_files_are_refused(case: str) -> None:
    make, suffix, words = WRONG[case]
    with pytest.raises(RowUnreadable, match=words):
        read_points(make(), suffix)
