# SPDX-License-Identifier: Apache-2.0
"""Measure how well queries of one variant search an index of another, with and without a map.

    python benchmarks/embedding_maps.py --out benchmarks/results/embedding_maps_shapes.json \
        --data shapes large=build/large small=build/small slots=build/slots

Every pair of variants: maps are fitted on images of the train split, as `saccade calibrate
--embedding` does. The index is of images of the test split. `neighbor` are other test images, whose
own nearest neighbor in the space of the index is wanted; `label` is how often the nearest neighbor
found has their label. `copy` are the images of the index, a
pixel further right and with noise, of which the original is wanted. Then the time of a map in the
router, and as an ONNX file.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from result_file import options_of, write_result

from saccade.core.machine import this_machine
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.evaluation.evaluated_model import EvaluatedModel, subjects_of_folder
from saccade.exporter.policy.maps import ROUTER, best_map, neighbor_recall
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.models.data.datasets import load_data

NOISE = 4.0  # of 255
TRIES = 2_000


def embedded(data: str, model: EvaluatedModel, fit: int, index: int) -> dict[str, np.ndarray]:
    """Return a model's embeddings of the images that fit maps, of the index, and of queries.

    Shapes: each [n d].
    """
    train, test = (
        load_data(data, split, preprocessing=model.images()) for split in ("train", "test")
    )
    images, rng = np.asarray(test.images), np.random.default_rng(0)
    moved = np.roll(images[:index], 1, axis=2) + rng.normal(0, NOISE, images[:index].shape)
    given = {
        "fit": np.asarray(train.images[:fit]),
        "index": images[:index],
        "neighbor": images[index:],
        "copy": moved.clip(0, 255).astype(np.uint8),
    }
    component = model.component("", "image")
    found = {name: component({"image": rows})["embedding"] for name, rows in given.items()}
    return {**found, "labels": test.labels}


def searched(
    query: dict[str, np.ndarray], index: dict[str, np.ndarray]
) -> Iterator[tuple[str, Any]]:
    """Yield the figures of one pair, without a map if the widths allow it, and with the best."""
    own, stored = ROUTER.unit(index["neighbor"]), ROUTER.unit(index["index"])
    made, array = best_map(("query", "index"), query["fit"], index["fit"], 0.5)
    ways = {"map": lambda vectors: ROUTER.unit(ROUTER.mapped(vectors, array))}
    if query["fit"].shape == index["fit"].shape:
        ways = {"without": ROUTER.unit, **ways}
    for way, placed in ways.items():
        recall = neighbor_recall(placed(query["neighbor"]), own, stored)
        cosines, labels = placed(query["copy"]) @ stored.T, query["labels"]
        found = labels[: len(stored)][(placed(query["neighbor"]) @ stored.T).argmax(1)]
        before = (cosines > np.diag(cosines)[:, None]).sum(1)
        figures = dict(zip(("recall_1", "recall_10", "loss"), recall, strict=True))
        yield (
            way,
            {
                "neighbor": figures,
                "label": float((found == labels[len(stored) :]).mean()),
                "copy": {
                    "recall_1": float((before < 1).mean()),
                    "recall_10": float((before < 10).mean()),
                },
            },
        )
    yield "kind", made.kind


def costs(narrow: int, wide: int) -> dict[str, float]:
    """Return microseconds per request of one embedding: mapped by the router, and by ONNX."""
    rng = np.random.default_rng(0)
    array = rng.normal(size=(narrow + 2, wide)).astype(np.float32)
    anchors = ROUTER.unit(rng.normal(size=(1024, wide)))
    one = rng.normal(size=(1, narrow)).astype(np.float32)
    node, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node("MatMul", ["x", "w"], ["m"]), node("Add", ["m", "b"], ["y"])],
        "map",
        [value("x", onnx.TensorProto.FLOAT, ["n", narrow])],
        [value("y", onnx.TensorProto.FLOAT, ["n", wide])],
        [
            onnx.numpy_helper.from_array(part, name)
            for part, name in ((array[:-2], "w"), (array[-2], "b"))
        ],
    )
    opsets = [onnx.helper.make_opsetid("", 17)]
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    placed = ROUTER.mapped(one, array)
    return {
        "router": _microseconds(lambda: ROUTER.mapped(one, array)),
        "router_with_anchors": _microseconds(lambda: ROUTER.similarities(placed, anchors)),
        "onnx_alone": _microseconds(lambda: session.run(None, {"x": one})),
    }


def _microseconds(call: Any) -> float:
    times = []
    for _ in range(TRIES):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return 1e6 * float(np.median(times))


def main() -> None:
    parser = options_of(__doc__, "embedding_maps")
    parser.add_argument("--data", default="shapes")
    parser.add_argument("--fit", type=int, default=6_000)
    parser.add_argument("--index", type=int, default=1_000)
    parser.add_argument("folders", nargs="+", help="word=artefact folder")
    given = parser.parse_args()
    runtime, found = runtime_named(DEFAULT), {}
    for text in given.folders:
        word, _, path = text.partition("=")
        for model in subjects_of_folder(ArtefactFolder(Path(path)), runtime):
            setting = model.name.split("-")[-2]
            found[f"{word}-{setting}"] = embedded(given.data, model, given.fit, given.index)
    matrix = {
        query: {index: dict(searched(found[query], found[index])) for index in found}
        for query in found
    }
    widths = {name: one["fit"].shape[1] for name, one in found.items()}
    counts = {name: len(rows) for name, rows in next(iter(found.values())).items()}
    result = {
        "machine": this_machine(runtime.label()).to_dict(),
        "data": given.data,
        "samples": counts,
        "widths": widths,
        "matrix": matrix,
        "microseconds": {f"{d}x{e}": costs(d, e) for d, e in ((128, 256), (384, 768), (768, 1024))},
    }
    write_result(given.out, result)
    for query, row in matrix.items():
        for index, cell in row.items():
            shown = {way: cell[way] for way in cell if way != "kind"}
            print(f"{query} -> {index} ({cell['kind']}): {shown}")
    print(result["microseconds"])


if __name__ == "__main__":
    main()
