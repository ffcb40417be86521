# SPDX-License-Identifier: Apache-2.0
"""A tiny set of colored images with questions and captions: `python tests/language_sets.py FOLDER`.

In the files of VQA v2 and COCO, with their names, and as CSV and JSON lines.
"""

import csv
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COLORS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (40, 60, 220)}
SUBSETS = {"train2014": 18, "val2014": 6}


def colored(folder: Path, subset: str, count: int) -> list[tuple[int, str, str]]:
    """Write images with COCO's names; their number, file and color."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(count)
    images = []
    for number in range(count):
        color = list(COLORS)[number % len(COLORS)]
        pixels = np.array(COLORS[color]) + rng.integers(-25, 26, (20, 24, 3))
        key = number + 100 * (subset != "train2014")
        name = f"COCO_{subset}_{key:012}.jpg"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name, quality=95)
        images.append((key, name, color))
    return images


def questions_of(color: str) -> list[tuple[str, list[str], str, str]]:
    """Questions about an image, with ten answers each, their kind and the question's type."""
    other = next(name for name in COLORS if name != color)
    yes = ["yes"] * 9 + ["no"]
    return [
        ("What color is this?", [color] * 8 + [f"the {color}.", other], "other", "what color is"),
        ("Is it red?", yes if color == "red" else ["no"] * 10, "yes/no", "is it"),
        ("How many colors are there?", ["1"] * 6 + ["one"] * 3 + ["2"], "number", "how many"),
    ]


def captions_of(color: str) -> list[str]:
    """Captions of an image."""
    return [f"A {color} picture.", f"This is all {color}."]


def vqa(folder: Path, subsets: Mapping[str, int] = SUBSETS) -> Path:
    """VQA v2: both JSON files of each subset, and its folder of images."""
    for subset, count in subsets.items():
        asked: list[dict[str, Any]] = []
        answered: list[dict[str, Any]] = []
        for key, _, color in colored(folder / subset, subset, count):
            for text, answers, kind, first in questions_of(color):
                number = 1000 * key + len(asked) % 3
                ids = {"image_id": key, "question_id": number}
                asked.append({**ids, "question": text})
                given = [
                    {"answer": answer, "answer_confidence": "yes", "answer_id": place}
                    for place, answer in enumerate(answers, 1)
                ]
                answered.append(
                    {
                        "question_type": first,
                        "multiple_choice_answer": answers[0],
                        "answers": given,
                        "answer_type": kind,
                        **ids,
                    }
                )
        about = {"data_type": "mscoco", "data_subtype": subset, "info": {}, "license": {}}
        write(
            folder / f"v2_OpenEnded_mscoco_{subset}_questions.json",
            {**about, "task_type": "Open-Ended", "questions": asked},
        )
        write(folder / f"v2_mscoco_{subset}_annotations.json", {**about, "annotations": answered})
    return folder


def coco(folder: Path, subsets: Mapping[str, int] = SUBSETS) -> Path:
    """COCO's captions of each subset in `annotations`, beside its folder of images."""
    (folder / "annotations").mkdir(parents=True)
    for subset, count in subsets.items():
        images = colored(folder / subset, subset, count)
        captions = [
            {"image_id": key, "id": 10 * key + place, "caption": text}
            for key, _, color in images
            for place, text in enumerate(captions_of(color))
        ]
        write(
            folder / "annotations" / f"captions_{subset}.json",
            {
                "info": {"year": 2014},
                "images": [
                    {"license": 1, "file_name": name, "height": 20, "width": 24, "id": key}
                    for key, name, _ in images
                ],
                "licenses": [{"id": 1}],
                "annotations": captions,
            },
        )
    return folder


def tables(folder: Path) -> Path:
    """`captions.csv`, `questions.csv` and the same as JSON lines, with several texts per image."""
    images = colored(folder / "photos", "train2014", 24)
    said = [("image", "caption")]
    asked = [("image", "question", "answer")]
    for _, name, color in images:
        said += [(f"photos/{name}", text) for text in captions_of(color)]
        asked += [(f"photos/{name}", text, answers[0]) for text, answers, *_ in questions_of(color)]
    for name, rows in (("captions.csv", said), ("questions.csv", asked)):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    lines(
        folder / "captions.jsonl",
        [
            {"file_name": f"photos/{name}", "captions": captions_of(color)}
            for _, name, color in images
        ],
    )
    lines(
        folder / "questions.jsonl",
        [
            {"image": f"photos/{name}", "question": text, "answers": answers, "answer_type": kind}
            for _, name, color in images
            for text, answers, kind, _ in questions_of(color)
        ],
    )
    return folder


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write(path: Path, value: Any) -> None:
    """Write JSON."""
    path.write_text(json.dumps(value))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    for made in (vqa(place / "vqa"), coco(place / "coco"), tables(place / "tables")):
        print(made)
