# SPDX-License-Identifier: Apache-2.0
"""timm's names of a transformer's tensors, also where a file has torchvision's."""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from saccade.errors import SaccadeError
from saccade.models.official.conversion import Official, Reading
from saccade.models.official.given_files import whole_number

if TYPE_CHECKING:
    pass

_VIT = (
    (r"class_token", "cls_token"),
    (r"encoder\.pos_embedding", "pos_embed"),
    (r"conv_proj\.(.+)", r"patch_embed.proj.\1"),
    (r"encoder\.ln\.(.+)", r"norm.\1"),
    (r"heads\.head\.(.+)", r"head.\1"),
    (r"heads\.pre_logits\.(.+)", r"pre_logits.fc.\1"),
    *(
        (rf"encoder\.layers\.encoder_layer_(\d+)\.{theirs}", rf"blocks.\1.{ours}")
        for theirs, ours in (
            (r"ln_1\.(.+)", r"norm1.\2"),
            (r"self_attention\.in_proj_(.+)", r"attn.qkv.\2"),
            (r"self_attention\.out_proj\.(.+)", r"attn.proj.\2"),
            (r"ln_2\.(.+)", r"norm2.\2"),
            (r"mlp\.(?:0|linear_1)\.(.+)", r"mlp.fc1.\2"),
            (r"mlp\.(?:3|linear_2)\.(.+)", r"mlp.fc2.\2"),
        )
    ),
)


def is_torchvision(keys: Iterable[str]) -> bool:
    """True if a file's keys are those of torchvision's ViT or Swin."""
    return not {"conv_proj.weight", "features.0.0.weight"}.isdisjoint(keys)


def timm_name(key: str) -> str:
    """timm's name of a tensor of torchvision's ViT or Swin; another one's own name."""
    for pattern, ours in _VIT:
        if match := re.fullmatch(pattern, key):
            return match.expand(ours)
    match = re.fullmatch(r"features\.(\d+)\.(.+)", key)
    return _swin_name(int(match[1]), match[2]) if match else key


def _swin_name(place: int, inside: str) -> str:
    """Patches at 0, then stages at odd places and the merging behind each at even ones."""
    if place == 0:
        part, leaf = inside.split(".", 1)
        return f"patch_embed.{'proj' if part == '0' else 'norm'}.{leaf}"
    stage, merging = divmod(place - 1, 2)
    if merging:
        return f"layers.{stage}.downsample.{inside}"
    inside = inside.replace(".mlp.0.", ".mlp.fc1.").replace(".mlp.3.", ".mlp.fc2.")
    return f"layers.{stage}.blocks.{inside}"


# timm's layers of a block, and ours.
TIMM_BLOCK = {
    "norm1": "norm_attention",
    "attn.qkv": "attention.qkv",
    "attn.proj": "attention.out",
    "norm2": "norm_mlp",
    "mlp.fc1": "widen",
    "mlp.fc2": "narrow",
}


def block_rules(theirs: str, ours: str) -> tuple[tuple[str, str], ...]:
    """The rules of the blocks behind a pattern, to those behind its replacement."""
    return tuple(
        (rf"{theirs}{re.escape(name)}\.(?P<leaf>weight|bias)", rf"{ours}{mine}.\g<leaf>")
        for name, mine in TIMM_BLOCK.items()
    )


BLOCK = block_rules(r"blocks\.(\d+)\.", r"trunk.blocks.\1.")


def timm_reading(official: Official) -> Reading:
    """A file of timm or torchvision by timm's names, with what the --backbone's file has beside."""
    tensors = {**(official.backbone or {}), **official.tensors}
    if not is_torchvision(tensors):
        return Reading(official.path, tensors)
    names = {timm_name(key): key for key in tensors}
    renamed = {name: tensors[key] for name, key in names.items()}
    return Reading(official.path, renamed, file_keys=names)


def hint(config: Mapping[str, Any] | None, *path: str, default: Any = None) -> Any:
    """Value of --config at a path of nested keys."""
    value: Any = config
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def take_specials(reading: Reading, tokens: tuple[str, ...], position: str) -> None:
    """Class tokens, one below the other, and positions, without their axes of length 1."""
    import torch

    given = [reading.tensors[key].flatten(0, -2) for key in tokens]
    reading.put("trunk.class_tokens", torch.cat(given), *tokens)
    reading.put("trunk.position", reading.tensors[position].flatten(0, -2), position)


def block_fields(reading: Reading) -> dict[str, Any]:
    """Width, depth and hidden width of timm's blocks, as configuration."""
    hidden, dim = reading.shape("blocks.0.mlp.fc1.weight")
    return {
        "dim": dim,
        "layers": reading.depth(r"blocks\.(\d+)\."),
        "mlp_dim": hidden,
        "qkv_bias": "blocks.0.attn.qkv.bias" in reading.tensors,
    }


def heads_of(reading: Reading, config: Mapping[str, Any] | None, dim: int) -> int:
    """Heads of a ViT: 64 wide in every usual size, else as --config says.

    Raises: SaccadeError where neither tells.
    """
    given = hint(config, "num_heads")
    if given is not None:
        return whole_number(given, "num_heads")
    if dim in (192, 384, 768, 1024):
        return dim // 64
    raise SaccadeError(
        f"{reading.path}: tokens are {dim} wide, and how many heads share them cannot be read from "
        'the file. Pass it with --config, a JSON file such as {"num_heads": 4}.'
    )


def square_side(reading: Reading, count: int, key: str) -> int:
    """The side of a square grid of that many tokens.

    Raises: SaccadeError if there is none.
    """
    side = round(count**0.5)
    if side * side != count:
        raise SaccadeError(
            f"{reading.path}: {key} is for {count} tokens, which is not a square grid. Expected "
            "the positions of a square image."
        )
    return side
