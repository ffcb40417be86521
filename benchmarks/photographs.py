# SPDX-License-Identifier: Apache-2.0
"""Measure what squashing a photograph costs, compared with the authors' resizing and cropping.

    OMP_NUM_THREADS=1 python benchmarks/photographs.py

Photographs of scikit-learn and scikit-image go into the image tower of a SPARO-CLIP in two forms:
squashed to the model's square (bicubic, as in older releases of saccade), and as SPARO's own
transform makes them (recorded in tests/golden/preprocessing). The cosine of both embeddings is
measured for the shipped model, which was trained only on drawn scenes, and for the same model with
random weights of several seeds. The result also has the cosines of different photographs, and how
often a squashed photograph is nearest to its own other form. It goes to results/photographs.json.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from PIL import Image
from result_file import write_result

from saccade.models.checkpoint import load
from saccade.models.sparo.model import Sparo

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "preprocessing"
CHECKPOINT = ROOT / "src" / "saccade" / "models" / "shipped" / "sparo-shapes.safetensors"
RESULT = Path(__file__).parent / "results" / "photographs.json"
SEEDS = range(5)


def main() -> None:
    """Embed, compare and write."""
    checkpoint = load(CHECKPOINT)
    size = (checkpoint.preprocessing.height_px, checkpoint.preprocessing.width_px)
    sizes, squashed, cropped = photographs(size)
    shipped: Any = checkpoint.build()
    models = {"shipped": shipped}
    for seed in SEEDS:
        models[f"random {seed}"] = Sparo(replace(shipped.config, seed=seed)).eval()
    result = {name: compared(model, squashed, cropped, sizes) for name, model in models.items()}
    print(json.dumps({name: row | {"cosines": "..."} for name, row in result.items()}, indent=1))
    write_result(RESULT, {"photographs": len(sizes), "model_px": list(size), "models": result})


def photographs(size: tuple[int, int]) -> tuple[dict[str, str], np.ndarray, np.ndarray]:
    """Return names with sizes, squashed pixels, and the authors' pixels.

    Shapes: -> uint8 [n h w 3], twice.
    """
    manifest = json.loads((GOLDEN / "manifest.json").read_text())
    tensors = np.load(GOLDEN / "pixels.npz")
    sizes, squashed, cropped = {}, [], []
    for case in manifest["cases"]:
        if (case["group"], case["pipeline"]) != ("sizes", "sparo-clip"):
            continue
        if (case["height_px"], case["width_px"]) != size:
            continue
        photograph = manifest["photographs"][case["photograph"]]
        folder = Path(sklearn.__file__).parent if "package" in photograph else GOLDEN
        with Image.open(folder / photograph["path"]) as image:
            sizes[case["photograph"]] = f"{image.width} x {image.height}"
            small = image.convert("RGB").resize(size[::-1], Image.Resampling.BICUBIC)
        squashed.append(np.asarray(small))
        cropped.append(tensors[case["pixels"]])
    return sizes, np.stack(squashed), np.stack(cropped)


@torch.inference_mode()
def compared(
    model: Any, squashed: np.ndarray, cropped: np.ndarray, sizes: dict[str, str]
) -> dict[str, Any]:
    """Return the cosines of both embeddings of a photograph, and of different photographs."""
    ours, theirs = (model.encode_image(torch.from_numpy(x)).code for x in (squashed, cropped))
    cosines = torch.nn.functional.cosine_similarity(ours[:, None], theirs[None], dim=-1).numpy()
    same = np.diagonal(cosines)
    apart = torch.nn.functional.cosine_similarity(theirs[:, None], theirs[None], dim=-1).numpy()
    other = apart[~np.eye(len(apart), dtype=bool)]
    return {
        "same photograph": spread(same),
        "different photographs": spread(other),
        "nearest to its own": float((cosines.argmax(1) == np.arange(len(same))).mean()),
        "cosines": {
            f"{name} ({size})": float(value)
            for (name, size), value in zip(sizes.items(), same, strict=True)
        },
    }


def spread(values: np.ndarray) -> dict[str, float]:
    """Return median and range."""
    return {
        "median": float(np.median(values)),
        "least": float(values.min()),
        "most": float(values.max()),
    }


if __name__ == "__main__":
    main()
