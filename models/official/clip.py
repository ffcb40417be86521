# SPDX-License-Identifier: Apache-2.0
"""OpenCLIP checkpoints: configuration from shapes and JSON, tensors under our names."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.models.official.conversion import Row
from saccade.models.official.given_files import check_stated, whole_number
from saccade.models.sparo.config import SparoConfig

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = {
    "norm_attention": "ln_1",
    "attention.out": "attn.out_proj",
    "norm_mlp": "ln_2",
    "widen": "mlp.c_fc",
    "narrow": "mlp.c_proj",
}
TIED = "a copy of the keys' projection, with which the values share it"


def same(x: "Tensor") -> "Tensor":
    """Return the tensor unchanged."""
    return x


def transposed(x: "Tensor") -> "Tensor":
    """Turn a matrix that multiplies from the right into a linear layer's."""
    return x.T


def layer(ours: str, theirs: str) -> Iterator[Row]:
    """Yield the rows of a layer's weight and bias."""
    for name in ("weight", "bias"):
        yield f"{ours}.{name}", f"{theirs}.{name}", same


def blocks(ours: str, theirs: str, count: int) -> Iterator[Row]:
    """Yield the rows of a transformer's blocks; in_proj has queries, keys, values in our order."""
    for i in range(count):
        for name, other in BLOCK.items():
            yield from layer(f"{ours}.{i}.{name}", f"{theirs}.{i}.{other}")
        for name in ("weight", "bias"):
            qkv = f"{ours}.{i}.attention.qkv.{name}"
            yield qkv, f"{theirs}.{i}.attn.in_proj_{name}", same


def read_out(ours: str, theirs: str, config: SparoConfig, tower: str) -> Iterator[Row]:
    """Yield the rows of a read-out; its queries are numbered head by head, like our slots."""
    if tower == "image" or not config.share_queries:
        width = config.read_out(tower).attn_dim
        yield f"{ours}.query", f"{theirs}.q_emb", lambda x: x.reshape(-1, width)
    yield from layer(f"{ours}.key", f"{theirs}.k")
    if not config.share_kv:
        yield from layer(f"{ours}.value", f"{theirs}.v")
    yield from layer(f"{ours}.project", f"{theirs}.proj")


def towers(config: SparoConfig, text: str) -> Iterator[Row]:
    """Yield the rows of every tensor of a CLIP; `text` is the prefix of the text tower's names."""
    yield "logit_scale", "logit_scale", lambda x: x.reshape(())
    yield "image.class_token", "visual.class_embedding", same
    yield "image.position", "visual.positional_embedding", same
    yield "image.patches.weight", "visual.conv1.weight", same
    yield from layer("image.norm_input", "visual.ln_pre")
    depth = config.image_layers - config.reduce_depth
    yield from blocks("image.blocks", "visual.transformer.resblocks", depth)
    yield "text.embedding.weight", f"{text}token_embedding.weight", same
    yield "text.position", f"{text}positional_embedding", same
    depth = config.text_layers - config.reduce_depth
    yield from blocks("text.blocks", f"{text}transformer.resblocks", depth)
    if config.pooling == "codebook":
        yield "codebook", "space_dict", same
        for ours, theirs in (("image_pool", "img"), ("text_pool", "txt")):
            yield from _query_map(f"{ours}.map", f"{theirs}_query_model.q_map")
        yield from _bottleneck(config)
        return
    yield from layer("image_pool.norm", "visual.ln_post")
    yield from layer("text_pool.norm", f"{text}ln_final")
    if config.pooling == "sparo":
        yield from read_out("image_pool.read_out", "visual.sparo", config, "image")
        yield from read_out("text_pool.read_out", "text_sparo", config, "text")
        return
    yield "image_pool.project.weight", "visual.proj", transposed
    yield "text_pool.project.weight", f"{text}text_projection", transposed
    if config.pooling == "attention":
        separate = config.image_width != config.feature_dim
        yield from _attention("image_pool", "visual.attn_pool", separate)
    if config.pools_by_attention("text"):
        separate = config.text_width != config.feature_dim
        yield from _attention("text_pool", f"{text}text_attn_pool", separate)
    yield from _bottleneck(config)


def _bottleneck(config: SparoConfig) -> Iterator[Row]:
    if config.bottleneck_dim:
        yield from layer("image_pool.widen", "vision_bottleproj")
        yield from layer("text_pool.widen", "text_bottleproj")


def is_copy(first: "Tensor", second: "Tensor") -> bool:
    """Return True if two tensors of a file are equal."""
    import torch

    return first is second or (first.shape == second.shape and torch.equal(first, second))


def _query_map(ours: str, theirs: str) -> Iterator[Row]:
    for name, place in (("norm", 0), ("first", 1), ("norm_hidden", 3), ("second", 4)):
        yield from layer(f"{ours}.{name}", f"{theirs}.{place}")


def _attention(ours: str, theirs: str, separate: bool) -> Iterator[Row]:
    yield f"{ours}.query", f"{theirs}.query", same
    yield from layer(f"{ours}.norm_query", f"{theirs}.ln_q")
    yield from layer(f"{ours}.norm_tokens", f"{theirs}.ln_k")
    for i, name in enumerate("qkv"):
        if separate:
            yield f"{ours}.{name}.weight", f"{theirs}.attn.{name}_proj_weight", same
        else:
            yield f"{ours}.{name}.weight", f"{theirs}.attn.in_proj_weight", third(i)
        yield f"{ours}.{name}.bias", f"{theirs}.attn.in_proj_bias", third(i)
    yield from layer(f"{ours}.out", f"{theirs}.attn.out_proj")


def third(i: int) -> "Callable[[Tensor], Tensor]":
    """Return the function that takes the queries (0), keys (1) or values (2) of all three."""
    return lambda x: x.chunk(3)[i]


CLIP_VOCABULARY = 49408
# Widths at which all of the project's models have heads of 64 channels.
_SAFE_WIDTHS = (384, 512, 768, 1024)
_UNREAD = ("hf_model_name", "timm_model_name")


def model_json(path: str, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the model's part of an OpenCLIP JSON, also if it is under `model_cfg`.

    Raises: SaccadeError if it names towers that are not supported.
    """
    content = dict(config or {})
    content = dict(content.get("model_cfg", content))
    for name in ("vision_cfg", "text_cfg"):
        tower = content.get(name) or {}
        if not isinstance(tower, Mapping):
            raise SaccadeError(
                f"--config: {name} is {tower!r:.60}, expected an object. Pass the JSON of an "
                "OpenCLIP model."
            )
        tower = dict(tower)
        content[name] = tower
        if unread := [key for key in _UNREAD if tower.get(key)]:
            raise SaccadeError(
                f"{path}: {name} has {unread[0]} {tower[unread[0]]!r}, but only OpenCLIP's own "
                "vision and text transformers are supported. Convert a ViT model."
            )
    return content


class Shapes:
    """The shapes of a CLIP, read from its tensors.

    Raises: SaccadeError if they do not fit a vision transformer with a text tower.
    """

    def __init__(self, path: str, tensors: "Mapping[str, Tensor]") -> None:
        self.path, self.tensors = path, tensors
        self.text = "text." if "text.token_embedding.weight" in tensors else ""
        self.patches = self._shape("visual.conv1.weight", 4)
        self.positions = self._shape("visual.positional_embedding", 2)
        self.embedding = self._shape(f"{self.text}token_embedding.weight", 2)
        self.context = self._shape(f"{self.text}positional_embedding", 2)

    def _shape(self, key: str, rank: int) -> tuple[int, ...]:
        if key not in self.tensors or self.tensors[key].dim() != rank:
            shape = tuple(self.tensors[key].shape) if key in self.tensors else "nothing"
            raise SaccadeError(
                f"{self.path}: {key} should be a tensor with {rank} axes, found {shape}. "
                "Expected an OpenCLIP checkpoint with a vision transformer. For another kind of "
                "file, choose another SOURCE of saccade convert."
            )
        return tuple(self.tensors[key].shape)

    def depth(self, prefix: str) -> int:
        """Return the number of blocks under a prefix."""
        pattern = re.compile(re.escape(prefix) + r"transformer\.resblocks\.(\d+)\.")
        return len({m.group(1) for key in self.tensors if (m := pattern.match(key))})

    def hidden(self, prefix: str, width: int) -> int:
        """Return the width of the blocks' MLP."""
        key = f"{prefix}transformer.resblocks.0.mlp.c_fc.weight"
        return self.tensors[key].shape[0] if key in self.tensors else 4 * width

    def fields(self) -> dict[str, Any]:
        """Return the fields of SparoConfig that the shapes of both towers decide."""
        width, channels, patch, _ = self.patches
        side = math.isqrt(self.positions[0] - 1)
        text_width = self.embedding[1]
        fields: dict[str, Any] = {
            "height_px": side * patch,
            "width_px": side * patch,
            "channels": channels,
            "patch_px": patch,
            "image_width": width,
            "image_layers": self.depth("visual."),
            "image_hidden": self.hidden("visual.", width),
            "vocabulary": self.embedding[0],
            "tokenizer": "clip" if self.embedding[0] == CLIP_VOCABULARY else "custom",
            "context_length": self.context[0],
            "text_width": text_width,
            "text_layers": self.depth(self.text),
            "text_hidden": self.hidden(self.text, text_width),
        }
        if "visual.proj" in self.tensors:
            fields["embed_dim"] = self.tensors["visual.proj"].shape[1]
        return fields


def tower_fields(path: str, shapes: Shapes, json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of both towers; shapes in the JSON must agree with the file.

    Raises: SaccadeError if the JSON contradicts the file, or the heads are unknown.
    """
    vision, text = json["vision_cfg"], json["text_cfg"]
    fields = shapes.fields()
    cut = whole_number(json.get("reduce_depth") or 0, "reduce_depth", least=0)
    stated = {
        "vision_cfg.image_size": (vision.get("image_size"), fields["height_px"]),
        "vision_cfg.patch_size": (vision.get("patch_size"), fields["patch_px"]),
        "vision_cfg.width": (vision.get("width"), fields["image_width"]),
        "vision_cfg.layers": (vision.get("layers"), fields["image_layers"] + cut),
        "text_cfg.width": (text.get("width"), fields["text_width"]),
        "text_cfg.layers": (text.get("layers"), fields["text_layers"] + cut),
        "text_cfg.vocab_size": (text.get("vocab_size"), fields["vocabulary"]),
        "text_cfg.context_length": (text.get("context_length"), fields["context_length"]),
    }
    check_stated(path, stated)
    width = fields["image_width"]
    head_width = whole_number(vision.get("head_width", 64), "vision_cfg.head_width")
    text_heads = whole_number(
        text.get("heads", max(1, fields["text_width"] // 64)), "text_cfg.heads"
    )
    if "width" not in vision and "head_width" not in vision:
        _require_safe(path, width, "vision_cfg.head_width")
    if "heads" not in text:
        _require_safe(path, fields["text_width"], "text_cfg.heads")
    if text.get("hf_tokenizer_name"):
        fields["tokenizer"] = "custom"
    return fields | {
        "image_layers": fields["image_layers"] + cut,
        "text_layers": fields["text_layers"] + cut,
        "reduce_depth": cut,
        "image_heads": max(1, width // head_width),
        "text_heads": text_heads,
        "activation": "quick_gelu" if json.get("quick_gelu") else "gelu",
    }


def _require_safe(path: str, width: int, name: str) -> None:
    if width not in _SAFE_WIDTHS:
        raise SaccadeError(
            f"{path}: a tower has width {width}, and the number of its heads is not in the "
            f"tensors. Pass {name} in the JSON of --config."
        )


def pooling_fields(
    path: str, tensors: "Mapping[str, Tensor]", json: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of pooling without slots.

    Raises: SaccadeError if the JSON contradicts the file, or averages a text's tokens.
    """
    fields: dict[str, Any] = {}
    stated: dict[str, tuple[Any, Any]] = {}
    if "space_dict" in tensors:
        codes, dim = tensors["space_dict"].shape
        fields = {"pooling": "codebook", "codes": codes, "embed_dim": dim}
        stated["num_codes"] = json.get("num_codes"), codes
    else:
        fields = _state_fields(path, tensors, json)
    wide = tensors.get("vision_bottleproj.weight")
    if wide is not None:
        fields["embed_dim"], fields["bottleneck_dim"] = wide.shape
    stated["bottleneck_dim"] = json.get("bottleneck_dim"), fields.get("bottleneck_dim", 0)
    if "embed_dim" in fields:
        stated["embed_dim"] = json.get("embed_dim"), fields["embed_dim"]
    check_stated(path, stated)
    return fields


def _state_fields(
    path: str, tensors: "Mapping[str, Tensor]", json: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a class token, a mean or attentional poolers, per tower."""
    vision, text = json["vision_cfg"], json["text_cfg"]
    fields: dict[str, Any] = {"pooling": "gap" if vision.get("global_average_pool") else "cls"}
    if "text_attn_pool.query" in tensors:
        fields["text_pooling"] = "attention"
        fields |= _pooler(path, tensors["text_attn_pool.query"], text, "text_cfg", "text_")
    elif text.get("global_average_pool"):
        raise SaccadeError(
            f"{path}: text_cfg has global_average_pool without an attentional pooler (no "
            "text_attn_pool.query), which OpenCLIP does not define. Pass the JSON of this model."
        )
    if "visual.attn_pool.query" in tensors:
        fields["pooling"] = "attention"
        fields.setdefault("text_pooling", "eos")
        fields |= _pooler(path, tensors["visual.attn_pool.query"], vision, "vision_cfg", "")
    return fields


def _pooler(
    path: str, query: "Tensor", tower: Mapping[str, Any], name: str, prefix: str
) -> dict[str, Any]:
    check_stated(path, {f"{name}.n_queries": (tower.get("n_queries"), query.shape[0])})
    heads = whole_number(tower.get("attn_pooler_heads", 8), f"{name}.attn_pooler_heads")
    return {
        f"{prefix}queries": query.shape[0],
        f"{prefix}pooler_heads": heads,
        f"{prefix}mean_of_queries": bool(tower.get("global_average_pool")),
    }


def clip_config(shapes: Shapes, json: Mapping[str, Any], pooling: Mapping[str, Any]) -> SparoConfig:
    """Return the configuration of both towers and their pooling.

    Raises: SaccadeError if the JSON contradicts the file, or a field is out of range.
    """
    return SparoConfig(**(tower_fields(shapes.path, shapes, json) | dict(pooling)))
