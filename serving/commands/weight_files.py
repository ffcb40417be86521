# SPDX-License-Identifier: Apache-2.0
"""Weight files, recognized by their bytes: our checkpoints, foreign ones, and arrays.

For a foreign checkpoint the converter that fits is named. Only the strings of a file that
torch.save wrote are read, never its objects; only the header of a safetensors file is read.
"""

import math
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from saccade.core import limits
from saccade.core.archives import ArchiveRefused, array_names, check_archive
from saccade.core.errors import Damaged, MissingPackage, SaccadeError
from saccade.core.files import FileRefused, check_regular, sha256_of
from saccade.core.json_text import parse_json
from saccade.models.checkpoint_folder import checkpoint_name
from saccade.models.checkpoint_format import (
    SCHEMA,
    EntriesRefused,
    check_entries,
    safetensors_sha256,
)
from saccade.models.official.convert import looks_like
from saccade.models.official.tensor_files import is_messages
from saccade.models.torch_file import TorchFileRefused, texts_of

Description = tuple[str, dict[str, Any], tuple[str, ...]]
_LABELS, _CONFIG = "--labels LABELS.txt", "--config MODEL.json"
# What `convert` cannot read from the file, by source.
_NEEDED = dict.fromkeys(("nac", "sot", "vit", "deit", "swin", "resnet"), (_LABELS,)) | {
    "open-clip": (_CONFIG,),
    "invariant-slot-attention": (_CONFIG,),
    "tvmax-vqa": ("--attention {softmax,sparsemax,tvmax}", "--labels ANSWERS.json"),
}
_OURS = "a checkpoint of saccade"


def inspect_weights(path: Path, place: Path | None = None) -> Description:
    """Return kind, facts and next commands of a weight file; `place` is its model-hub folder.

    Raises: SaccadeError if it is of an unknown kind, damaged, or too large.
    """
    try:
        check_regular(path, limits.WEIGHTS_BYTES)
        with path.open("rb") as file:
            head = file.read(16)
        kind, facts, following = _description(path, place or path, head)
    except (TorchFileRefused, ArchiveRefused, FileRefused, EntriesRefused, OSError) as error:
        raise Damaged(path, f"cannot be read ({error!s:.300})") from error
    facts |= {"bytes": path.stat().st_size, "sha256": facts.get("sha256") or sha256_of(path)}
    return kind, facts, following


def _description(path: Path, place: Path, head: bytes) -> Description:
    if head[8:9] == b"{":
        entries = _header(path, int.from_bytes(head[:8], "little"))
        digest = safetensors_sha256(path)
        kind, facts, following = _safetensors(path, place, entries)
        return kind, {**facts, "sha256": digest}, following
    if head[:4] == b"PK\x03\x04" and all(
        entry.filename.endswith(".npy") for entry in check_archive(path, limits.WEIGHTS_BYTES)
    ):
        return _arrays(path)
    if head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05"):
        return _foreign(place, "a checkpoint of torch.save", texts_of(path), {})
    if is_messages(head):
        return _flax(path, place)
    raise SaccadeError(
        f"{path}: found {_kind_of(head)}, expected one that saccade wrote or "
        "weights (.safetensors, .pt, .pth, .bin, .npz, .msgpack). Pass another path."
    )


def _kind_of(head: bytes) -> str:
    if not head:
        return "an empty file"
    printable = all(byte >= 32 or byte in b"\t\n\r" for byte in head)
    return "a text file" if printable else "a binary file of an unknown kind"


def _header(path: Path, length: int) -> Mapping[str, Any]:
    if length > limits.JSON_BYTES:
        raise FileRefused(f"found a header of {length} bytes, expected at most {limits.JSON_BYTES}")
    with path.open("rb") as file:
        file.seek(8)
        data = file.read(length)
    check_entries(data)
    try:
        entries = parse_json(data)
    except ValueError as error:
        raise FileRefused(f"its header is not valid JSON ({error!s:.100})") from error
    if len(data) < length or not isinstance(entries, dict):
        raise FileRefused("its header is truncated or not an object")
    return entries


def _safetensors(path: Path, place: Path, entries: Mapping[str, Any]) -> Description:
    metadata = entries.get("__metadata__") or {}
    tensors = {name: entry for name, entry in entries.items() if name != "__metadata__"}
    facts: dict[str, Any] = {
        "tensors": len(tensors),
        "numbers": sum(math.prod(shape) for shape in map(_shape, tensors.values()) if shape),
    }
    if not (isinstance(metadata, dict) and "saccade" in metadata):
        return _foreign(place, "a safetensors file of another project", tensors, facts)
    header = _ours(path, metadata["saccade"])
    card: Any = header.get("card")
    labels = header.get("labels")
    facts |= {
        "family": header.get("family"),
        **_budgets(header),
        "labels": len(labels) if isinstance(labels, list) else 0,
        "trained_on": card.get("data") if isinstance(card, dict) else None,
        "version": header.get("version"),
    }
    out = f"build/{shlex.quote(checkpoint_name(path))}"
    return _OURS, facts, (f"saccade export {shlex.quote(str(place))} --out {out}",)


def _shape(entry: Any) -> list[int] | None:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    return shape if isinstance(shape, list) else None


def _ours(path: Path, text: Any) -> Mapping[str, Any]:
    try:
        header = parse_json(text)
        if header["schema"] != SCHEMA:
            raise ValueError(f"its schema is {str(header['schema'])!r:.60}")
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(path, f"its metadata is corrupt ({error})") from error
    return dict(header)


def _budgets(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the budgets that an export writes by default, and an example of smaller images."""
    from saccade.models.families import outline
    from saccade.models.resolution import examples

    family, config = header.get("family"), header.get("config")
    if not (isinstance(family, str) and isinstance(config, dict)):
        return {"budgets": "unknown"}
    try:
        model: Any = outline(family, config)
        budgets = model.budgets()
    except (MissingPackage, ImportError):
        return {"budgets": "unknown without torch"}
    except SaccadeError as error:
        return {"budgets": f"unknown: {error}"}
    sides = examples(model.config)
    names = f"{', '.join(budget.label for budget in budgets)} ({budgets[0].unit})"
    return {"budgets": names, **({"for_smaller_images": sides} if sides else {})}


def _foreign(place: Path, kind: str, names: Iterable[str], facts: Mapping[str, Any]) -> Description:
    names = frozenset(names)
    source = looks_like(names)
    quoted, stem = shlex.quote(str(place)), shlex.quote(place.stem)
    if source is None:
        return _unknown(quoted, kind, names, facts)
    needed = " ".join(option for option in _NEEDED.get(source, ()) if not _beside(place, option))
    following = f"saccade convert {source} {quoted} {needed} --out build/{stem}.safetensors"
    following = following.replace("  ", " ")
    return kind, {**facts, "looks_like": source}, (following,)


def _unknown(
    quoted: str, kind: str, names: frozenset[str], facts: Mapping[str, Any]
) -> Description:
    """Describe weights that no converter recognizes."""
    if modules := sorted(name for name in names if name.startswith("torch.nn.modules.")):
        facts = {**facts, "contains": f"a pickled torch module ({modules[0]})"}
        advice = "where the file comes from, save only the weights: "
        return kind, facts, (advice + "torch.save(model.state_dict(), 'weights.pt')",)
    # The strings of a torch.save file also include other words.
    dotted = sorted(name for name in names if "." in name and not name.startswith("torch."))
    facts = {
        **facts,
        "looks_like": "nothing that saccade converts",
        "first_names": (dotted or sorted(names))[:3],
    }
    return (
        kind,
        facts,
        (
            "compare them with docs/convert.md; if the weights are under another name: saccade "
            f"convert SOURCE {quoted} --checkpoint-key KEY --out NAME.safetensors",
        ),
    )


def _beside(place: Path, option: str) -> bool:
    """Return whether `convert` finds the option's file itself, next to weights of a hub."""
    return place.is_dir() and option == _CONFIG


def _flax(path: Path, place: Path) -> Description:
    from saccade.models.official.tensor_files import read_messages

    try:
        names = _joined_names(read_messages(path))
    except RecursionError as error:
        raise FileRefused("it is nested more deeply than any checkpoint") from error
    return _foreign(place, "a checkpoint of Flax", names, {"tensors": len(names)})


def _joined_names(tree: Any, prefix: str = "") -> list[str]:
    if not isinstance(tree, Mapping):
        return [prefix]
    return [
        name
        for key, value in tree.items()
        for name in _joined_names(value, f"{prefix}/{key}" if prefix else str(key))
    ]


def _arrays(path: Path) -> Description:
    from saccade.serving.client.embeddings import load_embeddings

    names = array_names(path)
    if {"vectors", "names", "variant"} <= set(names):
        embeddings, images = load_embeddings(path)
        facts = {
            "vectors": len(images),
            "dimensions": embeddings.vectors.shape[1],
            "variant": embeddings.variant,
            "variant_sha256": embeddings.sha256,
        }
        return "embeddings of `saccade embed`", facts, ()
    if {"images", "labels"} <= set(names):
        following = f"saccade train nac --data {shlex.quote(str(path))} --out my.safetensors"
        return "arrays of a data set", {"arrays": list(names)}, (following,)
    return _foreign(path, "arrays of NumPy", names, {"arrays": list(names[:10])})
