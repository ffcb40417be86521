# SPDX-License-Identifier: Apache-2.0
"""Every file reader with a valid file, and how that file is changed."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import labelled_sets
import language_sets
import masked_sets
import numpy as np
import paired_sets
import torch
from changed_files import (
    changed_bytes,
    changed_safetensors,
    changed_text,
    changed_zip,
    read_or_refused,
)
from hostile_files import CheckpointFile, images_npz
from PIL import Image
from tiny_artefacts import ENTRY, FULL, artefacts, engines, manifest_of

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact import frontier
from saccade.exporter.artefact.manifest import (
    ParentEntry,
    ScoreChange,
    read_manifest,
    write_manifest,
)
from saccade.exporter.runtimes.tensorrt.engine_manifest import read_engine_manifest
from saccade.models.catalogue import presets
from saccade.models.checkpoint import load
from saccade.models.data.datasets import load_data
from saccade.models.data.image_texts import captioned_split, load_contrasts, question_split
from saccade.models.data.options import DataOptions
from saccade.models.data.samples.point_clouds import read_points
from saccade.models.data.samples.questions import open_questions
from saccade.models.data.samples.sentences import open_captions
from saccade.models.data.samples.source import DataDescription, RowUnreadable
from saccade.models.data.segmented_images import segmented_images
from saccade.models.data.token_states import token_states
from saccade.models.families import FAMILIES, family_class
from saccade.models.image_decoding import ImageRefused, decode
from saccade.models.official.conversion import Original
from saccade.models.official.hub_folder import config_beside
from saccade.models.official.json_files import names_from, object_from
from saccade.models.official.sources import hugging_face
from saccade.models.official.tensor_files import read_tensors
from saccade.models.preprocessing import Preprocessing
from saccade.models.sparo.ranking import read_selection
from saccade.models.training.loop import read_state
from saccade.models.training.options import parse_overrides
from saccade.models.training.recipe_file import read_recipe
from saccade.serving.bench import report
from saccade.serving.client.embeddings import Embeddings, load_embeddings, save_embeddings
from saccade.serving.commands.inspection import inspect


@dataclass(frozen=True)
class Reader:
    """One reader: how to call it, a valid file, and how to change the file."""

    read: Callable[[Path], Any]
    sound: Callable[[Path], Any]  # writes it
    change: Callable[[random.Random, bytes], bytes]
    name: str = "x.bin"  # of the file


def _built(path: Path) -> Any:
    return load(path).build()


def _configured(path: Path) -> Any:
    """A configuration of the family whose name stands in front, as `--config` reads files."""
    content = object_from(path, "--config") or {}
    kind = family_class(content.get("family", "")).config_class
    return kind.from_dict(content.get("config"))


def _preprocessing(path: Path) -> Any:
    preprocessing = Preprocessing.from_dict(object_from(path, "--preprocessing"))  # type: ignore[arg-type]
    return preprocessing.wanted(), preprocessing.described(), json.dumps(preprocessing.to_dict())


def _overrides(path: Path) -> Any:
    text = path.read_bytes().decode(errors="replace")
    return parse_overrides([f"dim={text}"])


_SMALL = Preprocessing(8, 8, 3, (0.5,) * 3, (0.5,) * 3, max_megapixels=4).wanted()


def _image(path: Path) -> Any:
    try:
        return decode(path.read_bytes(), _SMALL)
    except ImageRefused as error:
        raise SaccadeError(str(error)) from error


def _labelled(path: Path) -> Any:
    return load_data(path, "train", preprocessing=Preprocessing(8, 8, 1, (0.0,), (1.0,)))


_FITTED = Preprocessing(8, 8, 3, (0.0,) * 3, (1.0,) * 3)
_TWO = {"train2014": 2}  # images


def _masked(path: Path) -> Any:
    data = segmented_images(str(path), "all", preprocessing=_FITTED)
    return np.asarray(data.masks)


def _mask_set(form: str) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        written = Path(masked_sets.FORMATS[form](path.parent, masked_sets.scenes(2)))
        (written if written.is_file() else path.parent / "0.tar").rename(path)

    return write


def _captioned(path: Path) -> Any:
    source = open_captions(str(path), DataDescription())
    data = captioned_split(source, path.name, "all", preprocessing=_FITTED, asked=DataOptions())
    return data.sha256


def _captions(path: Path) -> None:
    language_sets.coco(path.parent, _TWO)
    (path.parent / "annotations" / path.name).rename(path)


_QUESTIONS = "v2_OpenEnded_mscoco_train2014_questions.json"


def _asked(path: Path) -> Any:
    source = open_questions(str(path.with_name(_QUESTIONS)), DataDescription())
    data = question_split(source, path.name, "all", preprocessing=_FITTED, asked=DataOptions())
    return data.sha256


def _questions(path: Path) -> None:
    language_sets.vqa(path.parent, _TWO)


def _negatives(path: Path) -> None:
    paired_sets.negatives(path.parent, 2)


def _pairs(path: Path) -> None:
    paired_sets.parquet_file(path.parent, paired_sets.told(4))


def _contrasts(path: Path) -> Any:
    return load_contrasts(str(path), None, DataOptions(), _FITTED, None).sha256


def _points(path: Path) -> Any:
    try:
        return read_points(path.read_bytes(), path.suffix)
    except RowUnreadable as error:
        raise SaccadeError(str(error)) from error


def _mesh(path: Path) -> None:
    path.write_text("OFF\n3 1 0\n0 0 0\n4 0 0\n4 1 0\n3 0 1 2\n")


def _cloud(path: Path) -> None:
    header = "ply\nformat ascii 1.0\nelement vertex 2\nproperty float x\nproperty float y\n"
    path.write_text(f"{header}property float z\nend_header\n0 1 2\n3 4 5\n")


def _samples(form: str) -> Callable[[Path], Any]:
    return lambda path: labelled_sets.FORMATS[form](path.parent, labelled_sets.noise())


_HUB = Path(__file__).parent / "golden" / "hugging_face" / "dinov2-embedding"
_SHARDS = "model.safetensors.index.json"


def _hub(**changes: Any) -> Any:
    """Read a model of transformers with other JSON."""
    config = config_beside(_HUB / "model.safetensors", "transformers") or {}
    tensors = read_tensors(_HUB / "model.safetensors")
    return hugging_face.convert(Original("x", tensors, config | changes))


def _hub_config(path: Path) -> Any:
    processor = config_beside(_HUB / "model.safetensors", "transformers") or {}
    config = object_from(path, "config.json") or {}
    tensors = read_tensors(_HUB / "model.safetensors")
    given = {"preprocessor_config": processor["preprocessor_config"], **config}
    return hugging_face.convert(Original("x", tensors, given))


def _hub_images(path: Path) -> Any:
    return _hub(preprocessor_config=object_from(path, "preprocessor_config.json"))


def _index(path: Path) -> None:
    _bare_safetensors(path.with_name("x.safetensors"))
    tensors = read_tensors(path.with_name("x.safetensors"))
    path.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "x.safetensors")}))


def _golden(name: str) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes((_HUB / name).read_bytes())


@cache
def readers() -> dict[str, Reader]:
    """Return the readers by name, without those whose package is not installed."""
    text = {"change": lambda rng, data: changed_text(rng, json.loads(data))}
    by_name = {
        "checkpoint": Reader(_built, _checkpoint, changed_safetensors),
        "preprocessing": Reader(_preprocessing, _json(_SOUND_INPUT), **text),
        "--config": Reader(lambda p: object_from(p, "--config"), _json({"a": {"b": [1]}}), **text),
        "--labels": Reader(lambda p: names_from(p, "--labels"), _json({"a": 0, "b": 1}), **text),
        "--slots": Reader(read_selection, _json(_SELECTION), **text),
        "recipe .toml": Reader(read_recipe, _recipe, changed_bytes, "x.toml"),
        "recipe .yaml": Reader(read_recipe, _recipe, changed_bytes, "x.yaml"),
        "--set": Reader(_overrides, _json([1, {"a": "b"}]), **text),
        "manifest": Reader(read_manifest, _manifest, name=_NAME, **text),
        "engine manifest": Reader(read_engine_manifest, _engine, name=_NAME, **text),
        "frontier.json": Reader(frontier.read_frontier, _json(_FRONTIER), **text),
        "report.json": Reader(report.read_report, _json(_REPORT), **text),
        "images .npz": Reader(lambda p: load_data(p, "train"), _images, changed_zip, "mine.npz"),
        "samples .csv": Reader(_labelled, _samples("CSV"), changed_bytes, "mine.csv"),
        "samples .jsonl": Reader(_labelled, _samples("JSON lines"), changed_bytes, "mine.jsonl"),
        "samples .parquet": Reader(_labelled, _samples("Parquet"), changed_bytes, "mine.parquet"),
        "samples .tar": Reader(_labelled, _samples("shards"), changed_bytes, "train-000.tar"),
        "token states .npz": Reader(lambda p: token_states(p, "train"), _tokens, changed_zip),
        "masks .json": Reader(_masked, _mask_set("COCO"), name="coco.json", **text),
        "masks .parquet": Reader(_masked, _mask_set("Parquet"), changed_bytes, "x.parquet"),
        "masks .tar": Reader(_masked, _mask_set("shards"), changed_bytes, "x.tar"),
        "captions .json": Reader(_captioned, _captions, name="captions_train2014.json", **text),
        "captions .parquet": Reader(_captioned, _pairs, changed_bytes, "pairs.parquet"),
        "questions .json": Reader(_asked, _questions, name=_QUESTIONS, **text),
        "annotations .json": Reader(
            _asked, _questions, name="v2_mscoco_train2014_annotations.json", **text
        ),
        "negatives .json": Reader(_contrasts, _negatives, name="replace_att.json", **text),
        "points .off": Reader(_points, _mesh, changed_bytes, "mesh.off"),
        "points .ply": Reader(_points, _cloud, changed_bytes, "cloud.ply"),
        "embeddings .npz": Reader(load_embeddings, _embeddings, changed_zip),
        "weights .npz": Reader(read_tensors, _images, changed_zip),
        "weights .pt": Reader(read_tensors, _torch, changed_zip),
        "weights, old .pt": Reader(read_tensors, _old_torch, changed_bytes),
        "weights .safetensors": Reader(read_tensors, _bare_safetensors, changed_safetensors),
        "weights .msgpack": Reader(read_tensors, _flax, changed_bytes),
        "inspect .pt": Reader(inspect, _torch, changed_zip),
        "inspect, old .pt": Reader(inspect, _old_torch, changed_bytes),
        "inspect .safetensors": Reader(inspect, _bare_safetensors, changed_safetensors),
        "inspect .msgpack": Reader(inspect, _flax, changed_bytes),
        "inspect .npz": Reader(inspect, _embeddings, changed_zip),
        "inspect .json": Reader(inspect, _json(_FRONTIER), name="frontier.json", **text),
        "config.json": Reader(_hub_config, _golden("config.json"), **text),
        "preprocessor_config.json": Reader(
            _hub_images, _golden("preprocessor_config.json"), **text
        ),
        "index of weights": Reader(read_tensors, _index, name=_SHARDS, **text),
        "state of a run": Reader(lambda p: read_state(p, {}), _state, changed_zip),
    }
    for family in FAMILIES:
        values = {"family": family, "config": next(iter(presets(family).values())).to_dict()}
        by_name[f"configuration of {family}"] = Reader(_configured, _json(values), **text)
    for kind in ("PNG", "JPEG", "WEBP"):
        by_name[f"image {kind}"] = Reader(_image, _picture(kind), changed_bytes)
    return by_name


_SOUND_INPUT = Preprocessing(8, 8, 3, (0.5,) * 3, (0.5,) * 3).to_dict()
_SELECTION = {"order": [1, 0], "mask": [[0.5, 1], [0, 1]], "kind": "dimension", "data": "shapes"}
_SELECTION |= {"checkpoint_sha256": "0" * 64}
_NAME = f"{FULL}.manifest.json"
_REPORT = {"schema": report.SCHEMA, "version": report.VERSION, "variants": [{"a": 1.0}]}
_FRONTIER = {"schema": "saccade.frontier", "version": 1, "model": "x", "entries": [ENTRY]}


def _recipe(path: Path) -> None:
    mark = " =" if path.suffix == ".toml" else ":"
    values = {"steps": 7, "learning_rate": 0.5, "family": '"sot"', "freeze": '["a", "b"]'}
    lines = [f"{name}{mark} {value}" for name, value in values.items()]
    path.write_text("\n".join([*lines, f"set{mark} {{}}", ""]))


def _json(value: Any) -> Callable[[Path], Any]:
    return lambda path: path.write_text(json.dumps(value))


def _checkpoint(path: Path) -> None:
    torch.manual_seed(0)
    CheckpointFile().write(path)


def _manifest(path: Path) -> None:
    change = ScoreChange(samples=32, points=0.0, low=-0.1, high=0.1)
    parent = ParentEntry("tiny.safetensors", "0" * 64)
    manifest = manifest_of("b1000", b"", parent, facts={"words": ["a"]})
    parity = replace(manifest.parity, gate="standard", seconds=1.5, score=change)
    write_manifest(path.parent, replace(manifest, parity=parity))


def _engine(path: Path) -> None:
    folder = artefacts(path.parent / "folder", checkpoint=False)
    engines(folder, path.parent / "engines")
    (path.parent / "engines" / path.name).rename(path)


def _images(path: Path) -> None:
    images_npz(path)


def _tokens(path: Path) -> None:
    arrays = {"tokens": np.ones((40, 3, 2), np.float32), "lengths": np.full(40, 2)}
    np.savez(path.with_suffix(".npz"), **arrays, labels=np.arange(40) % 2)
    path.with_suffix(".npz").replace(path)


def _embeddings(path: Path) -> None:
    save_embeddings(path, Embeddings(np.ones((2, 3), np.float32), "x-b1000", "0" * 64), ["a", "b"])


def _torch(path: Path) -> None:
    state = {"model": {"a.weight": torch.ones(3, 4), "a.bias": torch.ones(4)}, "epoch": 3}
    torch.save(state, path)


def _old_torch(path: Path) -> None:
    state = {"a.weight": torch.ones(3, 4), "a.bias": torch.ones(4)}
    torch.save(state, path, _use_new_zipfile_serialization=False)


def _bare_safetensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a.weight": torch.ones(3, 4), "a.bias": torch.ones(4)}, path)


def _flax(path: Path) -> None:
    import msgpack

    array = np.ones((3, 4), np.float32)
    packed = msgpack.packb([list(array.shape), "float32", array.tobytes()])
    tree = {"params": {"kernel": msgpack.ExtType(1, packed), "chunks": {"0": 1}}}
    path.write_bytes(msgpack.packb(tree))


def _state(path: Path) -> None:
    torch.save({"version": 1, "run": "{}", "state": {"step": 3, "a": torch.ones(2)}}, path)


def _picture(kind: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 256, (24, 20, 3), dtype=np.uint8)
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(pixels).save(path, kind, exif=exif)

    return write


def write_changed(reader: Reader, sound: bytes, seed: int, path: Path) -> None:
    """Write the file that this seed makes from the valid one."""
    path.write_bytes(reader.change(random.Random(seed), sound))


def outcome(reader: Reader, path: Path) -> str:
    """Return the outcome for a file, read or refused; anything else is raised."""
    return read_or_refused(lambda: reader.read(path))


def sound_bytes(reader: Reader, path: Path) -> bytes:
    """Write the valid file and return its bytes."""
    reader.sound(path)
    return path.read_bytes()
