# SPDX-License-Identifier: Apache-2.0
"""Compare pretrained trunks with timm and transformers themselves, in every family that takes one.

    pip install --no-deps --target build/reference timm==1.0.31 transformers==5.23.0 \
        regex typer rich shellingham
    PYTHONPATH=build/reference python benchmarks/trunk_parity.py

Models with random weights, tiny ones and those of the usual sizes, are saved as each library saves
them, read as `train --trunk` reads them, put under SoT, SPARO and NAC, and their tokens compared.
torchvision needs another torch, so timm gets empty modules in its place, of which these models use
none. ResNets of torchvision have timm's names.
"""

import argparse
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import torch
from result_file import write_result

from saccade.core.machine import this_machine
from saccade.models.entry import imported
from saccade.models.families import build, entries
from saccade.models.official.convert import read_folder

RESULT = Path(__file__).with_name("results") / "trunk_parity.json"
GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
# Of the largest value: what rounding may change in each type.
ALLOWED = {"float32": 1e-5, "float64": 1e-10}
# The smallest heads; the trunk decides the rest.
SIZES: dict[str, dict[str, Any]] = {
    "sot": {"pool_heads": 1, "m": 2, "n": 2},
    "sparo": {"slots": 4, "slot_dim": 4, "attn_dim": 4, "text": False},
    "nac": {"modules": 4, "dim": 8, "propagator_layers": 1, "heads": 1},
}
WHOLE = (
    *(f"resnet{depth}" for depth in (18, 50, 152)),
    *("vit_base_patch16_siglip_224", "vit_base_patch32_siglip_gap_256"),
    *("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"),
    *("swinv2_base_window12to16_192to256", "deit3_small_patch16_224", "vit_small_patch16_224"),
)


def golden(name: str) -> Any:
    """Import the script that makes the golden models of a library."""
    spec = spec_from_file_location(f"make_{name}", GOLDEN / name / "make.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_timm(place: Path) -> Iterator[tuple[str, Path, Any, Any]]:
    """Yield name, folder, model and function of features of timm's models."""
    make = golden("timm")
    timm = make.load_timm()
    for name in make.MODELS:
        model = make.created(timm, name)
        make.saved(timm, model, place / name)
        yield f"timm, tiny {name}", place / name, model, make.features
    for architecture in WHOLE:
        torch.manual_seed(0)
        model = timm.create_model(architecture, num_classes=0).eval()
        timm.models.save_for_hf(model, place / architecture, safe_serialization=True)
        yield f"timm, {architecture}", place / architecture, model, make.features


def of_transformers(place: Path) -> Iterator[tuple[str, Path, Any, Any]]:
    """Yield the same of transformers' models."""
    make, hf = golden("hugging_face"), import_module("transformers")
    small = make.models()
    for seed, (_, (model, _)) in enumerate(small.items()):
        make.draw(model, seed)
    whole = {
        "ResNet-50": (hf.ResNetModel(hf.ResNetConfig()), {"size": {"shortest_edge": 224}}),
        "SigLIP base": (hf.SiglipVisionModel(hf.SiglipVisionConfig()), {}),
    }
    processors = (hf.ConvNextImageProcessor, hf.SiglipImageProcessor)
    large = {
        name: (model, processor(**size))
        for (name, (model, size)), processor in zip(whole.items(), processors, strict=True)
    }
    for name, (model, processor) in (*small.items(), *large.items()):
        model.eval().save_pretrained(place / name)
        processor.save_pretrained(place / name)
        kind = "tiny " if name in small else ""
        yield f"transformers, {kind}{name}", place / name, model, make.features


def differences(folder: Path, model: Any, features: Any) -> dict[str, Any]:
    """Return the largest difference of the tokens of each family, relative to the largest value."""
    checkpoint = read_folder(folder)
    images = checkpoint.preprocessing
    assert images is not None
    rng = np.random.default_rng(0)
    size = (2, images.height_px, images.width_px, images.channels)
    pixels = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))
    origin = imported(dict(entries())[checkpoint.family].trunk)
    trunk = origin.read(folder.name, checkpoint.config, checkpoint.weights)
    found: dict[str, Any] = {"shape": trunk.shape.described(), "tensors": len(trunk.weights)}
    tiny = trunk.shape.width < 192
    for dtype in (torch.float32, torch.float64) if tiny else (torch.float32,):
        mean, std = (torch.tensor(levels, dtype=dtype) for levels in (images.mean, images.std))
        scaled = ((pixels.to(dtype) / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()
        with torch.no_grad():
            wanted = features(model.to(dtype), scaled)
        for family, entry in entries():
            if entry.trunk:
                words = tokens(family, trunk, imported(entry.trunk), pixels, dtype)
                count = min(words.shape[1], wanted.shape[1])
                change = (words[:, -count:] - wanted[:, -count:]).abs().max()
                kind = str(dtype).removeprefix("torch.")
                found[f"{family} {kind}"] = float(change / wanted.abs().max())
    return found


def tokens(family: str, trunk: Any, port: Any, pixels: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return the tokens that a family reads from the trunk."""
    fields = port.fields(trunk.shape) | SIZES[family]
    model: Any = build(family, fields, fresh=False)
    model.load_state_dict(model.state_dict() | port.state(trunk, model.config))
    model = model.to(dtype).eval()
    with torch.no_grad():
        if family == "sot":
            return model.trunk(pixels).words
        if family == "nac":
            return model.tokenizer(pixels)
        words = model.image(pixels)
        return words if trunk.shape.is_resnet else model.image_pool.norm(words)


def main() -> None:
    """Compare all models, and write the result.

    Exits with 1 if one differs by more than rounding.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = {}
    # transformers first: it would look for the version of what replaces torchvision.
    for read in (of_transformers, of_timm):
        with tempfile.TemporaryDirectory() as place:
            for name, folder, model, features in read(Path(place)):
                found[name] = differences(folder, model, features)
                print(name, found[name], flush=True)
    versions = {name: import_module(name).__version__ for name in ("timm", "transformers")}
    result = {
        "machine": this_machine().to_dict(),
        "versions": versions,
        "command": "PYTHONPATH=build/reference python benchmarks/trunk_parity.py",
        "allowed": ALLOWED,
        "largest": {
            kind: max(
                value for row in found.values() for key, value in row.items() if key.endswith(kind)
            )
            for kind in ALLOWED
        },
        "models": found,
    }
    write_result(options.out, result)
    beyond = [kind for kind, allowed in ALLOWED.items() if result["largest"][kind] > allowed]
    if beyond:
        raise SystemExit(f"larger differences than rounding in {', '.join(beyond)}")


if __name__ == "__main__":
    main()
