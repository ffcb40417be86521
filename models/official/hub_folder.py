# SPDX-License-Identifier: Apache-2.0
"""The source of a file or of a folder of a model hub, and the files in that folder."""

import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from saccade.core.errors import SaccadeError
from saccade.models.checkpoint_folder import is_checkpoint_folder
from saccade.models.data.samples.source import is_image, visible
from saccade.models.official.json_files import object_from
from saccade.models.official.tensor_files import SHARDS, read_tensors


class Hub(NamedTuple):
    """The layout of one project's folders."""

    config: str  # name of the JSON file
    mark: str  # key that distinguishes it from another project's file of the same name
    weights: tuple[str, ...]  # names of the weights; the first that exists is read


_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".msgpack")
_MODEL = ("model.safetensors", "pytorch_model.bin")
HUBS = {
    "timm": Hub("config.json", "architecture", _MODEL),
    "open-clip": Hub(
        "open_clip_config.json",
        "model_cfg",
        ("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
    ),
    "transformers": Hub(
        "config.json", "model_type", (_MODEL[0], _MODEL[0] + SHARDS, _MODEL[1], _MODEL[1] + SHARDS)
    ),
}
# Files with the image processor of a transformers model, and the key under which it is.
_PROCESSORS = (("preprocessor_config.json", None), ("processor_config.json", "image_processor"))
# The converter by a pattern of timm's architecture.
_TIMM = {
    r"vit_.+": "vit",
    r"deit3?_.+": "deit",
    r"swin_.+|swinv2_(?!cr_).+": "swin",
    r"resnet(18|26|34|50|101|152)": "resnet",
}
_KNOWN = "vit_*, deit_*, deit3_*, swin_*, swinv2_*, resnet18, 26, 34, 50, 101 or 152"


def hub_of(folder: Path) -> str | None:
    """Return the project that wrote a folder, by its JSON; None if it is not a hub's.

    Raises: SaccadeError if the JSON cannot be read.
    """
    for name, hub in HUBS.items():
        path = folder / hub.config
        if path.is_file() and hub.mark in (object_from(path, hub.config) or {}):
            return name
    return None


def foreign(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return what a place is that saccade did not write, and the commands for it.

    Empty if it is unknown.
    """
    place = shlex.quote(str(path))
    with suppress(SaccadeError, OSError):
        if path.is_file() and path.suffix in _WEIGHTS:
            return "a file of weights", (f"saccade inspect {place}",)
        if is_checkpoint_folder(path):
            return "a checkpoint of saccade", (f"saccade export {place} --out FOLDER",)
        if path.is_dir() and (hub := hub_of(path)):
            out = shlex.quote(f"build/{path.resolve().name}.safetensors")
            return f"a folder of {hub}", (f"saccade convert {place} --out {out}",)
        if path.is_dir() and _has_images(path, 0):
            return "a folder of images", (f"saccade bulk ARTEFACTS --input {place} --out ANSWERS",)
        if path.is_dir() and _has_images(path):
            train = f"saccade train nac --data {place} --out my.safetensors"
            evaluate = f"saccade evaluate MODEL --data {place}"
            return "a folder of images in classes", (train, evaluate)
    return "", ()


def _has_images(folder: Path, depth: int = 2) -> bool:
    # `depth` is how many folders below may have them.
    there = visible(folder)
    if any(is_image(entry.name) for entry in there):
        return True
    return depth > 0 and any(_has_images(Path(one), depth - 1) for one in there if one.is_dir())


def foreign_text(path: Path, expected: str) -> str:
    """Return `foreign` as a sentence that goes on after the path; empty if it is unknown."""
    kind, commands = foreign(path)
    return kind and f"found {kind}, expected {expected}. Use it with: {', or '.join(commands)}"


def source_of(folder: Path) -> str:
    """Return the SOURCE that converts a folder of a model hub.

    Raises: SaccadeError if it is not such a folder, or a timm architecture without a converter.
    """
    if not folder.is_dir():
        what = "found a file" if folder.exists() else "found nothing there"
        raise SaccadeError(
            f"{folder}: {what}, expected a folder with config.json and weights. For a file, also "
            "pass its SOURCE, which `saccade inspect` names: saccade convert SOURCE FILE --out "
            "NAME.safetensors"
        )
    hub = hub_of(folder)
    if hub is None and (kind := foreign_text(folder, "a folder of a model hub")):
        raise SaccadeError(f"{folder}: {kind}")
    if hub is None:
        raise SaccadeError(
            f"{folder}: has neither config.json with model_type (transformers) or architecture "
            "(timm), nor open_clip_config.json. Copy the JSON next to the weights, or pass the "
            "SOURCE and the file: saccade convert SOURCE FILE --out NAME.safetensors"
        )
    if hub == "open-clip":
        return "sparo-clip" if _has_slots(weights_in(folder, hub)) else hub
    return hub if hub != "timm" else _timm_source(folder)


def _timm_source(folder: Path) -> str:
    architecture = (object_from(folder / "config.json", "config.json") or {})["architecture"]
    name = str(architecture).partition(".")[0]
    fitting = (source for pattern, source in _TIMM.items() if re.fullmatch(pattern, name))
    source = next(fitting, None)
    if source is None:
        raise SaccadeError(
            f"{folder}: config.json has timm's architecture {str(architecture)!r:.60}, expected "
            f"one of {_KNOWN}. saccade has no family for others. Choose one of these,"
            " or train a family on your images: saccade train nac --data FOLDER --out "
            "NAME.safetensors"
        )
    return source


def _has_slots(weights: Path) -> bool:
    return any(name.endswith("visual.sparo.q_emb") for name in read_tensors(weights))


def weights_in(path: Path, hub: str | None) -> Path:
    """Return the file of weights, or their index, if the path is a hub's folder, else the path.

    Raises: SaccadeError if the folder has the JSON, but no weights.
    """
    if hub is None or not (path / HUBS[hub].config).is_file():
        return path
    names = HUBS[hub].weights
    weights = next((path / name for name in names if (path / name).is_file()), None)
    if weights is None:
        expected = " or ".join(name for name in names if not name.endswith(SHARDS))
        raise SaccadeError(
            f"{path}: has {HUBS[hub].config}, but no {expected}. Copy the weights there."
        )
    return weights


def config_beside(weights: Path, hub: str | None) -> dict[str, Any] | None:
    """Return the JSON next to the weights, if there is one and it is that project's.

    For transformers, `preprocessor_config` has its image processor.
    Raises: SaccadeError if it is not a JSON object.
    """
    if hub is None or not (weights.parent / HUBS[hub].config).is_file():
        return None
    name = HUBS[hub].config
    content = object_from(weights.parent / name, name)
    if not content or HUBS[hub].mark not in content:
        return None
    return content if hub != "transformers" else content | _processor(weights.parent)


def label_names(config: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """Return the labels in timm's config.json, if it has them in order."""
    names = (config or {}).get("label_names")
    listed = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if listed and names else None


def _processor(folder: Path) -> dict[str, Mapping[str, Any]]:
    for name, key in _PROCESSORS:
        if (folder / name).is_file():
            content = object_from(folder / name, name) or {}
            processor = content if key is None else content.get(key)
            if isinstance(processor, Mapping):
                return {"preprocessor_config": processor}
    return {}


# Name endings that occur together only in files of one source; the most specific first.
_MARKS = (
    ("nac", "input_latents.codes_", "read_in.read_in_attention.receiver_layernorm.weight"),
    ("sparo-clip", "visual.sparo.q_emb", "text_sparo.q_emb"),
    ("open-clip", "visual.conv1.weight", "token_embedding.weight"),
    ("transformers", "vision_model.embeddings.class_embedding"),
    ("transformers", "embeddings.patch_embeddings.projection.weight"),
    ("sparo-dino", "sparo.q_emb", "cls_token"),
    ("tvmax-vqa", "img_feat_linear.weight", "attflat_img.mlp.linear.weight"),
    ("invariant-slot-attention", "general_dense_q_0/kernel", "state_init"),
    ("sot", "cls_token", "classifier.cls_fc.weight", "blocks.0.attn.qkv.weight"),
    ("transformers", "vision_model.post_layernorm.weight"),
    ("transformers", "encoder.stages.0.layers.0.layer.0.convolution.weight"),
    ("swin", "attn.relative_position_bias_table", "mlp.fc1.weight"),
    ("swin", "attn.cpb_mlp.0.weight", "mlp.fc1.weight"),
    ("resnet", "conv1.weight", "layer1.0.bn1.running_mean", "layer4.0.conv2.weight"),
    ("deit", "dist_token", "patch_embed.proj.weight"),
    ("vit", "cls_token", "patch_embed.proj.weight"),
    ("vit", "pos_embed", "blocks.0.attn.qkv.weight", "patch_embed.proj.weight"),
)


def looks_like(names: Iterable[str]) -> str | None:
    """Return the source whose tensors have such names, if any."""
    names = tuple(names)
    for source, *marks in _MARKS:
        if all(any(name.endswith(mark) for name in names) for mark in marks):
            return source
    return None


def with_source(error: SaccadeError, source: str, names: Iterable[str]) -> SaccadeError:
    """Extend a converter's refusal with a hint if the file looks like another source's."""
    other = looks_like(names)
    if other in (None, source) or f"'{other}'" in str(error):
        return error
    return SaccadeError(
        f"{error}\nThe file looks like one for SOURCE '{other}', not '{source}'. Run: "
        f"saccade convert {other} ..."
    )
