# SPDX-License-Identifier: Apache-2.0
"""timm's names of a transformer's tensors, also for files with torchvision's names."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from saccade.core.errors import SaccadeError
from saccade.models.official.conversion import Official, Reading
from saccade.models.official.given_files import whole_number
from saccade.models.trunks import Activation

SPECIALS = ("cls_token", "dist_token", "reg_token")  # timm's tokens before the patches
POOL = "attn_pool.latent"  # the query of timm's attention pooling
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
    """Return True if a file's keys are those of torchvision's ViT or Swin."""
    return not {"conv_proj.weight", "features.0.0.weight"}.isdisjoint(keys)


def timm_name(key: str) -> str:
    """Return timm's name of a tensor of torchvision's ViT or Swin; other names stay."""
    for pattern, ours in _VIT:
        if match := re.fullmatch(pattern, key):
            return match.expand(ours)
    match = re.fullmatch(r"features\.(\d+)\.(.+)", key)
    return _swin_name(int(match[1]), match[2]) if match else key


def _swin_name(place: int, inside: str) -> str:
    """Return timm's name: 0 has the patches, odd places the stages, even ones the mergings."""
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
    """Return the rules for the blocks after a pattern, with the names after its replacement."""
    return tuple(
        (rf"{theirs}{re.escape(name)}\.(?P<leaf>weight|bias)", rf"{ours}{mine}.\g<leaf>")
        for name, mine in TIMM_BLOCK.items()
    )


BLOCK = block_rules(r"blocks\.(\d+)\.", r"trunk.blocks.\1.")


def timm_reading(official: Official) -> Reading:
    """Read a file of timm or torchvision, and that of --backbone, by timm's names."""
    tensors = {**(official.backbone or {}), **official.tensors}
    if not is_torchvision(tensors):
        return Reading(official.path, tensors)
    names = {timm_name(key): key for key in tensors}
    renamed = {name: tensors[key] for name, key in names.items()}
    return Reading(official.path, renamed, file_keys=names)


def hint(config: Mapping[str, Any] | None, *path: str, default: Any = None) -> Any:
    """Return the value of --config at a path of nested keys."""
    value: Any = config
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return default
        value = value[name]
    return value


def take_specials(reading: Reading, tokens: tuple[str, ...], position: str) -> None:
    """Take the class tokens and registers, if any, stacked, and the positions.

    Tokens without a position, as in DeiT III, get zeros.
    """
    import torch

    given = [reading.tensors[key].flatten(0, -2) for key in tokens]
    if given:
        reading.put("trunk.class_tokens", torch.cat(given), *tokens)
    places = reading.tensors[position].flatten(0, -2)
    if given and is_square(len(places)):
        places = torch.cat((places.new_zeros(sum(map(len, given)), places.shape[1]), places))
    reading.put("trunk.position", places, position)


def is_square(count: int) -> bool:
    """Return True if that many tokens form a square grid, so none of them is a class token.

    With one or two class tokens, the count is never a square.
    """
    return count > 1 and round(count**0.5) ** 2 == count


# DeiT III's factors of a block's outputs, by timm's name or the authors', and the layer before.
_SCALES = {
    r"blocks\.(\d+)\.(?:ls1\.gamma|gamma_1)": ("attn.proj", "attention.out"),
    r"blocks\.(\d+)\.(?:ls2\.gamma|gamma_2)": ("mlp.fc2", "narrow"),
}


def fold_scales(reading: Reading) -> None:
    """Put each layer scale into the rows of the layer before it, which has been taken."""
    for key, factor in reading.tensors.items():
        for pattern, (theirs, ours) in _SCALES.items():
            if match := re.fullmatch(pattern, key):
                for leaf in ("weight", "bias"):
                    name = f"trunk.blocks.{match[1]}.{ours}.{leaf}"
                    layer = f"blocks.{match[1]}.{theirs}.{leaf}"
                    if name in reading.weights:
                        rows = factor.double()[:, None] if leaf == "weight" else factor.double()
                        folded = reading.weights[name].double() * rows
                        folded = folded.to(reading.weights[name].dtype)
                        reading.put(name, folded, layer, key)


def block_fields(reading: Reading) -> dict[str, Any]:
    """Return the fields for width, depth and hidden width of timm's blocks."""
    hidden, dim = reading.shape("blocks.0.mlp.fc1.weight")
    return {
        "dim": dim,
        "layers": reading.depth(r"blocks\.(\d+)\."),
        "mlp_dim": hidden,
        "qkv_bias": "blocks.0.attn.qkv.bias" in reading.tensors,
    }


_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1152: 16}  # by width


def heads_of(reading: Reading, config: Mapping[str, Any] | None, dim: int) -> int:
    """Return the number of heads of a ViT: as in the usual sizes of this width, else from --config.

    Raises: SaccadeError if neither tells it.
    """
    given = hint(config, "num_heads", default=hint(config, "model_args", "num_heads"))
    if given is not None:
        return whole_number(given, "num_heads")
    if dim in _HEADS:
        return _HEADS[dim]
    raise SaccadeError(
        f"{reading.path}: tokens have width {dim}, and the number of heads is not in the file. "
        'Pass it with --config, a JSON file such as {"num_heads": 4}.'
    )


def published_side(config: Mapping[str, Any] | None) -> int | None:
    """Return the side of the images in timm's or OpenCLIP's JSON, if it is there."""
    given = hint(config, "pretrained_cfg", "input_size") or hint(config, "preprocess_cfg", "size")
    side = given[-1] if isinstance(given, list) and given else given
    return side if type(side) is int else None


def square_side(reading: Reading, count: int, key: str) -> int:
    """Return the side of a square grid of that many tokens.

    Raises: SaccadeError if they do not form a square.
    """
    side = round(count**0.5)
    if side * side != count:
        raise SaccadeError(
            f"{reading.path}: {key} is for {count} tokens, which do not form a square grid. "
            "Expected the positions of a square image."
        )
    return side


# timm's SigLIPs with the activation that the authors used for all; timm has GELU in the others.
_TANH = re.compile(
    r"vit_(base_patch32|so400m_patch16|giantopt_patch16)_siglip_.+"
    r"|vit_large_patch16_siglip_(gap_)?512"
)


def activation_of(reading: Reading, config: Mapping[str, Any] | None) -> str:
    """Return the activation that timm uses in the model that the JSON names, if it names one.

    Raises: SaccadeError if the JSON names another activation.
    """
    name = str(hint(config, "architecture", default="")).partition(".")[0]
    usual = "gelu_tanh" if _TANH.fullmatch(name) else "gelu"
    given = hint(config, "model_args", "act_layer", default=usual)
    if given not in get_args(Activation):
        raise SaccadeError(
            f"{reading.path}: act_layer of model_args is {given!r:.60}, expected one of "
            f"{', '.join(get_args(Activation))}. Convert another model."
        )
    return str(given)
