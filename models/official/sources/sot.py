# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the SoT authors: every token embedding, and the second-order head of any trunk.

Source: the authors' SoT at commit 5da3c37e, Classifier and OnlyVisualTokensClassifier of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count
from saccade.models.official.authors_images import authors_images
from saccade.models.official.conversion import Conversion, Original, Reading
from saccade.models.official.json_files import at, check_stated, declared
from saccade.models.official.sources.timm import VIT_BLOCKS, block_fields, classifier, token_rows
from saccade.models.official.tables import Row, Rows, rows_of
from saccade.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from saccade.models.sot.config import AUTHORS, SoTConfig

FUSIONS = {"sum_fc": "sum", "sum_loss": "late", "concat": "concat", "aggre_all": "aggr-all"}
NORMS = {"svPN": "svpn-fast", "sqrt_d": "scale", "sqrt_t": "scale-learned", "ePN": "epn"}
NORMS |= {"LN": "layer-norm", "": "none", "none": "none"}


_CONFIG = "representationConfig"
_NORMALIZATION = f"{_CONFIG}.args.normalization"


@dataclass(frozen=True)
class HeadJson:
    """What is read of the authors' representationConfig."""

    fusion_type: str | None = at(f"{_CONFIG}.fusion_type", None)
    pool_heads: Count | None = at(f"{_CONFIG}.args.num_heads", None)
    normalization: str | None = at(f"{_NORMALIZATION}.type", "missing")
    singular_values: int | None = at(f"{_NORMALIZATION}.svNum", 1)
    alpha: float = at(f"{_NORMALIZATION}.alpha", 0.5)
    iterations: int = at(f"{_NORMALIZATION}.iterNum", 1)

    @property
    def power(self) -> dict[str, Any]:
        """The fields of svPN."""
        steps = {"singular_values": self.singular_values or 0, "iterations": self.iterations}
        return {"alpha": self.alpha, **steps}


@dataclass(frozen=True)
class SoTJson(HeadJson):
    """The authors' dictionary; `Any` is only compared with the tensors."""

    embed_dim: Any = at("ViTConfig.embed_dim", ours="dim")
    depth: Any = at("ViTConfig.depth", ours="layers")
    num_heads: Count | None = at("ViTConfig.num_heads", None)
    in_chans: Any = at("in_chans", ours="channels")
    img_size: Any = at("img_size", ours="height_px")


JSON = SoTJson
GRID = 14  # tokens per side, in all of the authors' models
HEADS = {240: 4, 384: 6, 528: 8}  # of SoT-Tiny, -Small, -Base, by width


class _Embedding(NamedTuple):
    """One of the five token embeddings."""

    mark: str  # a tensor that only this one has
    blocks: Mapping[str, str] = {}  # their layers by ours


def _normed(names: Mapping[str, str], conv: str = "conv", norm: str = "bn") -> dict[str, str]:
    """Return the names of convolutions with their norms, by the beginnings of our names."""
    parts = {"conv": conv, "norm": norm}
    return {
        f"blocks.#.{ours}.{part}.*": f"stage.#.{theirs.replace('@', name)}.*"
        for ours, theirs in names.items()
        for part, name in parts.items()
    }


_EMBEDDINGS = {
    "densenet": _Embedding("stage.0.denselayer1.conv1.weight"),
    "resnet": _Embedding(
        "stage.0.conv1.weight",
        _normed({"first": "@1", "second": "@2", "third": "@3"})
        | _normed({"shortcut": "downsample.@"}, "0", "1"),
    ),
    "inception": _Embedding(
        "stage.0.branch0.conv.weight",
        _normed(
            {
                "one": "branch0.@",
                "three_narrow": "branch1.0.@",
                "three": "branch1.1.@",
                "five_narrow": "branch2.0.@",
                "five": "branch2.1.@",
                "largest": "branch3.1.@",
            }
        ),
    ),
    "non-local": _Embedding("stage.3.theta.0.weight"),
    "naive": _Embedding("proj.weight"),
}
_NON_LOCAL = {
    f"{ours}.{part}.*": f"{theirs}.{place}.*"
    for ours, theirs in {
        "query": "theta",
        "key": "phi",
        "value": "g",
        "shortcut": "shortcut",
    }.items()
    for part, place in (("conv", 0), ("norm", 1))
} | {"widen.*": "W.*", "norm.*": "bn_norm.*"}
_BLOCKS = range(3)  # of every embedding but the naive one


def _embedding_rows(kind: str, prefix: str, normed: bool) -> Rows:
    """Return the rows of a token embedding; `normed` dense layers have one more batch norm."""
    names = dict(_EMBEDDINGS[kind].blocks)
    for block in _BLOCKS if kind == "densenet" else ():
        ours, theirs = f"blocks.{block}.layers.#.", f"stage.{2 * block}.denselayer#+1."
        conv = "narrow.conv.*" if normed else "narrow.*"
        names |= {f"{ours}norm.*": f"{theirs}norm1.*", f"{ours}{conv}": f"{theirs}conv1.*"}
        names |= {f"{ours}narrow.norm.*": f"{theirs}norm2.*", f"{ours}grow.*": f"{theirs}conv2.*"}
        between = {"norm.*": "norm.*", "narrow.*": "conv.*"}
        names |= {f"blocks.{block}.{a}": f"stage.{2 * block + 1}.{b}" for a, b in between.items()}
    for block in _BLOCKS if kind == "non-local" else ():
        halves = {"halve.conv.*": f"{4 * block}.*", "halve.norm.*": f"{4 * block + 1}.*"}
        halves |= {ours: f"{4 * block + 3}.{theirs}" for ours, theirs in _NON_LOCAL.items()}
        names |= {f"blocks.{block}.{ours}": f"stage.{theirs}" for ours, theirs in halves.items()}
    names |= {"stem.*": "stem.0.*"}
    last = (Row("trunk.embed.project.*", f"{prefix}{name}.*") for name in ("transition", "proj"))
    return (*rows_of("trunk.embed.", prefix, names), *last)


def read_embedding(reading: Reading, prefix: str, img_size: Any) -> dict[str, Any]:
    """Return the fields of the token embedding, and take its tensors.

    Raises: SaccadeError if it is none of the five, or --config has an impossible image size.
    """
    kinds = (kind for kind, own in _EMBEDDINGS.items() if prefix + own.mark in reading.tensors)
    kind = next(kinds, None)
    if kind is None:
        raise SaccadeError(
            f"{reading.path}: none of SoT's five token embeddings is under {prefix!r}. "
            "Choose the SOURCE that wrote this file (saccade inspect names it if it is known)."
        )
    normed = f"{prefix}stage.0.denselayer1.norm1.weight" in reading.tensors
    reading.take(_embedding_rows(kind, prefix, normed))
    first = "proj.weight" if kind == "naive" else "stem.0.weight"
    side = _side_px(reading, prefix, kind, img_size)
    return {
        "token_embedding": kind,
        "dense_norm": normed,
        "channels": reading.shape(prefix + first)[1],
        "height_px": side,
        "width_px": side,
        "patch_px": side // GRID,
    }


def _side_px(reading: Reading, prefix: str, kind: str, img_size: Any) -> int:
    """Return the image's side: from the tensors if they tell it, else from --config, else 224."""
    if kind == "naive":
        return GRID * reading.shape(prefix + "proj.weight")[2]
    if kind == "non-local":
        return 8 * GRID
    if kind == "resnet":
        # The last block has a convolution in its shortcut only if it halves the grid.
        halves = f"{prefix}stage.2.downsample.0.weight" in reading.tensors
        return (16 if halves else 8) * GRID
    side = 16 * GRID if img_size is None else img_size
    if side not in (8 * GRID, 16 * GRID):
        raise SaccadeError(
            f"--config: img_size is {side!r}, expected {8 * GRID} or {16 * GRID}, for which the "
            f"authors' {kind} embedding gives {GRID} x {GRID} tokens."
        )
    return int(side)


def convert(official: Original) -> Conversion:
    """Read a SoT; --config takes the authors' dictionary for what the tensors do not tell.

    Raises: SaccadeError if the file is not a SoT, or a part of it is unknown.
    """
    reading, json = (Reading(official.path, official.tensors), declared(SoTJson, official.config))
    positions = reading.shape("pos_embed", 3)[1]
    if positions != 1 + GRID * GRID:
        raise SaccadeError(
            f"{official.path}: pos_embed is for {positions} tokens, expected {1 + GRID * GRID} as "
            "in every SoT. Convert a ViT or DeiT with SOURCE 'vit' or 'deit'."
        )
    fields = {"position": "sinusoid"} | block_fields(reading)
    fields["heads"] = json.num_heads or HEADS.get(fields["dim"])
    if fields["heads"] is None:
        raise SaccadeError(
            f"{official.path}: tokens have width {fields['dim']}, unlike SoT-Tiny, -Small and "
            "-Base, and the number of attention heads is not in the file. Pass it with --config: "
            '{"ViTConfig": {"num_heads": 4}}.'
        )
    fields |= read_embedding(reading, "visual_tokens.tokens.", json.img_size)
    check_stated(official.path, json, fields)
    head, notes = read_head(reading, "classifier.", fields["dim"], json)
    reading.take((*VIT_BLOCKS, Row("trunk.norm.*", "norm.*")))
    reading.take(token_rows(("cls_token",), "pos_embed"))
    config = imagenet(fields | head)
    return classifier(official, reading, config, authors_images("sot", config), notes)


def imagenet(fields: dict[str, object]) -> SoTConfig:
    """Return the configuration with ImageNet's mean and std (averaged for gray images)."""
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    if fields["channels"] == 1:
        mean, std = (sum(mean) / 3,), (sum(std) / 3,)  # type: ignore[assignment]
    return SoTConfig.from_dict({"mean": mean, "std": std} | fields)


def head_place(reading: Reading) -> str | None:
    """Return the prefix under which a file has a classifier of word tokens, if it has one."""
    places = ("classifier.", "head.", "")
    return next((p for p in places if f"{p}visual_fc.weight" in reading.tensors), None)


def read_head(
    reading: Reading, prefix: str, width: int, json: HeadJson
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of the head under `prefix`, and notes; its tensors are taken.

    Raises: SaccadeError naming what --config has to add, if the tensors do not tell it.
    """
    head = _Head(reading, prefix, width, json)
    fields = AUTHORS | head.fields()
    # An exponent's LayerNorm has a weight too; a weight alone is the power iteration's start.
    start = "start" if fields["normalization"] == "svpn-fast" else "weight"
    if fields["fusion"] not in ("sum", "late", "class"):
        own = rf"{prefix.replace('.', '[.]')}cls_fc\.(weight|bias)"
        reading.ignore(own, f"{fields['fusion']} fusion does not use it")
    names = {
        "pool.project.*": "representation.wr.*",
        "pool.norm.bias": "representation.norm.bias",
        "pool.norm.factor": "representation.norm.factor",
        f"pool.norm.{start}": "representation.norm.weight",
        "pool.reduce.*": "dr.*",
        "word_fc.*": "visual_fc.*",
        "class_projection.*": "dim.*",
        "class_fc.*": "cls_fc.*",
    }
    reading.take(rows_of("head.", prefix, names))
    return fields, tuple(head.notes)


class _Head:
    def __init__(self, reading: Reading, prefix: str, width: int, json: HeadJson) -> None:
        self.reading, self.prefix, self.width, self.json = reading, prefix, width, json
        self.notes: list[str] = []

    def has(self, name: str) -> bool:
        return self.prefix + name in self.reading.tensors

    def size(self, name: str, axis: int) -> int:
        return self.reading.shape(self.prefix + name)[axis]

    def fields(self) -> dict[str, Any]:
        if not self.has("visual_fc.weight"):
            projected = self.size("dim.weight", 0) if self.has("dim.weight") else 0
            classes = self.size("cls_fc.weight", 0)
            return {"fusion": "class", "class_projection": projected, "classes": classes}
        fields: dict[str, Any] = {"classes": self.size("visual_fc.weight", 0)}
        incoming = self.size("visual_fc.weight", 1)
        if self.has("representation.wr.weight"):
            fields |= {"pooling": "mgcrp"} | self._normalization()
            heads, side = self._heads(incoming)
            pooled = heads * side * side
            fields |= {"pool_heads": heads, "m": side, "n": side}
            fields["pool_bias"] = self.has("representation.wr.bias")
        elif self.has("dr.weight"):
            reduced = self.size("dr.weight", 0)
            pooled = reduced * (reduced + 1) // 2
            fields |= {"pooling": "gcp", "gcp_dim": reduced}
        else:
            pooled = self.width
            fields |= {"pooling": "gap"}
        fields["fusion"] = self._fusion(incoming, pooled)
        return fields

    def _normalization(self) -> dict[str, Any]:
        json = self.json
        if self.has("representation.norm.factor"):
            return {"normalization": "scale-learned"}
        if self.has("representation.norm.bias"):
            return {"normalization": "layer-norm"}
        if not self.has("representation.norm.weight"):
            return {"normalization": self._silent(), "learned_start": False} | json.power
        if json.normalization == "missing" and json.power == HeadJson().power:
            self.notes.append("svPN: alpha 0.5, one singular value, one iteration (as released)")
        return {"normalization": "svpn-fast", "learned_start": True} | json.power

    def _silent(self) -> str:
        kind = self.json.normalization or ""
        if kind not in NORMS:
            raise SaccadeError(
                f"{self.reading.path}: the normalization of the cross-covariances has no tensors, "
                "so the file does not tell which it is. Pass it with --config: "
                '{"representationConfig": {"args": {"normalization": {"type": "sqrt_d"}}}}, where '
                "the type is svPN, sqrt_d, ePN or none."
            )
        return NORMS[kind]

    def _heads(self, incoming: int) -> tuple[int, int]:
        rows, given = self.size("representation.wr.weight", 0), self.json.pool_heads
        if given is not None:
            sides = {rows / (2 * given)}
        elif self.has("representation.norm.weight"):
            sides = {float(self.size("representation.norm.weight", 0))}
        else:
            # rows = 2 h m; incoming is h m^2, or with concat h m^2 + the token's width.
            sides = {2 * width / rows for width in (incoming, incoming - self.width)}
        whole = [int(side) for side in sides if side >= 1 and side == int(side)]
        whole = [side for side in whole if rows % (2 * side) == 0]
        if len(whole) != 1:
            said = f" by num_heads {given}, expected a multiple of {2 * given}" if given else ""
            raise SaccadeError(
                f"{self.reading.path}: the file does not tell how the {rows} rows of "
                f"{self.prefix}representation.wr are divided into heads{said}. Pass the JSON of "
                'this model with --config: {"representationConfig": {"args": {"num_heads": 6}}}.'
            )
        return rows // (2 * whole[0]), whole[0]

    def _fusion(self, incoming: int, pooled: int) -> str:
        if not self.has("cls_fc.weight"):
            return "visual"
        if incoming == pooled + self.width:
            return "concat"
        if incoming != pooled:
            raise SaccadeError(
                f"{self.reading.path}: {self.prefix}visual_fc takes {incoming} numbers, expected "
                f"{pooled} (pooled) or {pooled + self.width} (concat). The head and the trunk come "
                "from different models. Export the checkpoint again."
            )
        kind = self.json.fusion_type
        if kind is None:
            self.notes.append(
                "fusion: sum_fc, as released; sum_loss and aggre_all have the same tensors "
                '(--config {"representationConfig": {"fusion_type": ...}})'
            )
            return "sum"
        if kind not in FUSIONS or kind == "concat":
            expected = "sum_fc, sum_loss or aggre_all"
            raise SaccadeError(f"--config: fusion_type is {kind!r}, expected {expected}.")
        return FUSIONS[kind]
