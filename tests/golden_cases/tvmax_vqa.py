# SPDX-License-Identifier: Apache-2.0
"""The recorded cases of the authors' question-answering network and of its TV layer."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_refusals import lines_of
from safetensors.torch import load_file

from saccade.models.official.conversion import Original
from saccade.models.official.sources.tvmax_vqa import LAM, convert
from saccade.models.vqa.image_attention import tv_dykstra
from saccade.models.vqa.model import VQA
from saccade.plugins.ops import tvmax

# By function: the manifest's tolerance in float64.
TOLERANCES = {"softmax": 1e-10, "sparsemax": 1e-10, "tvmax": 1e-9, "tvmax_exact": 1e-8}
FLOAT32_TOLERANCE = 2e-6
SOLVED_TOLERANCE = 1e-12  # asked of exact TVMAX, well below the case's tolerance
# Ours, and the authors' names of the parameters whose gradients are recorded. The authors' own
# gradient of TVMAX is of a rounded answer and far from the derivative: nothing to reproduce.
GRADIENTS = {
    "grid_pool.score.narrow.weight": "attflat_img_mlp_linear_weight",
    "head.bias": "proj_bias",
    "embedding.weight": "embedding_weight",
}
LAYER_TOLERANCE = 1e-9


def check(folder: Path) -> list[str]:
    """One line for each failing case of a folder with a manifest."""
    return [line for name, run in _cases(folder) for line in lines_of(name, run)]


def count(folder: Path) -> int:
    """Number of cases in a folder."""
    manifest = json.loads((folder / "manifest.json").read_text())
    layers = len(manifest["tv2d_layer"]["cases"]) if "tv2d_layer" in manifest else 0
    return layers + len(TOLERANCES) * len(manifest["models"])


def model_of(folder: Path, entry: dict[str, Any], function: str) -> VQA:
    """The recorded network as the converter makes it, in float64, with that output attention."""
    tensors = load_file(folder / entry["weights_file"])
    sizes = np.array(entry["sizes"])
    given = {
        **entry["config"],
        "IMG_FEAT_PAD_SIZE": entry["pad_positions"],
        "grid": sizes.max(0).tolist(),
        "question_length": entry["pad_tokens"],
    }
    labels = tuple(f"answer {index}" for index in range(entry["config"]["answer_size"]))
    attention = function.removesuffix("_exact")
    converted = convert(
        Original(entry["id"], tensors, config=given, labels=labels, attention=attention)
    )
    config = converted.config
    if function == "tvmax_exact":
        config = replace(converted.exact, tolerance=SOLVED_TOLERANCE)
    model = VQA(config, fresh=False)
    model.load_state_dict(converted.weights)
    return model.double().eval()


def inputs_of(data: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The recorded inputs by our names."""
    sizes = np.stack([data["size_h"], data["size_w"]], -1)
    return {
        "features": torch.from_numpy(data["img_feat"]).to(dtype),
        "sizes": torch.from_numpy(sizes),
        "question": torch.from_numpy(data["ques_ix"]),
    }


def _cases(folder: Path) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
    manifest = json.loads((folder / "manifest.json").read_text())
    if "tv2d_layer" in manifest:
        data = np.load(folder / manifest["tv2d_layer"]["file"])
        for case in manifest["tv2d_layer"]["cases"]:
            name = f"tv2d_layer {case['id']}"
            yield name, partial(_joined, name, partial(_layer, data, case["id"]))
    for entry in manifest["models"]:
        for function, tolerance in TOLERANCES.items():
            name = f"{entry['id']} {function}"
            run = partial(_of_model, folder, entry, function, tolerance)
            yield name, partial(_joined, name, run)


def _joined(name: str, run: Callable[[], Iterator[str]]) -> Iterator[str]:
    if lines := [line for line in run() if line]:
        yield f"{name}: {'; '.join(lines)}"


def _of_model(
    folder: Path, entry: dict[str, Any], function: str, tolerance: float
) -> Iterator[str]:
    data = np.load(folder / entry["data_file"])
    yield from _network(model_of(folder, entry, function), data, function, tolerance)


def _layer(data: Any, case: str) -> Iterator[str]:
    x = torch.from_numpy(data[f"{case}/x"]).double()[None].requires_grad_()
    sizes = torch.tensor([x.shape[1:]])
    solved = tv_dykstra(x, sizes, torch.zeros_like(x, dtype=torch.bool), LAM)
    yield _far("y_official", solved[0], data[f"{case}/y_official"], LAYER_TOLERANCE)
    # The exact layer is TVMAX before its sparsemax, so it is asked through the whole of it.
    exact = torch.from_numpy(data[f"{case}/y_exact"])
    weights = tvmax(x, LAM, tolerance=SOLVED_TOLERANCE)
    wanted = tvmax(exact[None], 0.0)
    yield _far("sparsemax of y_exact", weights, wanted, LAYER_TOLERANCE)


def _network(model: VQA, data: Any, function: str, tolerance: float) -> Iterator[str]:
    inputs = inputs_of(data, torch.float64)
    inputs["features"].requires_grad_()
    answer = model.details(**inputs)
    wanted = {
        "probabilities": data[f"{function}/output"],
        "logits": data[f"{function}/logits"],
        "attention": _as_grid(data[f"{function}/img_attention"], inputs["sizes"], model),
    }
    lines = [_far(name, answer[name], value, tolerance) for name, value in wanted.items()]
    if function != "tvmax":
        cotangent = torch.from_numpy(data["cotangent"])
        (answer["probabilities"] * cotangent).sum().backward()  # type: ignore[no-untyped-call]
        parameters = dict(model.named_parameters())
        gradients = {theirs: parameters[ours].grad for ours, theirs in GRADIENTS.items()}
        gradients["img_feat"] = inputs["features"].grad
        lines += [
            _far(f"grad_{name}", value, data[f"{function}/grad_{name}"], tolerance)
            for name, value in gradients.items()
        ]
    if f"{function}/output_f32" in data:
        with torch.no_grad():
            narrow = model.float().details(**inputs_of(data, torch.float32))["probabilities"]
        lines.append(_far("output_f32", narrow, data[f"{function}/output_f32"], FLOAT32_TOLERANCE))
    return (line for line in lines if line)


def _as_grid(rows: np.ndarray, sizes: torch.Tensor, model: VQA) -> np.ndarray:
    grids = np.zeros((len(rows), *model.config.grid))
    for grid, row, (h, w) in zip(grids, rows, sizes.tolist(), strict=True):
        grid[:h, :w] = row[: h * w].reshape(h, w)
    return grids


def _far(name: str, actual: Any, expected: Any, tolerance: float) -> str:
    """Empty, or how far apart the two are."""
    actual = actual.detach().numpy() if isinstance(actual, torch.Tensor) else actual
    expected = expected.detach().numpy() if isinstance(expected, torch.Tensor) else expected
    apart = float(np.abs(actual - expected).max())
    return "" if apart <= tolerance else f"{name} is off by {apart:.2e}, at most {tolerance:g}"
