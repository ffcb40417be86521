# SPDX-License-Identifier: Apache-2.0
"""A sample's circuit: what it says of the answer it was made from, and its picture."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.interface import component_named
from saccade.models.nac.kernel import evaluation_bias, signature_distance
from saccade.models.nac.model import NAC, NACConfig
from saccade.models.nac.picture import SampleCircuit, sample_circuit

LINK = np.array([[1, 0.9, 0.2, 0.8], [0.9, 1, 0.1, 0.6], [0.2, 0.1, 1, 0.3], [0.8, 0.6, 0.3, 1]])
ATTENTION = np.array([[0.7, 0.2, 0.1, 0], [0, 1, 0, 0], [0, 0, 0, 1], [0.25, 0.25, 0.25, 0.25]])


def test_nodes_and_links_are_those_of_the_answer() -> None:
    circuit = SampleCircuit(ATTENTION, LINK, words=("a", "b", "c", "d"))
    assert [edge[:2] for edge in circuit.edges()] == [(0, 1), (0, 3), (1, 3)]
    np.testing.assert_allclose(circuit.degree, [1.9, 1.6, 0.6, 1.7])
    content = circuit.to_dict(least=0.7, tokens=1)
    assert content["links"][1] == {"a": 0, "b": 3, "probability": 0.8}
    assert content["nodes"][2]["reads"] == [{"token": 3, "weight": 1.0, "word": "d"}]
    strongest = circuit.strongest(2)
    assert strongest.names == (0, 3) and strongest.edges() == [(0, 1, 0.8)]
    assert strongest.to_dict()["links"] == [{"a": 0, "b": 3, "probability": 0.8}]


def test_a_large_circuit_is_drawn_by_the_few_that_are_linked_best() -> None:
    count = 64  # all linked with all: 2,016 links would be a grey ball
    link = 0.6 + 0.3 * np.random.default_rng(0).random((count, count))
    link = (link + link.T) / 2
    np.fill_diagonal(link, 1)
    shown = SampleCircuit(np.full((count, 4), 0.25), link).strongest(12)
    links = shown.backbone(0.5)
    assert len(links) + 1 >= 12 and len(links) <= 24
    ends = [module for edge in links for module in edge[:2]]
    assert min(ends.count(module) for module in range(12)) >= 2  # a path leads to each
    place = shown.layers()
    assert len({tuple(one) for one in place}) == 12
    assert place[shown.degree.argmax(), 0] == place[:, 0].max()  # next to the answer


def test_a_models_answer_becomes_a_circuit() -> None:
    small = {"modules": 6, "dim": 16, "code_dim": 6, "signature_dim": 5, "ffn_dim": 24}
    model = NAC(NACConfig(input="bytes", max_tokens=9, **small)).eval().fold()
    component = component_named(model, "")
    inputs = component.random(np.random.default_rng(0), 2)
    answer = component.run(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    length = int(inputs["length"][1])
    attention, link = (answer[name][1].numpy() for name in ("attention", "link"))
    circuit = sample_circuit(attention, link, length=length)
    assert circuit.attention.shape == (6, length)
    np.testing.assert_allclose(circuit.attention.sum(1), 1, atol=1e-5)
    signatures = NAC(NACConfig(input="bytes", max_tokens=9, **small)).generator.signatures
    expected = evaluation_bias(signature_distance(signatures, signatures), 0.25).exp()
    np.testing.assert_allclose(circuit.link, expected.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ("image", "pair", "words", "dense"))
def test_pictures_are_drawn_and_repeat(kind: str) -> None:
    from saccade.models.nac.picture import circuit_png

    image = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    attention = np.tile(ATTENTION, (1, 2)) / 2 if kind == "pair" else ATTENTION
    words = ("a", "b", "c", "d") if kind in ("words", "dense") else None
    circuit = SampleCircuit(
        attention, None if kind == "dense" else LINK, None if words else (2, 2), words
    )
    drawn = circuit_png(circuit, image=None if words else image)
    assert Image.open(io.BytesIO(drawn)).size == (1430, 728)
    assert drawn == circuit_png(circuit, image=None if words else image)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"expected \[u, n\] of one sample"):
        SampleCircuit(ATTENTION[None], LINK)
    with pytest.raises(ShapeError, match=r"link is \[3, 3\], expected \[4, 4\]"):
        SampleCircuit(ATTENTION, LINK[:3, :3])
    with pytest.raises(SaccadeError, match="neither one nor two grids"):
        SampleCircuit(ATTENTION, LINK, grid=(3, 1))
    with pytest.raises(SaccadeError, match="2 words for 4 tokens"):
        SampleCircuit(ATTENTION, LINK, words=("a", "b"))
