# SPDX-License-Identifier: Apache-2.0
"""OpenCLIP's tensors under our names: blocks, towers, read-outs and the other pools."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from saccade.models.sparo.config import SparoConfig

if TYPE_CHECKING:
    from torch import Tensor

# Our name, the name in the file, what is done to the tensor.
Row = tuple[str, str, "Callable[[Tensor], Tensor]"]
BLOCK = {
    "norm_attention": "ln_1",
    "attention.out": "attn.out_proj",
    "norm_mlp": "ln_2",
    "widen": "mlp.c_fc",
    "narrow": "mlp.c_proj",
}
TIED = "a copy of the keys' projection, with which the values share it"


def same(x: "Tensor") -> "Tensor":
    """As it is."""
    return x


def transposed(x: "Tensor") -> "Tensor":
    """A matrix that multiplies from the right, as a linear layer's."""
    return x.T


def layer(ours: str, theirs: str) -> Iterator[Row]:
    """Weight and bias."""
    for name in ("weight", "bias"):
        yield f"{ours}.{name}", f"{theirs}.{name}", same


def blocks(ours: str, theirs: str, count: int) -> Iterator[Row]:
    """The transformer's blocks; in_proj already has queries, keys, values in our order."""
    for i in range(count):
        for name, other in BLOCK.items():
            yield from layer(f"{ours}.{i}.{name}", f"{theirs}.{i}.{other}")
        for name in ("weight", "bias"):
            qkv = f"{ours}.{i}.attention.qkv.{name}"
            yield qkv, f"{theirs}.{i}.attn.in_proj_{name}", same


def read_out(ours: str, theirs: str, config: SparoConfig, tower: str) -> Iterator[Row]:
    """A read-out; its queries are numbered head by head, as our slots are."""
    if tower == "image" or not config.share_queries:
        width = config.read_out(tower).attn_dim
        yield f"{ours}.query", f"{theirs}.q_emb", lambda x: x.reshape(-1, width)
    yield from layer(f"{ours}.key", f"{theirs}.k")
    if not config.share_kv:
        yield from layer(f"{ours}.value", f"{theirs}.v")
    yield from layer(f"{ours}.project", f"{theirs}.proj")


def towers(config: SparoConfig, text: str) -> Iterator[Row]:
    """Every tensor of a CLIP; `text` is what stands in front of the text tower's names."""
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
        yield from _attention("image_pool", "visual.attn_pool", config.feature_dim, separate)
    if config.pools_by_attention("text"):
        separate = config.text_width != config.feature_dim
        yield from _attention("text_pool", f"{text}text_attn_pool", config.feature_dim, separate)
    yield from _bottleneck(config)


def _bottleneck(config: SparoConfig) -> Iterator[Row]:
    if config.bottleneck_dim:
        yield from layer("image_pool.widen", "vision_bottleproj")
        yield from layer("text_pool.widen", "text_bottleproj")


def is_copy(first: "Tensor", second: "Tensor") -> bool:
    """Whether two tensors of a file are one and the same."""
    import torch

    return first is second or (first.shape == second.shape and torch.equal(first, second))


def _query_map(ours: str, theirs: str) -> Iterator[Row]:
    for name, place in (("norm", 0), ("first", 1), ("norm_hidden", 3), ("second", 4)):
        yield from layer(f"{ours}.{name}", f"{theirs}.{place}")


def _attention(ours: str, theirs: str, width: int, separate: bool) -> Iterator[Row]:
    yield f"{ours}.query", f"{theirs}.query", same
    yield from layer(f"{ours}.norm_query", f"{theirs}.ln_q")
    yield from layer(f"{ours}.norm_tokens", f"{theirs}.ln_k")
    for i, name in enumerate("qkv"):
        third = _third(i, width)
        if separate:
            yield f"{ours}.{name}.weight", f"{theirs}.attn.{name}_proj_weight", same
        else:
            yield f"{ours}.{name}.weight", f"{theirs}.attn.in_proj_weight", third
        yield f"{ours}.{name}.bias", f"{theirs}.attn.in_proj_bias", third
    yield from layer(f"{ours}.out", f"{theirs}.attn.out_proj")


def _third(i: int, width: int) -> "Callable[[Tensor], Tensor]":
    return lambda x: x[i * width : (i + 1) * width]


def collected(
    rows: Iterator[Row], tensors: "Mapping[str, Tensor]"
) -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Our weights as far as the file has them, and the names of all that were looked for."""
    weights, names = {}, {}
    for ours, theirs, made in rows:
        names[ours] = theirs
        if theirs in tensors:
            weights[ours] = made(tensors[theirs]).float().contiguous()
    return weights, names
