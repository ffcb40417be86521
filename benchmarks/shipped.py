# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that come with the package: trained, described, exported and timed.

    python benchmarks/shipped.py train vqa-shapes    # hours; an interrupted run is resumed
    python benchmarks/shipped.py ship vqa-shapes     # scores it, writes file and card
    python benchmarks/shipped.py table [NAME]        # every one: parity and speed

`train` writes to build/shipped, `ship` to models/shipped, `table` to results/shipped.json.
"""

import argparse
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from result_file import RESULTS, write_result
from shipped_card import Shipped, card

from saccade.core.files import write_atomically
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.exporter.export import ExportOptions, export
from saccade.models.checkpoint import load
from saccade.models.training.train import TrainOptions, train
from saccade.serving.bench.bench import bench
from saccade.serving.bench.options import BenchOptions

BUILT, SHIPPED = Path("build/shipped"), Path("models/shipped")
RESULT = RESULTS / "shipped.json"
MOST_BYTES = 3 * 2**20


def _signs(
    size: str, layers: int, side_px: int, steps: int, batch: int, *, then: tuple[int, int] = ()
) -> Shipped:
    """Return a member of the group that reads road signs, fine-tuned `then` at a side for steps."""
    config = {"layers": layers, "patch_px": 8, "token_embedding": "inception", "fusion": "class"}
    every = {"data": "signs", "recipe": "quick", "batch": batch}
    training = [every | {"side_px": side_px, "steps": steps, "set": config}]
    notes = (
        "Every test sample is drawn from a separate seed, so the interval also describes the score "
        "on new signs."
    )
    if then:
        training.append(every | {"side_px": then[0], "steps": then[1]})
        notes += (
            f" The checkpoint of `--init` was trained for {steps:,} steps on images of {side_px} "
            "px; `train` begins with it."
        )
    return Shipped(
        "sot",
        f"A ViT of {layers} block{'s' * (layers > 1)} on inception tokens that reads road signs in "
        f"{(then or [side_px])[0]} px: {size} among the three of a group.",
        training[-1],
        (EvaluateOptions(data="signs", task="top1"),),
        notes=notes,
        first=training[0] if then else None,
    )


DIGITS_SUM_BUDGETS = (1.0, 0.5, 0.25, 0.2, 0.125, 0.0625, 0.03125, 0.015625)
MODELS = {
    "digits-sum": Shipped(
        "nac",
        "A Neural Attentive Circuit of 256 modules that reads four handwritten digits on a canvas "
        "and returns their sum modulo 10.",
        {"data": "digits-sum", "recipe": "quick"},  # for images, both recipes are the same
        (EvaluateOptions(data="digits-sum", task="top1", budget=DIGITS_SUM_BUDGETS),),
        notes="Training canvases show training digits only, test canvases test digits only, and "
        "the test canvases share 599 of them. The intervals therefore describe the score on these "
        "canvases, not on other people's handwriting.\n\n"
        "It was trained with module dropout: a step runs 4 to 32 modules (in the last quarter up "
        "to all), in 7 of 10 steps the best connected ones, else a random subset. Auxiliary linear "
        "heads, dropped after training, predict the plain sum and the number of each digit, from "
        "the embedding and from each module's state. The first eight hundred steps show mostly "
        "one, two, then three digits.\n\n"
        "Four digits need four modules: with tokens that make the task learnable, budgets down to "
        "4 modules cost nothing. The convolutional tokens were chosen on validation data. The test "
        "scores of shorter twins of this circuit, and of the file that it replaces, were known "
        "when its number of steps was set. What the sparse links and the module dropout contribute "
        "was measured with twins: see the "
        "[results](../../benchmarks/results/digits_sum.json) and "
        "[docs/budgets.md](../../docs/budgets.md).",
    ),
    "listops": Shipped(
        "nac",
        "A Neural Attentive Circuit that reads nested lists of digits, up to 100 characters of "
        "them, and returns their value.",
        {"data": "listops"},
        (EvaluateOptions(data="listops", task="top1", budget=(1, 0.5, 0.125)),),
    ),
    "sparo-shapes": Shipped(
        "sparo",
        "A small CLIP with SPARO's slots in both towers, for scenes of colored shapes and "
        "sentences about them.",
        {},
        tuple(
            EvaluateOptions(data="shapes", task=task)
            for task in ("zero-shot", "retrieval", "hard-negatives")
        ),
    ),
    "sot-shapes": Shipped(
        "sot",
        "A small second-order transformer that names the color and shape of one object.",
        {"data": "shapes"},
        (EvaluateOptions(data="shapes", task="top1", budget=("exact", "fast", "class")),),
    ),
    "signs-small": _signs("small", 1, 32, 2_500, 64),
    "signs-middle": _signs("middle", 2, 56, 2_000, 64),
    "signs-large": _signs("large", 4, 80, 2_400, 32, then=(128, 1_200)),
    "slots-tetrominoes": Shipped(
        "slot-attention",
        "Equivariant slot attention that splits scenes of three tetrominoes into slots.",
        {"data": "tetrominoes", "seed": 1},
        (EvaluateOptions(data="tetrominoes", task="ari"),),
        seeds=("slot-attention", "whole", "t-sa", "anywhere: FG-ARI"),
        chosen="Seed 1 was chosen over seed 0 by validation; the validation score of seed 2 was "
        "not kept. It also has the best test score of the three, so expect the average from "
        "another run.",
    ),
    "vqa-shapes": Shipped(
        "vqa",
        "A network with TVMAX attention that answers questions about scenes of shapes.",
        {"set": {"attention": "tvmax"}},
        (EvaluateOptions(data="shapes", task="vqa"),),
    ),
    "captioner-shapes": Shipped(
        "captioner",
        "An LSTM with TVMAX attention that describes a scene of shapes in a sentence.",
        {"set": {"attention": "tvmax"}},
        (EvaluateOptions(data="shapes", task="caption"),),
    ),
}


def trained(name: str) -> None:
    """Train with the shipped recipe, or resume an interrupted run."""
    model, last = MODELS[name], BUILT / f"{name}.safetensors"
    BUILT.mkdir(parents=True, exist_ok=True)
    runs = [(last, model.training)]
    if model.first:
        begun = BUILT / f"{name}-first.safetensors"
        runs = [(begun, model.first), (last, model.training | {"init": begun})]
    for out, given in runs:
        options = TrainOptions(out, **({"recipe": "shipped"} | given))
        if out == last or not out.exists():
            train(model.family, replace(options, resume=options.state_path.exists()))


def ship(name: str) -> None:
    """Score the trained checkpoint on test data, and copy it to the others with its card."""
    model, built = MODELS[name], load(BUILT / f"{name}.safetensors")
    if built.path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{built.path}: {built.path.stat().st_size} bytes, at most {MOST_BYTES}.")
    results = [
        result for wanted in model.evaluations for result in evaluate(built.path, wanted).results
    ]
    write_atomically(SHIPPED / f"{name}.md", card(model, built, results).encode())
    shutil.copyfile(built.path, SHIPPED / built.path.name)


def table(name: str, seconds: float) -> None:
    """Measure one checkpoint, or all; the others' rows stay as they are."""
    rows = json.loads(RESULT.read_text())["models"] if RESULT.exists() else {}
    for path in sorted(SHIPPED.glob("*.safetensors" if name == "all" else f"{name}.safetensors")):
        rows[path.stem] = row(path, seconds)
        write_result(RESULT, {"models": rows})
        print(line(path.stem, rows[path.stem]), flush=True)


def line(name: str, entry: dict[str, Any]) -> str:
    """A row of the table in docs/benchmarks.md: whole model, worst parity, fastest batch."""
    whole = entry["variants"][0]
    inside, score = whole["in_process"], whole["score"]
    one, best = (
        f"{inside[f'batch_{batch}']['inferences_per_second']:,.0f}"
        for batch in (1, inside["best_batch"])
    )
    parity = max(figure["relative_error"] for figure in entry["parity"].values())
    low, high = score["interval"]
    factor = 100 if score["unit"] == "share" else 1
    value = f"{factor * score['value']:.4g} ({factor * low:.4g} to {factor * high:.4g})"
    return (
        f"| `{name}` | {entry['bytes'] / 2**20:.1f} | {score['name']} {value} | {parity:.1e} | "
        f"{one} | {best} at {inside['best_batch']} |"
    )


def row(path: Path, seconds: float) -> dict[str, Any]:
    """Parity and speed of every variant of one checkpoint, exported now."""
    checkpoint = load(path)
    with tempfile.TemporaryDirectory() as place:
        exported = export(path, ExportOptions(out=Path(place) / "exported", name=path.stem))
        options = BenchOptions(out=Path(place) / "report", server=False, seconds=seconds)
        report = bench(exported.folder, options).to_dict()
    return {
        "family": checkpoint.family,
        "bytes": path.stat().st_size,
        "sha256": checkpoint.sha256,
        "parity": {manifest.variant.name: figures(manifest) for manifest in exported.manifests},
        "variants": report["variants"],
    }


def figures(manifest: Manifest) -> dict[str, float]:
    """Figures that the gate measured."""
    return {"multiply_adds": manifest.cost.multiply_adds.total, **manifest.parity.figures}


def main() -> None:
    """One of the three things."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("train", "ship", "table"))
    parser.add_argument("name", choices=[*MODELS, "all"], nargs="?", default="all")
    parser.add_argument("--seconds", type=float, default=60, help="longest time for one model")
    options = parser.parse_args()
    if options.action == "table":
        table(options.name, options.seconds)
        return
    for name in MODELS if options.name == "all" else [options.name]:
        {"train": trained, "ship": ship}[options.action](name)


if __name__ == "__main__":
    main()
