# SPDX-License-Identifier: Apache-2.0
"""Maps between spaces of embeddings, searches of an index in parts, and files of stored vectors."""

import re

import numpy as np
import pytest

from saccade.core.errors import SaccadeError
from saccade.exporter.policy import vector_index
from saccade.exporter.policy.maps import ROUTER, best_map, nearest, neighbor_recall
from saccade.exporter.policy.vector_index import stored_vectors

PAIR = ("small", "full")
SHA = "a" * 64


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rotation(width, seed=1):
    return np.linalg.qr(drawn(width, width, seed=seed))[0]


def test_a_rotated_space_is_found_again():
    target = drawn(600, 12) + 3.0
    source = ROUTER.unit(target) @ rotation(12) * 0.5
    made, array = best_map(PAIR, source, target, min_recall=0.5)
    assert made.used and made.kind != "none" and made.recall > 0.97 and made.loss < 1e-3
    there = ROUTER.mapped(source, array)
    assert (ROUTER.unit(there) * ROUTER.unit(target)).sum(-1).min() > 0.99
    # As long as the target's vectors usually are, which a search by distance needs.
    assert np.allclose(np.linalg.norm(there, axis=1), np.linalg.norm(target, axis=1).mean())


def test_the_length_of_an_embedding_does_not_matter():
    array, embedding = drawn(10, 6), drawn(5, 8, seed=1)
    assert np.allclose(ROUTER.mapped(3 * embedding, array), ROUTER.mapped(embedding, array))


def test_the_same_space_needs_no_map():
    target = drawn(400, 8)
    made, array = best_map(PAIR, target, target, min_recall=0.5)
    assert (made.kind, made.recall, made.recall_10, made.loss) == ("none", 1.0, 1.0, 0.0)
    assert np.allclose(ROUTER.unit(ROUTER.mapped(target, array)), ROUTER.unit(target), atol=1e-6)


def test_a_part_of_a_space_is_reached_from_the_whole_and_hardly_the_other_way():
    whole = drawn(2_000, 16)
    half = ROUTER.unit(whole)[:, :8]
    down, array = best_map(("full", "half"), whole, half, min_recall=0.5)
    up, _ = best_map(("half", "full"), half, whole, min_recall=0.5)
    assert array.shape == (18, 8) and down.recall > 0.9 and down.used
    assert up.recall < 0.5 and not up.used and "refused" in str(up)


def test_unrelated_spaces_are_refused_with_their_figure():
    made, _ = best_map(PAIR, drawn(400, 8), drawn(400, 8, seed=9), min_recall=0.5)
    assert not made.used and made.recall < 0.1
    assert f"recall@1 {100 * made.recall:.1f} %" in str(made)


def test_recall_counts_the_neighbors_of_the_own_vectors():
    index = np.eye(12, dtype=np.float32)
    own = index[:2]
    second = ROUTER.unit(index[:2] + 1.1 * index[2:4])  # the own neighbor is the second nearest
    first, among, loss = neighbor_recall(np.stack([own[0], second[1]]), own, index)
    assert (first, among, loss) == (0.5, 1.0, 0.5)


def test_an_index_in_parts_is_searched_as_a_whole(monkeypatch):
    monkeypatch.setattr("saccade.exporter.policy.maps._BLOCK", 7)
    queries, index = ROUTER.unit(drawn(2 * 30, 6)).reshape(2, 30, 6), ROUTER.unit(drawn(90, 6))
    expected = (queries @ index.T).argmax(-1)
    for parts in ([index], [index[:10], index[10:70], index[70:]]):
        place, anchors, size = nearest(queries, 1, iter(parts), 20, 0)
        assert np.array_equal(place, expected) and size == 90
        assert anchors.shape == (20, 6) and len(np.unique(anchors, axis=0)) == 20
        assert all((index == anchor).all(1).any() for anchor in anchors)


def test_a_copy_of_the_nearest_vector_is_the_same_neighbor():
    index = np.eye(3, dtype=np.float32)
    other = np.array([0.9, 0.4, 0.1], np.float32)
    queries = ROUTER.unit(np.stack([index[0], other]))[:, None]
    # Between the copies the query of the other variant finds the last, which is a little nearer.
    copies = np.stack([index[0], index[1], np.array([1, 1e-5, 0], np.float32)])
    place, _, _ = nearest(queries, 0, [copies], 8, 0)
    assert place.tolist() == [[0], [0]]


def stored(path, vectors):
    if path.suffix == ".npy":
        np.save(path, vectors)
    elif path.suffix == ".npz":
        np.savez(path, vectors=vectors, sha256=np.array(SHA))
    else:
        pa = pytest.importorskip(
            "pyarrow", reason="pyarrow is not installed: pip install '.[bulk]'"
        )
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        columns = {"id": list(range(len(vectors))), "vector": vectors.tolist()}
        parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("ending", ("npy", "npz", "parquet"))
def test_stored_vectors_are_read_in_parts(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(vector_index, "_PART", 16)
    vectors = drawn(50, 4)
    path = stored(tmp_path / f"index.{ending}", vectors)
    parts = list(stored_vectors(path, 4, SHA))
    assert len(parts) == 4
    assert np.allclose(np.concatenate(parts), ROUTER.unit(vectors), atol=1e-6)


def changed(row, value):
    vectors = drawn(50, 4)
    vectors[row] = value
    return vectors


@pytest.mark.parametrize("ending", ("npy", "npz", "parquet"))
@pytest.mark.parametrize(
    ("vectors", "words"),
    (
        (drawn(50, 5), "numbers"),
        (changed(37, np.nan), "row 37"),
        (changed(3, 0.0), "row 3"),
    ),
    ids=("width", "NaN", "zeros"),
)
def test_an_index_that_cannot_be_searched_is_refused(tmp_path, ending, vectors, words):
    path = stored(tmp_path / f"index.{ending}", vectors)
    with pytest.raises(SaccadeError, match=words) as found:
        list(stored_vectors(path, 4, SHA))
    assert str(path) in str(found.value) and "vectors of 4 numbers" in str(found.value)


def test_other_files_are_refused(tmp_path):
    text = tmp_path / "index.csv"
    text.write_text("1,2")
    np.save(tmp_path / "none.npy", drawn(0, 4))
    np.save(tmp_path / "flat.npy", drawn(8))
    (tmp_path / "odd.npy").write_bytes(b"PK\x03\x04 not an array")
    for name, words in (
        ("index.csv", ".csv"),
        ("missing.npy", "No such file"),
        ("none.npy", "has no vectors"),
        ("flat.npy", re.escape("shape [8]")),
        ("odd.npy", "odd.npy"),
    ):
        with pytest.raises(SaccadeError, match=words):
            list(stored_vectors(tmp_path / name, 4, SHA))
    with pytest.raises(SaccadeError, match="bbbbbbbbbbbb"):
        list(stored_vectors(stored(tmp_path / "index.npz", drawn(5, 4)), 4, "b" * 64))


def test_an_index_has_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(vector_index, "MOST_VECTORS", 49)
    with pytest.raises(SaccadeError, match="more than 49"):
        list(stored_vectors(stored(tmp_path / "index.npy", drawn(50, 4)), 4, SHA))
