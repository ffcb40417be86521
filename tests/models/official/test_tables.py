# SPDX-License-Identifier: Apache-2.0
"""Tables of names and declared JSON, on which all converters rest."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
import torch

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count, Range
from saccade.models.official.conversion import Reading
from saccade.models.official.json_files import at, declared
from saccade.models.official.tables import (
    Row,
    filled,
    joined,
    keys_of,
    matched,
    part,
    rows_of,
    scaled,
)


@pytest.mark.parametrize(
    ("template", "name", "values"),
    [
        ("blocks.#.attn.*", "blocks.12.attn.weight", ("12", "weight")),
        ("blocks.#.attn.*", "blocks.1.attn.qkv.weight", None),  # a word has no dot
        ("blocks.#.attn.*", "blocks.01.attn.weight", None),  # not how a number is written
        ("in_proj_*", "in_proj_bias", ("bias",)),
        ("layer#-1.#.x", "layer0.3.x", ("1", "3")),
        ("layers.#+1.x", "layers.1.x", ("0",)),
        ("layers.#+1.x", "layers.0.x", None),  # ours would be -1
        ("a.b", "a.b", ()),
        ("a.b", "a_b", None),
    ],
)
def test_names_of_a_template(template: str, name: str, values: tuple[str, ...] | None) -> None:
    assert matched(template, name) == values
    if values is not None:
        assert filled(template, values) == name


def reading(**tensors: Any) -> Reading:
    named = {name.replace("__", "."): torch.tensor(value) for name, value in tensors.items()}
    return Reading("file", named)


def test_the_first_row_that_can_makes_a_tensor() -> None:
    rows = (
        Row("out.#.*", ("a.#.*", "gain.#"), scaled),
        *rows_of("out.#.", "a.#.", {"*": "*"}),
        Row("qkv.*", ("q.*", "k.*", "v.*"), joined),
        Row("half", "pair", part(1, 2)),
    )
    given = reading(
        a__0__bias=[1.0], a__1__bias=[1.0], gain__0=[3.0], q__bias=[1.0], k__bias=[2.0],
        v__bias=[3.0], q__weight=[[1.0]], pair=[4.0, 5.0], other=[6.0],
    )  # fmt: skip
    given.ignore(r"oth.+", "not read")
    given.take((*rows, Row("other", "other")))
    made = {name: value.tolist() for name, value in given.weights.items()}
    assert made == {
        "out.0.bias": [3.0],
        "out.1.bias": [1.0],
        "qkv.bias": [1.0, 2.0, 3.0],
        "half": [5.0],
    }
    assert given.names["out.0.bias"] == "a.0.bias, gain.0"
    assert given.names["out.1.bias"] == "a.1.bias"
    # What a row needs and the file lacks is for the report.
    assert given.names["qkv.weight"] == "q.weight, k.weight, v.weight"
    assert given.ignored == {"other": "not read"}
    assert keys_of(rows, "qkv.bias") == ("q.bias", "k.bias", "v.bias")
    assert keys_of(rows, "nothing") == ()


def test_tensors_of_other_shapes_than_the_table_expects() -> None:
    given = reading(q__weight=[[1.0]], k__weight=[[[2.0]]])
    with pytest.raises(SaccadeError, match=r"q.weight \(1, 1\), k.weight .*different models"):
        given.take((Row("qk.*", ("q.*", "k.*"), joined),))


def test_renamed_tensors_keep_the_names_of_the_file_for_the_report() -> None:
    tensors = reading(layer__0__w=[1.0], rest=[2.0]).tensors
    renamed = Reading.renamed("file", tensors, (Row("block.#.*", "layer.#.*"),))
    renamed.take((Row("ours.#.*", "block.#.*"),))
    assert renamed.names == {"ours.0.w": "layer.0.w"} and "rest" in renamed.tensors
    with pytest.raises(SaccadeError, match=r"no tensor 'layer.0.w' with 2 axes \(found 2"):
        renamed.shape("block.0.w", 2)
    assert (renamed.depth("block.#."), renamed.size("block.0.w"), renamed.size("x")) == (1, 1, 0)


@dataclass(frozen=True)
class Inner:
    depth: Any = None


@dataclass(frozen=True)
class Content:
    heads: Count = at("model.heads", 4)
    act: Literal["relu"] = "relu"
    size: tuple[Count, Count] | None = None
    share: Annotated[float, Range(0, 1)] = 0.5
    inner: Inner = Inner()


def test_values_of_a_json() -> None:
    assert declared(Content, None) == declared(Content, {"model": None}) == Content()
    given = {"model": {"heads": 2, "x": 1}, "size": 7, "share": 1, "inner": {"depth": 3}}
    assert declared(Content, given) == Content(2, "relu", (7, 7), 1.0, Inner(3))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": {"heads": "2"}}, "it: model.heads is '2', expected a whole number"),
        ({"model": {"heads": None}}, "model.heads is None, expected"),
        ({"model": 3}, "it: model is 3, expected an object"),
        ({"inner": [1]}, r"it: inner is \[1\], expected an object"),
        ({"act": "tanh"}, "act is 'tanh', expected relu. Correct"),
        ({"size": [1, 2, 3]}, "size is .*expected a list of 2"),
        ({"share": 2}, "share is 2, expected at least 0 and at most 1"),
    ],
)
def test_refuses_what_a_json_does_not_declare(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SaccadeError, match=message):
        declared(Content, given, "it")
