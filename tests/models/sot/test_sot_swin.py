# SPDX-License-Identifier: Apache-2.0
"""Swin checkpoints against attention written down anew, and torchvision's names of ViT and Swin."""

from dataclasses import replace

import pytest
import timm_files as files
import torch
from torch.nn import functional as F

from saccade.models.official.conversion import Original
from saccade.models.official.sources import swin, vit


def swin_tokens(tensors, pixels):
    """The trunk again: attention over all tokens, and a rule for who sees whom."""

    def normed(x, prefix):
        return F.layer_norm(x, x.shape[-1:], tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"])

    def linear(x, prefix):
        return F.linear(x, tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"])

    proj = "patch_embed.proj"
    x = F.conv2d(pixels, tensors[f"{proj}.weight"], tensors[f"{proj}.bias"], stride=4)
    x, grid = normed(x.flatten(2).mT, "patch_embed.norm"), 8
    for stage, heads in enumerate(files.SWIN_HEADS):
        row, column = torch.arange(grid * grid) // grid, torch.arange(grid * grid) % grid
        for layer in range(2):
            prefix = f"layers.{stage}.blocks.{layer}"
            shift = files.WINDOW // 2 if layer == 1 and grid > files.WINDOW else 0
            sees = torch.ones(grid * grid, grid * grid, dtype=torch.bool)
            for place in (row, column):
                window, wrapped = (place - shift) % grid // files.WINDOW, place < shift
                sees &= (window[:, None] == window) & (wrapped[:, None] == wrapped)
            down, right = (
                row[:, None] - row + files.WINDOW - 1,
                column[:, None] - column + files.WINDOW - 1,
            )
            at = torch.where(sees, down * (2 * files.WINDOW - 1) + right, 0)
            bias = tensors[f"{prefix}.attn.relative_position_bias_table"][at].permute(2, 0, 1)
            qkv = linear(normed(x, f"{prefix}.norm1"), f"{prefix}.attn.qkv")
            q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in qkv.chunk(3, -1))
            logits = q @ k.mT / q.shape[-1] ** 0.5 + bias
            seen = logits.masked_fill(~sees, -torch.inf).softmax(-1) @ v
            x = x + linear(seen.transpose(1, 2).flatten(2), f"{prefix}.attn.proj")
            hidden = F.gelu(linear(normed(x, f"{prefix}.norm2"), f"{prefix}.mlp.fc1"))
            x = x + linear(hidden, f"{prefix}.mlp.fc2")
        if stage == 0:
            map_ = x.unflatten(1, (grid, grid))
            corners = [map_[:, r::2, c::2] for r, c in ((0, 0), (1, 0), (0, 1), (1, 1))]
            merged = normed(torch.cat(corners, -1).flatten(1, 2), "layers.0.downsample.norm")
            x, grid = merged @ tensors["layers.0.downsample.reduction.weight"].T, grid // 2
    return normed(x, "norm")


def swin_pixels(config):
    mean, std = (torch.tensor(each).double() for each in (config.mean, config.std))
    return ((files.image(files.SIDE).double() / 255 - mean) / std).permute(0, 3, 1, 2)


def test_swin_is_attention_among_the_tokens_that_see_each_other():
    tensors = files.swin_file()
    converted = swin.convert(Original("swin.pth", tensors, config={"img_size": files.SIDE}))
    assert files.untouched(converted, tensors) == set()
    assert all("recomputed" in reason for reason in converted.ignored.values())
    words = swin_tokens(tensors, swin_pixels(converted.config))
    expected = F.linear(words.mean(1), tensors["head.weight"], tensors["head.bias"])
    model = files.loaded(converted)
    torch.testing.assert_close(model(files.image(files.SIDE)), expected)
    torch.testing.assert_close(model.fold()(files.image(files.SIDE)), expected)


def test_swin_of_later_releases_merges_at_the_start_of_a_stage():
    tensors = files.swin_file()
    later = {
        key.replace("layers.0.downsample", "layers.1.downsample").replace(
            "head.", "head.fc."
        ): tensor
        for key, tensor in tensors.items()
    }
    one, other = (
        files.loaded(swin.convert(Original("swin.pth", each, config={"img_size": files.SIDE})))
        for each in (tensors, later)
    )
    assert torch.equal(one(files.image(files.SIDE)), other(files.image(files.SIDE)))


def test_swin_with_the_second_order_head_pools_in_place_of_the_average():
    tensors = files.swin_file() | files.second_order_head("head.", 16, 2, 4, class_token=False)
    del tensors["head.weight"], tensors["head.bias"]
    converted = swin.convert(Original("swin.pth", tensors, config={"img_size": files.SIDE}))
    assert files.untouched(converted, tensors) == set()
    assert (converted.config.fusion, converted.config.pooling) == ("visual", "mgcrp")
    assert torch.isfinite(files.loaded(converted)(files.image(files.SIDE))).all()


VIT_PARTS = {
    "norm1.": "ln_1.",
    "attn.qkv.": "self_attention.in_proj_",
    "norm2.": "ln_2.",
    "attn.proj.": "self_attention.out_proj.",
    "mlp.fc1.": "mlp.0.",
    "mlp.fc2.": "mlp.3.",
}
VIT_NAMES = {
    "cls_token": "class_token",
    "pos_embed": "encoder.pos_embedding",
    **{
        f"{n}.{k}": f"{o}.{k}"
        for k in ("weight", "bias")
        for n, o in (
            ("patch_embed.proj", "conv_proj"),
            ("norm", "encoder.ln"),
            ("head", "heads.head"),
        )
    },
}


def torchvision_key(key):
    """timm's name of a ViT's or Swin's tensor in torchvision's words."""
    if key.startswith("blocks."):
        number, inside = key.removeprefix("blocks.").split(".", 1)
        for ours, theirs in VIT_PARTS.items():
            inside = inside.replace(ours, theirs)
        return f"encoder.layers.encoder_layer_{number}.{inside}"
    return VIT_NAMES.get(key, key)


def torchvision_swin_key(key):
    key = key.replace("patch_embed.proj", "features.0.0").replace(
        "patch_embed.norm", "features.0.2"
    )
    key = key.replace("mlp.fc1", "mlp.0").replace("mlp.fc2", "mlp.3")
    for stage in (0, 1):
        key = key.replace(f"layers.{stage}.blocks", f"features.{2 * stage + 1}")
        key = key.replace(f"layers.{stage}.downsample", f"features.{2 * stage + 2}")
    return key


@pytest.mark.parametrize(
    ("source", "tensors", "rename", "config", "side"),
    [
        (vit, files.vit_file(), torchvision_key, files.HINT, 12),
        (swin, files.swin_file(), torchvision_swin_key, {"img_size": files.SIDE}, files.SIDE),
    ],
)
def test_torchvisions_names_are_the_same_model(source, tensors, rename, config, side):
    theirs = {rename(key): tensor for key, tensor in tensors.items()}
    assert len(set(theirs) & set(tensors)) <= 4  # no more than the norm's and the head's
    converted = source.convert(Original("file.pth", theirs, config=config))
    assert files.untouched(converted, theirs) == set()
    changes = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    one, other = (
        replace(each, config=replace(each.config, **changes))
        for each in (
            converted,
            source.convert(Original("file.pth", tensors, config=config)),
        )
    )
    assert torch.equal(files.loaded(one)(files.image(side)), files.loaded(other)(files.image(side)))
