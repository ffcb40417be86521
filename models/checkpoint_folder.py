# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a folder with Hugging Face's names: config.json, model.safetensors, README.md.

`model.safetensors` is a whole checkpoint. `config.json` repeats its metadata for other programs,
and `README.md` shows the card.
"""

import json
from pathlib import Path
from typing import Any

from saccade.core import limits
from saccade.core.errors import SaccadeError
from saccade.core.files import Writer, json_bytes, read_regular
from saccade.core.json_text import parse_json
from saccade.models.checkpoint_format import SCHEMA, Header
from saccade.models.preprocessing import Preprocessing
from saccade.models.shipped import located

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
MODEL_TYPE = "saccade"


def checkpoint_file(path: Path | str) -> Path:
    """Return the file of a checkpoint: of a folder, of `shipped:NAME`, or the path itself.

    Raises: SaccadeError if a folder has no weights, or there is no shipped checkpoint of the name.
    """
    path = located(path)
    if not is_checkpoint_folder(path):
        return path
    if not (path / WEIGHTS).is_file():
        raise SaccadeError(
            f"{path}: has {CONFIG} of a saccade checkpoint, but no {WEIGHTS}. Copy it there."
        )
    return path / WEIGHTS


def checkpoint_name(path: Path) -> str:
    """Return the name of a checkpoint: its folder's, or its file's without the extension."""
    if path.name == WEIGHTS and is_checkpoint_folder(path.parent):
        return path.resolve().parent.name
    return path.resolve().name if is_checkpoint_folder(path) else path.stem


def is_checkpoint_folder(path: Path) -> bool:
    """Return True if the folder has a config.json that saccade wrote."""
    return _config_in(path) is not None


def _config_in(path: Path) -> dict[str, Any] | None:
    try:
        content = parse_json(read_regular(path / CONFIG, limits.JSON_BYTES))
    except (OSError, ValueError):
        return None
    ours = isinstance(content, dict) and content.get("model_type") == MODEL_TYPE
    return content if ours else None


def check_config(path: Path, header: Header) -> None:
    """Check that config.json next to the weights repeats their metadata.

    Raises: SaccadeError naming the first key that differs.
    """
    found = _config_in(path.parent) if path.name == WEIGHTS else None
    if found is None:
        return
    expected = _config_of(header)
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            raise SaccadeError(
                f"{path.parent / CONFIG}: {key} is {found.get(key)!r:.80}, but {WEIGHTS} was "
                f"written with {expected.get(key)!r:.80}. {CONFIG} only repeats what the weights "
                "store, so a change to it has no effect. Undo the change, or copy the folder again."
            )


def folder_files(
    folder: Path, header: Header, weights: Writer, name: str | None = None
) -> dict[Path, bytes | Writer]:
    """Return the content of a folder by path; the weights are last. `name` is that in its card."""
    return {
        folder / CONFIG: json_bytes(_config_of(header)),
        folder / CARD: _card_of(name or folder.resolve().name, header).encode(),
        folder / WEIGHTS: weights,
    }


def _config_of(header: Header) -> dict[str, Any]:
    labels = {str(index): name for index, name in enumerate(header.labels)}
    content: dict[str, Any] = {
        "architectures": [header.family],
        "model_type": MODEL_TYPE,
        "saccade": {
            "schema": SCHEMA,
            "version": header.version,
            "family": header.family,
            "config": header.config,
            "preprocessing": header.preprocessing,
        },
    }
    if labels:
        content["id2label"] = labels
        content["label2id"] = {name: int(index) for index, name in labels.items()}
    # As it is read again: tuples are lists.
    return dict(json.loads(json.dumps(content)))


def _card_of(name: str, header: Header) -> str:
    task = "image-classification" if header.labels else "image-feature-extraction"
    front = ["---", "library_name: saccade", f"tags: [saccade, {header.family}]"]
    if header.preprocessing is not None:
        front.append(f"pipeline_tag: {task}")
    facts = {"family": header.family, "classes": len(header.labels) or None}
    if header.preprocessing is not None:
        facts["images"] = Preprocessing.from_dict(header.preprocessing).described()
    card = header.card
    facts |= {key: card.get(key) for key in ("data", "source", "file", "file_sha256")}
    lines = [f"- {key.replace('_', ' ')}: {value}" for key, value in facts.items() if value]
    notes = card.get("notes")
    lines += [f"- {note}" for note in notes] if isinstance(notes, list) else []
    return "\n".join(
        [
            *(*front, "---", "", f"# {name}", ""),
            "A checkpoint of saccade. `model.safetensors` contains the weights, the configuration,",
            "the preprocessing and the labels; `config.json` repeats them.",
            *("", *lines, "", "```python", "import saccade", ""),
            f'checkpoint = saccade.load("{name}")',
            *("```", "", "```sh", f"saccade export {name} --out build/{name}", "```", ""),
        ]
    )
