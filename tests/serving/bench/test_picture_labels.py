# SPDX-License-Identifier: Apache-2.0
"""Labels in the picture of a frontier: beside each other, and lines that tell whose they are."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from report_figures import figures, measured_policy, point, variant

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[bench]'")

from matplotlib.path import Path

from saccade.serving.bench import picture


def crowded() -> dict[str, Any]:
    """Return a report of seven variants and four policies, of which three are nearly equal."""
    content = figures()
    content["server"] = None
    rates = (216, 290, 430, 800, 980, 1500, 2500)
    scores = (0.924, 0.9238, 0.925, 0.9242, 0.925, 0.921, 0.884)
    budgets = (1, 0.75, 0.5, 0.25, 0.2, 0.125, 0.0625)
    content["variants"] = [
        variant(budget, score, rate, None) | {"grpc": None}
        for budget, score, rate in zip(budgets, scores, rates, strict=True)
    ]
    content["policies"] = [
        measured_policy()
        | {"policy": f"auto-{risk}", "times_full": {"times": rate / 432, "interval": None}}
        | {"in_process": {"best_batch": 8, "batch_8": point(rate, 0.5)}}
        for risk, rate in ((0.005, 1000), (0.01, 1050), (0.02, 1100), (0.05, 2900))
    ]
    return content


def drawn_labels(content: dict[str, Any]) -> tuple[dict[str, np.ndarray], np.ndarray, Any]:
    """Return the labels of a picture with their boxes, its points, and its axes."""
    figure = picture.frontier_figure(content)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    places = [line.get_xydata()[0] for line in axes.lines if line.get_zorder() >= 3]
    boxes = {text.get_text(): text.get_window_extent().extents for text in axes.texts}
    return boxes, axes.transData.transform(places), axes


def test_labels_of_nearly_equal_points_do_not_touch() -> None:
    boxes, points, axes = drawn_labels(crowded())
    assert len(boxes) == len(points) == 11 and "auto-0.02 · 2.5x" in boxes
    inside = axes.get_window_extent().extents
    (legend,) = [axes.get_legend().get_window_extent().extents]
    for name, box in boxes.items():
        others = [other for label, other in boxes.items() if label != name] + [legend]
        for other in others:
            apart = (box[:2] >= other[2:]).any() or (other[:2] >= box[2:]).any()
            assert apart, f"{name}: {box} touches {other}"
        covered = ((points > box[:2]) & (points < box[2:])).all(1)
        assert not covered.any(), f"{name} covers a point"
        assert (box[:2] >= inside[:2]).all() and (box[2:] <= inside[2:]).all(), name


def test_lines_lead_from_policies_to_their_labels_and_do_not_cross() -> None:
    boxes, points, axes = drawn_labels(crowded())
    lines = [line for line in axes.lines if line.get_zorder() == 2.4]
    assert len(lines) >= 4
    ends = [axes.transData.transform(line.get_xydata()) for line in lines]
    for (x, y), (to_x, to_y) in ends:
        assert np.isclose(points, (x, y), atol=0.5).all(1).any()
        assert any(
            box[0] - 1 <= to_x <= box[2] + 1 and box[1] - 1 <= to_y <= box[3] + 1
            for box in boxes.values()
        )
    paths = [Path(each) for each in ends]
    assert not any(one.intersects_path(other) for one, other in combinations(paths, 2))


def test_labels_of_equal_points_stay_in_the_picture() -> None:
    content = crowded()
    for one in content["policies"]:
        one["in_process"] = content["policies"][0]["in_process"]
    boxes, _, axes = drawn_labels(content)
    inside = axes.get_window_extent().extents
    for box in boxes.values():
        assert (box[:2] >= inside[:2]).all() and (box[2:] <= inside[2:]).all()
