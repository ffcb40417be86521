# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the SoT authors, with every token embedding and every head."""

import re
from dataclasses import replace
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.models.official.authors_images import AuthorsImages, authors_images
from saccade.models.official.conversion import Converted, Official, Reading
from saccade.models.official.given_files import check_stated, whole_number
from saccade.models.official.sot_head_keys import read_head
from saccade.models.official.vit_keys import BLOCK, block_fields, hint, take_specials
from saccade.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from saccade.models.sot.config import SoTConfig

GRID = 14  # tokens per side, in all of the authors' models
_MARKS = {
    "densenet": "stage.0.denselayer1.conv1.weight",
    "resnet": "stage.0.conv1.weight",
    "inception": "stage.0.branch0.conv.weight",
    "non-local": "stage.3.theta.0.weight",
    "naive": "proj.weight",
}
_RESNET = {
    f"{theirs}{number}": f"{name}.{ours}"
    for number, name in ((1, "first"), (2, "second"), (3, "third"))
    for theirs, ours in (("conv", "conv"), ("bn", "norm"))
}
_INCEPTION = {
    f"{theirs}.{part}": f"{name}.{ours}"
    for theirs, name in {
        "branch0": "one",
        "branch1.0": "three_narrow",
        "branch1.1": "three",
        "branch2.0": "five_narrow",
        "branch2.1": "five",
        "branch3.1": "largest",
    }.items()
    for part, ours in (("conv", "conv"), ("bn", "norm"))
}
_NON_LOCAL = {
    f"{theirs}.{part}": f"{name}.{ours}"
    for theirs, name in {
        "theta": "query",
        "phi": "key",
        "g": "value",
        "shortcut": "shortcut",
    }.items()
    for part, ours in (("0", "conv"), ("1", "norm"))
}
# Names inside a block, without the last part (weight, bias, running_mean, ...).
_INSIDE = {
    "densenet": {"norm1": "norm", "conv1": "narrow", "norm2": "narrow.norm", "conv2": "grow"},
    "resnet": _RESNET | {"downsample.0": "shortcut.conv", "downsample.1": "shortcut.norm"},
    "inception": _INCEPTION,
    "non-local": _NON_LOCAL | {"W": "widen", "bn_norm": "norm"},
}


def read_embedding(reading: Reading, prefix: str, config: Any) -> dict[str, Any]:
    """Return the fields of the token embedding, and take its tensors.

    Raises: SaccadeError if it is none of the five, or --config has an impossible image size.
    """
    kinds = [kind for kind, mark in _MARKS.items() if prefix + mark in reading.tensors]
    if not kinds:
        raise SaccadeError(
            f"{reading.path}: none of SoT's five token embeddings is under {prefix!r}. "
            "Choose the SOURCE that wrote this file (saccade inspect names it if it is known)."
        )
    kind = kinds[0]
    normed = f"{prefix}stage.0.denselayer1.norm1.weight" in reading.tensors
    for key, value in reading.tensors.items():
        ours = _our_name(kind, key.removeprefix(prefix), normed) if key.startswith(prefix) else None
        if ours is not None:
            reading.put(f"trunk.embed.{ours}", value, key)
    first = "proj.weight" if kind == "naive" else "stem.0.weight"
    side = _side_px(reading, prefix, kind, config)
    return {
        "token_embedding": kind,
        "dense_norm": normed,
        "channels": reading.shape(prefix + first)[1],
        "height_px": side,
        "width_px": side,
        "patch_px": side // GRID,
    }


def _side_px(reading: Reading, prefix: str, kind: str, config: Any) -> int:
    """Return the image's side: from the tensors if they tell it, else from --config, else 224."""
    if kind == "naive":
        return GRID * reading.shape(prefix + "proj.weight")[2]
    if kind == "non-local":
        return 8 * GRID
    if kind == "resnet":
        # The last block has a convolution in its shortcut only if it halves the grid.
        halves = f"{prefix}stage.2.downsample.0.weight" in reading.tensors
        return (16 if halves else 8) * GRID
    side = hint(config, "img_size", default=16 * GRID)
    if side not in (8 * GRID, 16 * GRID):
        raise SaccadeError(
            f"--config: img_size is {side!r}, expected {8 * GRID} or {16 * GRID}, for which the "
            f"authors' {kind} embedding gives {GRID} x {GRID} tokens."
        )
    return int(side)


def _our_name(kind: str, name: str, normed: bool) -> str | None:
    if match := re.fullmatch(r"(?:transition|proj)\.(\w+)", name):
        return f"project.{match[1]}"
    if match := re.fullmatch(r"stem\.0\.(\w+)", name):
        return f"stem.{match[1]}"
    match = re.fullmatch(r"stage\.(\d+)\.(?:(.+)\.)?(\w+)", name)
    if match is None:
        return None
    stage, inside, leaf = int(match[1]), match[2] or "", match[3]
    if kind == "densenet":
        return _dense_name(stage, inside, leaf, normed)
    if kind == "non-local":
        block, step = divmod(stage, 4)
        if step < 2 and not inside:
            return f"blocks.{block}.halve.{('conv', 'norm')[step]}.{leaf}"
        stage = block
    ours = _INSIDE[kind].get(inside)
    return None if ours is None else f"blocks.{stage}.{ours}.{leaf}"


def _dense_name(stage: int, inside: str, leaf: str, normed: bool) -> str | None:
    """Return our name: even stages have the layers, odd ones the transitions."""
    block, between = divmod(stage, 2)
    if between:
        ours = {"norm": "norm", "conv": "narrow"}.get(inside)
        return None if ours is None else f"blocks.{block}.{ours}.{leaf}"
    match = re.fullmatch(r"denselayer(\d+)\.(\w+)", inside)
    ours = _INSIDE["densenet"].get(match[2]) if match else None
    if match is None or ours is None:
        return None
    conv = ".conv" if normed and ours == "narrow" else ""
    return f"blocks.{block}.layers.{int(match[1]) - 1}.{ours}{conv}.{leaf}"


HEADS = {240: 4, 384: 6, 528: 8}  # of SoT-Tiny, -Small, -Base, by width


def convert(official: Official) -> Converted:
    """Read a SoT; --config takes the authors' dictionary for what the tensors do not tell.

    Raises: SaccadeError if the file is not a SoT, or a part of it is unknown.
    Source: the authors' SoT at commit 5da3c37e.
    """
    reading = Reading(official.path, official.tensors)
    positions = reading.shape("pos_embed")[1]
    if positions != 1 + GRID * GRID:
        raise SaccadeError(
            f"{official.path}: pos_embed is for {positions} tokens, expected {1 + GRID * GRID} as "
            "in every SoT. Convert a ViT or DeiT with SOURCE 'vit' or 'deit'."
        )
    fields = {"position": "sinusoid"} | block_fields(reading)
    fields["heads"] = _heads(official, fields["dim"])
    fields |= read_embedding(reading, "visual_tokens.tokens.", official.config)
    measured = {
        "ViTConfig.embed_dim": fields["dim"],
        "ViTConfig.depth": fields["layers"],
        "in_chans": fields["channels"],
        "img_size": fields["height_px"],
    }
    stated = {name: (hint(official.config, *name.split(".")), measured[name]) for name in measured}
    check_stated(official.path, stated)
    head, notes = read_head(reading, "classifier.", fields["dim"], official.config)
    reading.rename((*BLOCK, (r"norm\.(weight|bias)", r"trunk.norm.\1")))
    take_specials(reading, ("cls_token",), "pos_embed")
    config = imagenet(fields | head)
    return converted(official, reading, config, authors_images("sot", config), notes)


def imagenet(fields: dict[str, object]) -> SoTConfig:
    """Return the configuration with ImageNet's mean and std (averaged for gray images)."""
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    if fields["channels"] == 1:
        mean, std = (sum(mean) / 3,), (sum(std) / 3,)  # type: ignore[assignment]
    return SoTConfig.from_dict({"mean": mean, "std": std} | fields)


def converted(
    official: Official,
    reading: Reading,
    config: SoTConfig,
    images: AuthorsImages,
    notes: tuple[str, ...],
) -> Converted:
    """Return the result of a converter of this family."""
    exact = None
    if config.second_order and config.normalization == "svpn-fast" and config.svpn_epsilon:
        exact = replace(config, svpn_epsilon=0.0)
    return reading.converted(official, "sot", config, images, notes, exact)


def _heads(official: Official, dim: int) -> int:
    given = hint(official.config, "ViTConfig", "num_heads", default=HEADS.get(dim))
    if given is None:
        raise SaccadeError(
            f"{official.path}: tokens have width {dim}, unlike SoT-Tiny, -Small and -Base, and the "
            "number of attention heads is not in the file. Pass it with --config: "
            '{"ViTConfig": {"num_heads": 4}}.'
        )
    return whole_number(given, "ViTConfig.num_heads")
