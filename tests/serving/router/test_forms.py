# SPDX-License-Identifier: Apache-2.0
"""A router whose variants take images of different sizes, and have labels in different orders."""

from collections import Counter

import numpy as np
import pytest
from picture_files import png
from support.serving.routers import (
    PREPROCESSING,
    FakeRequest,
    execute,
    model_of,
    router_arguments,
    src,
    variant_route,
)

SMALL, WIDE, FULL = CHAIN = ("group-s-fp32", "group-w-fp32", "group-f-fp32")
SIDES = {SMALL: 8, WIDE: 16, FULL: 8}
ORDER = [2, 0, 1]  # of the labels in the full model's own


def form(side):
    return {**PREPROCESSING, "height_px": side, "width_px": side, "resize_px": [side, side]}


ROUTES = [
    variant_route(FULL, setting="f", order=ORDER),
    variant_route(WIDE, setting="w", budget=0.5, preprocessing=form(16)),
    variant_route(SMALL, setting="s", budget=0.1),
]


def policy(name, *thresholds):
    columns = zip(CHAIN, (*thresholds, None), strict=True)
    steps = [
        {"variant": variant, "sha256": "0" * 64, "threshold": threshold, "temperature": 1.0}
        for variant, threshold in columns
    ]
    return {
        "name": name, "against": "full", "confidence": 0.95, "risk": 0.01, "bound": 0.01,
        "measure": "top1", "full": FULL, "seconds": 0.4, "steps": steps,
    }  # fmt: skip


def image(shade):
    """A picture of 20 x 14 pixels about this bright, in which no two neighbors are equal."""
    noise = np.random.default_rng(shade).permutation(280).reshape(14, 20) % 16
    return png((shade + noise).astype(np.uint8))


def logits_of(name, pixels):
    """Shapes: pixels [b h w 1] -> [b 3]; the classes are in the variant's own order."""
    flat = pixels.reshape(len(pixels), -1).astype(np.float32)
    # A variant is sure of images whose first pixel is bright enough.
    sure = 6.0 * (flat[:, :1] > {SMALL: 170, WIDE: 85, FULL: 0}[name])
    return np.concatenate([flat[:, :2].mean(1, keepdims=True) / 255 + sure, flat[:, 1:3] / 255], 1)


@pytest.fixture
def router(pb, tmp_path, monkeypatch):
    """Make a router; `sides` are the sizes that each variant was given, `decoded` the files."""
    more = {"policies": [policy("auto", 0.9, 0.9)]}
    outputs = dict.fromkeys(("logits", "probabilities", "embedding"), 3)
    one = model_of(tmp_path, ROUTES, outputs, **more)
    one.sides, one.decoded = Counter(), Counter()

    def answer(asked):
        name, pixels = asked["model_name"], asked["inputs"][0].as_numpy()
        one.sides[name, pixels.shape[1:3]] += len(pixels)
        logits = logits_of(name, pixels)
        arrays = {"logits": logits, "probabilities": logits + 1, "embedding": logits + 2}
        return {name: arrays[name] for name in asked["requested_output_names"]}

    decode = src.decoding.decode

    def counted(data, wanted):
        one.decoded[data, wanted.height_px] += 1
        return decode(data, wanted)

    pb.answer = answer
    monkeypatch.setattr(src.decoding, "decode", counted)
    one.initialize(router_arguments())
    yield one
    one.finalize()


def ask(router, files, **parameters):
    """Return the answer to a request for these files."""
    request = FakeRequest(
        *files, outputs=("logits", "probabilities", "embedding", "variant")
        if "budget" in parameters else ("logits", "probabilities", "variant"), **parameters,
    )  # fmt: skip
    execute(router, [request])
    return request.answer()


# In no order, so that those which go on are not the first ones.
FILES = [image(int(shade)) for shade in np.random.default_rng(0).permutation(range(0, 240, 10))]


@pytest.mark.parametrize("variant", CHAIN)
def test_each_variant_takes_its_own_size(router, variant):
    ask(router, FILES, budget=variant[6])
    assert router.sides == {(variant, (SIDES[variant],) * 2): len(FILES)}


def test_labels_have_the_order_of_the_router(router):
    answer = ask(router, FILES, budget="f")
    # The embedding has no classes, so it shows the variant's own order.
    own = answer["embedding"] - 2
    assert np.allclose(answer["logits"], own[:, ORDER])
    assert np.allclose(answer["probabilities"], own[:, ORDER] + 1)
    same = ask(router, FILES, budget="s")
    assert np.allclose(same["logits"], same["embedding"] - 2)


def test_a_chain_decodes_an_image_once_for_each_size_that_it_needs(router):
    answer = ask(router, FILES, policy="auto")
    by = [bytes(row).rstrip(b"\0").decode() for row in answer["variant"]]
    asked = Counter({SMALL: len(FILES)})
    asked[WIDE] = sum(name != SMALL for name in by)
    asked[FULL] = by.count(FULL)
    assert len(set(by)) == 3
    assert router.sides == {(name, (SIDES[name],) * 2): count for name, count in asked.items()}
    sizes = Counter(height for _, height in router.decoded)
    assert (sizes[8], sizes[16]) == (len(FILES), asked[WIDE])
    assert set(router.decoded.values()) == {1}


def test_rows_of_a_chain_are_those_of_the_variants_alone(router):
    together = ask(router, FILES, policy="auto")
    for row, file in enumerate(FILES):
        name = bytes(together["variant"][row]).rstrip(b"\0").decode()
        alone = ask(router, [file], budget=name[6])
        assert np.allclose(together["logits"][row], alone["logits"][0])


def test_work_that_waits_for_another_size_counts_its_pixels(router, monkeypatch):
    offered = []

    def offer(ticket, route, to=router._offer):
        files = ticket.inputs["image"]
        size = sum(map(len, files.flat)) if files.dtype == object else files.nbytes
        offered.append((ticket, size))
        to(ticket, route)

    monkeypatch.setattr(router, "_offer", offer)
    ask(router, FILES, policy="auto")
    (first, _), (wide, _), (full, pixels) = offered
    assert first.megapixels > 0 and full.megapixels == 0
    assert wide.megapixels == pytest.approx(first.megapixels * wide.rows / first.rows)
    assert [ticket.size for ticket, _ in offered] == [size for _, size in offered]
    assert pixels == 8 * 8 * full.rows
