# SPDX-License-Identifier: Apache-2.0
"""The world of shapes: seeds, masks, visibility, true captions, false negatives, right answers."""

from collections import Counter

import numpy as np
import pytest

from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.data.scene_texts import (
    ANSWERS,
    BARELY,
    CAPTION_TOKENS,
    CAPTION_WORDS,
    CLEARLY,
    NEGATIVE_KINDS,
    QUESTION_KINDS,
    QUESTION_TOKENS,
    QUESTION_WORDS,
    RELATIONS,
    SCENE_LABELS,
    caption,
    caption_with_negatives,
    is_true,
    questions,
    read_statement,
    scene_label,
)
from saccade.models.data.shapes import COLOURS, Object, scene_batch, scenes
from saccade.models.data.tetrominoes import COLOURS as PIECES
from saccade.models.data.tetrominoes import tetromino_batch, tetrominoes
from saccade.models.scores.ari import adjusted_rand_index
from saccade.models.word_tokens import END, PAD, START, UNKNOWN, WordVocabulary


@pytest.fixture(scope="module")
def drawn():
    return scenes("validation", 300)


def test_scenes_are_the_same_every_time_and_differ_by_split_and_seed(drawn):
    again = scenes("validation", 70)
    np.testing.assert_array_equal(again.images, drawn.images[:70])
    assert again.objects == drawn.objects[:70]
    for other in (scenes("test", 1), scenes("train", 1), scenes("validation", 1, seed=1)):
        assert other.objects[0] != drawn.objects[0]
    small = scenes("validation", 3, side_px=32)
    assert small.images.shape == (3, 32, 32, 3) and small.objects == drawn.objects[:3]


def test_masks_show_each_object_where_its_words_say(drawn):
    assert drawn.images.dtype == drawn.masks.dtype == np.uint8
    line = (np.arange(64) + 0.5) / 32 - 1
    base = {"red": 0, "green": 1, "blue": 2}
    for image, mask, objects in zip(drawn.images, drawn.masks, drawn.objects, strict=True):
        assert set(np.unique(mask)) == set(range(len(objects) + 1))
        for place, thing in enumerate(objects, start=1):
            rows, columns = np.nonzero(mask == place)
            assert abs(line[rows].mean() - thing.row) < 0.2
            assert abs(line[columns].mean() - thing.column) < 0.2
            if thing.colour in base:
                assert image[mask == place].mean(0).argmax() == base[thing.colour]


def test_objects_are_seen_to_at_least_sixty_percent(drawn):
    """The largest an object's mask gets is when nothing lies on it: the last one of each kind."""
    whole: dict[tuple[str, str], list[int]] = {}
    shares = []
    for mask, objects in zip(drawn.masks, drawn.objects, strict=True):
        whole.setdefault((objects[-1].shape, objects[-1].size), []).append(
            int((mask == len(objects)).sum())
        )
    for mask, objects in zip(drawn.masks, drawn.objects, strict=True):
        for place, thing in enumerate(objects, start=1):
            usual = np.mean(whole[thing.shape, thing.size])
            shares.append((mask == place).sum() / usual)
    # Areas vary by (0.9 / 1.1) squared with the jitter of the radius.
    assert min(shares) > 0.6 * 0.75
    assert np.mean(shares) > 0.9


def test_positions_left_and_counts_are_kept():
    left = scenes("train", 64, side_px=32, objects=(2, 3), positions="left")
    assert all(thing.column < 0 for objects in left.objects for thing in objects)
    assert {len(objects) for objects in left.objects} == {2, 3}
    assert not left.masks[:, :, 20:].any()


def test_scene_batch_follows_its_generator():
    rng = np.random.default_rng(5)
    first, second = scene_batch(rng, 2, side_px=32), scene_batch(rng, 2, side_px=32)
    again = scene_batch(np.random.default_rng(5), 2, side_px=32)
    assert first.objects == again.objects != second.objects


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": "dev"}, "split is 'dev'"),
        ({"objects": (0, 2)}, "least objects is 0, expected at least 1 and at most 2"),
        ({"objects": (3, 2)}, "least objects is 3, expected at least 1 and at most 2"),
        ({"positions": "right"}, "positions is 'right'"),
        ({"side_px": 4}, "side_px is 4, expected at least 16"),
        ({"count": 0}, "count is 0, expected at least 1"),
    ],
)
def test_wrong_scenes_are_refused(options, words):
    with pytest.raises(SaccadeError, match=words):
        scenes(**{"split": "train", "count": 2} | options)


def test_captions_are_true_and_negatives_false(drawn):
    vocabulary = WordVocabulary(CAPTION_WORDS)
    rng = np.random.default_rng(0)
    kinds = Counter()
    for objects in drawn.objects:
        true, false = caption_with_negatives(objects, rng)
        assert read_statement(true).holds(objects, CLEARLY)
        for kind, text in false.items():
            said = read_statement(text)
            assert text != true
            assert len(said.phrases) > len(objects) or not said.holds(objects, BARELY), (kind, text)
        kinds.update(list(false))
        for text in (true, *false.values()):
            ids = vocabulary.encode(text, CAPTION_TOKENS)
            assert UNKNOWN not in ids and vocabulary.decode(ids[1:]) == text
    assert set(kinds) == set(NEGATIVE_KINDS)
    assert min(kinds.values()) > 0.4 * len(drawn.objects)


def test_negatives_belong_to_the_caption_of_the_same_generator(drawn):
    objects = drawn.objects[0]
    true, _ = caption_with_negatives(objects, np.random.default_rng(3))
    assert caption(objects, np.random.default_rng(3)) == true


def test_relations_are_said_as_the_picture_has_them():
    one = Object("circle", "red", "small", "plain", row=0.0, column=-0.5)
    other = Object("square", "blue", "large", "dotted", row=0.05, column=0.5)
    true = {
        relation: read_statement(f"a red circle {relation} a blue square").holds((one, other), 0)
        for relation in RELATIONS
    }
    assert true == {"left of": True, "right of": False, "above": True, "below": False}
    nearly = read_statement("a red circle below a blue square")
    assert not nearly.denied((one, other)), "0.05 is too little to deny it"
    assert read_statement("a red circle and a red circle").denied((one, other))
    assert is_true("a red circle above a blue square", (one, other)), "if only just"
    assert not is_true("a red circle below a blue square", (one, other))
    assert not is_true("red circle", (one, other)), "it says nothing that could be read"
    assert read_statement("red circle") is read_statement("a circle red") is None


def test_answers_are_right_and_balanced(drawn):
    vocabulary = WordVocabulary(QUESTION_WORDS)
    rng = np.random.default_rng(0)
    counts = Counter()
    for objects in drawn.objects:
        asked = questions(objects, rng, 4)
        assert len({each.text for each in asked}) == 4
        for each in asked:
            assert each.answer in ANSWERS
            assert UNKNOWN not in vocabulary.encode(each.text, QUESTION_TOKENS)
            counts[each.kind, each.answer] += 1
            if each.text.startswith("is there "):
                said = read_statement(each.text.removeprefix("is there ").removesuffix(" ?"))
                assert said.holds(objects, 0) == (each.answer == "yes")
            if each.text in (f"how many {colour} objects are there ?" for colour in COLOURS):
                colour = each.text.split()[2]
                assert int(each.answer) == sum(thing.colour == colour for thing in objects)
    assert {kind for kind, _ in counts} == set(QUESTION_KINDS)
    for kind in ("exists", "relation"):
        yes, no = counts[kind, "yes"], counts[kind, "no"]
        assert abs(yes - no) < 4 * np.sqrt(yes + no)


def test_question_about_one_object():
    alone = (Object("circle", "red", "small", "plain", row=-0.5, column=0.0),)
    asked = {question.kind: question for question in questions(alone, np.random.default_rng(0), 40)}
    assert asked["colour"].answer == "red" and asked["shape"].answer == "circle"
    assert asked["position"].answer == "top", "it is neither left nor right"
    assert "relation" not in asked
    with pytest.raises(SaccadeError, match="no object"):
        questions((), np.random.default_rng(0), 1)
    with pytest.raises(SaccadeError, match="no object"):
        caption((), np.random.default_rng(0))


def test_labels_of_scenes_with_one_object():
    single = scenes("train", 200, side_px=16, objects=(1, 1)).objects
    labels = Counter(scene_label(each) for each in single)
    assert set(labels) == set(range(len(SCENE_LABELS)))
    first = single[0][0]
    assert SCENE_LABELS[scene_label(single[0])] == f"{first.colour} {first.shape}"
    with pytest.raises(SaccadeError, match="2 objects"):
        scene_label((first, first))


def test_words_become_ids_and_back():
    vocabulary = WordVocabulary(("red", "circle", "?"))
    ids = vocabulary.encode("Red circle?", 7)
    assert ids.tolist() == [START, 4, 5, 6, END, PAD, PAD] and ids.dtype == np.int64
    assert vocabulary.decode(ids) == "red circle ?"
    assert vocabulary.encode("red thing", 4).tolist() == [START, 4, UNKNOWN, END]
    with pytest.raises(SaccadeError, match="3 words, expected at most 2"):
        vocabulary.encode("red red red", 4)
    assert vocabulary.encode("red red red", 4, truncate=True).tolist() == [START, 4, 4, END]
    with pytest.raises(SaccadeError, match="more than once"):
        WordVocabulary(("red", "red"))
    with pytest.raises(SaccadeError, match="outside"):
        vocabulary.decode([9])


# Tetrominoes, and the index that says how well their segments were found.


@pytest.mark.parametrize(("side_px", "cell_px"), [(20, 3), (24, 3), (35, 5)])
def test_a_scene_has_three_whole_pieces(side_px, cell_px):
    drawn = tetrominoes("test", 70, side_px=side_px)
    assert drawn.images.shape == (70, side_px, side_px, 3) and drawn.images.dtype == np.uint8
    assert drawn.masks.shape == (70, side_px, side_px) and drawn.masks.dtype == np.uint8
    for image, mask in zip(drawn.images, drawn.masks, strict=True):
        assert list(np.bincount(mask.ravel())[1:]) == [4 * cell_px**2] * 3
        assert not image[mask == 0].any()
        for piece in (1, 2, 3):
            assert tuple(np.unique(image[mask == piece], axis=0)[0]) in PIECES
            assert len(np.unique(image[mask == piece], axis=0)) == 1


def test_every_form_and_colour_comes():
    drawn = tetromino_batch(np.random.default_rng(0), 200, side_px=14)
    forms, colours = set(), set()
    for image, mask in zip(drawn.images, drawn.masks, strict=True):
        for piece in (1, 2, 3):
            rows, columns = np.nonzero(mask == piece)
            cells = set(zip((rows - rows.min()) // 2, (columns - columns.min()) // 2, strict=True))
            forms.add(frozenset(cells))
            colours.add(tuple(image[rows[0], columns[0]]))
    assert len(forms) == 19 and all(len(cells) == 4 for cells in forms)
    assert len(colours) == 6


def test_scenes_are_fixed_and_splits_differ():
    first, longer = tetrominoes("train", 40, side_px=20), tetrominoes("train", 100, side_px=20)
    assert np.array_equal(first.images, longer.images[:40])
    assert len(np.unique(longer.masks.reshape(100, -1), axis=0)) == 100
    other = tetrominoes("validation", 40, side_px=20)
    assert not (first.masks == other.masks).all(axis=(1, 2)).any()
    assert len(tetrominoes("test", side_px=14).images) == 320
    again = tetrominoes("train", 40, seed=1, side_px=20)
    assert not np.array_equal(first.masks, again.masks)


def test_left_means_the_middle_of_each_piece():
    drawn = tetrominoes("train", 64, side_px=20, positions="left")
    for mask in drawn.masks:
        for piece in (1, 2, 3):
            columns = np.nonzero((mask == piece).any(0))[0]
            assert (columns.min() + columns.max()) / 2 < (20 - 1) / 2
    anywhere = tetrominoes("train", 64, side_px=20).masks
    assert (anywhere[:, :, 10:] > 0).sum() > 2 * (drawn.masks[:, :, 10:] > 0).sum()


def test_wrong_words_are_named():
    with pytest.raises(SaccadeError, match="split is 'dev', expected one of train"):
        tetrominoes("dev")
    with pytest.raises(SaccadeError, match="positions is 'right', expected one of anywhere, left"):
        tetrominoes("test", 1, positions="right")
    with pytest.raises(SaccadeError, match="side_px is 10, expected at least 14"):
        tetrominoes("test", 1, side_px=10)
    with pytest.raises(SaccadeError, match="count is 0"):
        tetrominoes("test", 0)


def test_index_ignores_names_and_the_background():
    rng = np.random.default_rng(0)
    true = rng.integers(0, 4, (5, 8, 8))
    renamed = np.array([7, 2, 9, 0])[true]
    assert np.array_equal(adjusted_rand_index(true, renamed), np.ones(5))
    merged = np.where(true == 0, renamed[0, 0, 0], renamed)  # the background joins an object
    assert np.array_equal(adjusted_rand_index(true, merged, foreground=True), np.ones(5))
    assert adjusted_rand_index(true, rng.permuted(renamed, axis=2)).max() < 0.3
    assert np.array_equal(adjusted_rand_index(true * 0, renamed, foreground=True), np.ones(5))
    with pytest.raises(ShapeError, match="Resize the masks to the size"):
        adjusted_rand_index(true, renamed[:, :4])


def test_index_agrees_with_scikit_learn():
    from sklearn import metrics

    rng = np.random.default_rng(1)
    true, actual = rng.integers(0, 3, (6, 50)), rng.integers(0, 4, (6, 50))
    actual[:3] = np.where(rng.random((3, 50)) < 0.7, true[:3], actual[:3])
    expected = [metrics.adjusted_rand_score(*pair) for pair in zip(true, actual, strict=True)]
    assert np.allclose(adjusted_rand_index(true, actual), expected, atol=1e-12)
