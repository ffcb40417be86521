# SPDX-License-Identifier: Apache-2.0
"""Draw the images of docs/gallery.md: what the shipped checkpoints see.

    OMP_NUM_THREADS=1 python benchmarks/gallery.py

Scenes and canvases come from the test splits of the generated data. Photographs come from
scikit-learn and are cropped to a square. Models run in torch, folded as for export. The answers
go to results/gallery.json, from which the page's text is written.
"""

import argparse
import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from result_file import write_result

from saccade.exporter.evaluation.evaluated_model import EvaluatedModel, subjects_of_checkpoint
from saccade.models.attention_maps import MapRow, Panel, zero_share
from saccade.models.captioner.caption_search import beam_search, step_of
from saccade.models.checkpoint import load
from saccade.models.data.datasets import load_data
from saccade.models.data.shapes import scenes
from saccade.models.data.tetrominoes import tetrominoes
from saccade.models.shipped import shipped_checkpoint
from saccade.models.slot_attention.edit import painted
from saccade.models.slot_attention.initial import initial_states
from saccade.models.vqa.questions import question_tokens
from saccade.serving.commands.pictures import maps_png

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "gallery.json"
SCENE, PIECES, CANVAS = 3, 5, 0  # indices in the test splits
SIDE_PX = 240  # side of an image on which maps are drawn
QUESTIONS = (
    "what shape is the largest object ?",
    "is there a circle ?",
    "how many objects are there ?",
)
PHOTOGRAPHS = ("china", "flower")
MOST_PANELS = 5
COLUMNS, TEXT_PT = 3, 11  # so that the text can be read on a phone
SCALE = 0.9  # keeps the files small


def main() -> None:
    """Draw each family's images and write the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gallery")
    parser.add_argument("--only", default="", help="draw only the images of this family")
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    drawn = {
        "questions": answered, "captions": captioned, "sparo": coded, "sot": classified,
        "slots": taken_apart, "circuits": circuits,
    }  # fmt: skip
    answers: dict[str, Any] = {}
    for name, draw in drawn.items():
        if options.only not in ("", name):
            continue
        pixels, rows = draw()
        pictures = [
            maps_png([row], one, columns=COLUMNS, text_pt=TEXT_PT)
            for row, one in zip(rows, pixels, strict=True)
        ]
        (options.out / f"{name}.png").write_bytes(small_png(pictures))
        answers[name] = [{"title": row.title, **row.figures} for row in rows]
        print(name, *(row.title for row in rows), sep="\n  ")
    if not options.only:
        write_result(RESULT, {"pictures": answers})


def small_png(pictures: Sequence[bytes]) -> bytes:
    """Stack images vertically, smaller and with a palette, as the page shows them."""
    opened = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    width = max(picture.width for picture in opened)
    page = Image.new("RGB", (width, sum(picture.height for picture in opened)), "white")
    top = 0
    for picture in opened:
        page.paste(picture, (0, top))
        top += picture.height
    page = page.resize(
        (int(SCALE * page.width), int(SCALE * page.height)), Image.Resampling.LANCZOS
    )
    # Otherwise the rare colors of a photograph would be lost among the grays.
    few = page.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    file = io.BytesIO()
    few.save(file, "PNG", optimize=True)
    return file.getvalue()


def shipped(name: str, *budgets: Any) -> list[EvaluatedModel]:
    """Load a shipped checkpoint at these budgets, by default the largest."""
    return subjects_of_checkpoint(load(shipped_checkpoint(name)), budgets)


def photograph(name: str) -> np.ndarray:
    """Return the center of one of scikit-learn's photographs.

    Shapes: -> uint8 [SIDE_PX SIDE_PX 3].
    """
    from sklearn.datasets import load_sample_image

    pixels = load_sample_image(f"{name}.jpg")
    side = min(pixels.shape[:2])
    top, left = ((size - side) // 2 for size in pixels.shape[:2])
    return resized(pixels[top : top + side, left : left + side], SIDE_PX)


def resized(pixels: np.ndarray, side: int) -> np.ndarray:
    """Resize a square: enlarge by repeating pixels, shrink by averaging."""
    grown = side > len(pixels)
    way = Image.Resampling.NEAREST if grown else Image.Resampling.BICUBIC
    return np.asarray(Image.fromarray(pixels).resize((side, side), way))


def scene(model: EvaluatedModel, index: int = SCENE) -> np.ndarray:
    """Return a test scene in the model's image size."""
    return scenes("test", index + 1, side_px=model.images().height_px).images[index]


def of_grid(maps: np.ndarray) -> np.ndarray:
    """Return the weights of the patches as maps; other tokens come first and are removed.

    Shapes: [k n] -> [k side side].
    """
    side = int(maps.shape[-1] ** 0.5)
    return maps[:, -side * side :].reshape(-1, side, side)


def answered() -> tuple[list[np.ndarray], list[MapRow]]:
    """Answer three questions about one scene."""
    (model,) = shipped("vqa-shapes")
    pixels = scene(model)
    tokens = np.stack([question_tokens(model.runtime_metadata, text) for text in QUESTIONS])
    out = model.component("")({"image": np.stack([pixels] * len(tokens)), "question": tokens})
    panels, figures = [], {}
    for text, maps, chances in zip(QUESTIONS, out["attention"], out["probabilities"], strict=True):
        answer = model.labels[int(chances.argmax())]
        weights = maps.reshape(model.runtime_metadata["grid"])
        panels.append(Panel(f"{textwrap.fill(text, 20)}\n{answer}, {zero_share(weights)}", weights))
        figures[text] = {"answer": answer, "probability": float(chances.max())}
    row = MapRow("vqa-shapes: one scene, three questions", tuple(panels), figures)
    return [resized(pixels, SIDE_PX)], [row]


def captioned() -> tuple[list[np.ndarray], list[MapRow]]:
    """Caption a scene, word by word."""
    (model,) = shipped("captioner-shapes")
    pixels = scene(model)
    facts = model.runtime_metadata
    state = model.component("encode")({"image": pixels[None]})
    step = step_of(model.component("step"))
    best = beam_search(
        step, state, start=facts["start"], end=facts["end"], beam=3, max_length=facts["max_length"]
    )[0]
    words = [facts["words"][token - 4] for token in best.tokens]
    panels = tuple(
        Panel(f"{word}\n{zero_share(weights)}", weights)
        for word, weights in zip(words, best.attention, strict=True)
    )
    text = " ".join(words)
    row = MapRow(f"captioner-shapes: {text}", panels, {"caption": text})
    return [resized(pixels, SIDE_PX)], [row]


def coded() -> tuple[list[np.ndarray], list[MapRow]]:
    """Show what slots of a SPARO code read in a scene and in a photograph."""
    (model,) = shipped("sparo-shapes")
    return _rows(model, "image", "slot", "sparo-shapes: where slots of the code read")


def classified() -> tuple[list[np.ndarray], list[MapRow]]:
    """Show what the class token of a second-order transformer reads, head by head."""
    (model,) = shipped("sot-shapes")
    return _rows(model, "", "head", "sot-shapes: where the class token reads")


def _rows(
    model: EvaluatedModel, role: str, part: str, title: str
) -> tuple[list[np.ndarray], list[MapRow]]:
    side = model.images().height_px
    given = {"a scene": scene(model)} | {name: photograph(name) for name in PHOTOGRAPHS}
    rows, shown = [], []
    for name, pixels in given.items():
        out = model.component(role)({"image": resized(pixels, side)[None]})
        maps = of_grid(out["attention"][0].reshape(-1, out["attention"].shape[-1]))
        panels = [Panel(f"{part} {index}", weights) for index, weights in enumerate(maps)]
        figures = _best(model, out)
        drawn = resized(pixels, SIDE_PX)
        best = f", answer {figures['label']}" if figures else ""
        rows.append(MapRow(f"{title}, {name}{best}", tuple(panels[:MOST_PANELS]), figures))
        shown.append(drawn)
    return shown, rows


def _best(model: EvaluatedModel, out: Mapping[str, np.ndarray]) -> dict[str, Any]:
    if "probabilities" not in out or not model.labels:
        return {}
    chances = out["probabilities"][0]
    return {"label": model.labels[int(chances.argmax())], "probability": float(chances.max())}


def taken_apart() -> tuple[list[np.ndarray], list[MapRow]]:
    """Show the same pieces after one, two and three rounds."""
    pixels = tetrominoes("test", PIECES + 1, side_px=20).images[PIECES]
    rows = []
    for model in shipped("slots-tetrominoes", "t3", "t2", "t1"):
        facts = model.runtime_metadata
        state = initial_states(facts["initial_state"], 1, facts["slots"])
        out = model.component("")({"image": pixels[None], "initial_state": state})
        drawn = painted(out["reconstruction"][0])
        error = float(np.mean((drawn / 255.0 - pixels / 255.0) ** 2))
        panels = [Panel("drawn by the model", pixels=resized(drawn, SIDE_PX))]
        panels += [
            Panel(f"slot {slot}", mask, most=1.0) for slot, mask in enumerate(out["masks"][0])
        ]
        title = f"{model.name}: squared error {error:.4f}"
        rows.append(MapRow(title, tuple(panels), {"mse": error}))
    return [resized(pixels, SIDE_PX)] * len(rows), rows


def circuits() -> tuple[list[np.ndarray], list[MapRow]]:
    """Show what the modules of a circuit read at three budgets."""
    data = load_data("digits-sum", "test")
    pixels, label = data.images[CANVAS], int(data.labels[CANVAS])
    rows = []
    for model in shipped("digits-sum", 1, 0.125, 0.03125):
        out = model.component("")({"image": pixels[None]})
        maps = of_grid(out["attention"][0])
        # Modules that read few positions first: those that read everything look alike.
        order = np.argsort(-maps.reshape(len(maps), -1).max(1), kind="stable")[:MOST_PANELS]
        panels = tuple(Panel(f"module {index}", maps[index]) for index in order)
        best = _best(model, out)
        title = (
            f"{model.name}: {len(maps)} modules answer {best['label']} "
            f"({100 * best['probability']:.0f} %), the label is {data.class_names[label]}"
        )
        rows.append(MapRow(title, panels, best | {"modules": len(maps)}))
    return [resized(np.repeat(pixels, 3, axis=2), SIDE_PX)] * len(rows), rows


if __name__ == "__main__":
    main()
