# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of ViT, DeiT and Swin with random weights under timm's documented names."""

import torch

from saccade.models.sot.model import SoT

DIM, HEADS, HIDDEN, CLASSES = 12, 3, 20, 5
HINT = {"num_heads": HEADS}


def image(side):
    generator = torch.manual_seed(3)
    return torch.randint(0, 256, (2, side, side, 3), dtype=torch.uint8, generator=generator)


def drawn(*shape):
    return 0.3 * torch.randn(*shape, generator=_GENERATOR, dtype=torch.float64)


_GENERATOR = torch.Generator().manual_seed(0)


def pair(prefix, target, source):
    return {f"{prefix}.weight": drawn(target, source), f"{prefix}.bias": drawn(target)}


def norm(prefix, dim):
    return {f"{prefix}.weight": 1 + drawn(dim), f"{prefix}.bias": drawn(dim)}


def block(prefix, dim, hidden):
    return {
        **norm(f"{prefix}.norm1", dim),
        **pair(f"{prefix}.attn.qkv", 3 * dim, dim),
        **pair(f"{prefix}.attn.proj", dim, dim),
        **norm(f"{prefix}.norm2", dim),
        **pair(f"{prefix}.mlp.fc1", hidden, dim),
        **pair(f"{prefix}.mlp.fc2", dim, hidden),
    }


def vit_file(specials=1):
    tensors = {"cls_token": drawn(1, 1, DIM), "pos_embed": drawn(1, specials + 9, DIM)}
    tensors |= {"patch_embed.proj.weight": drawn(DIM, 3, 4, 4), "patch_embed.proj.bias": drawn(DIM)}
    for index in range(2):
        tensors |= block(f"blocks.{index}", DIM, HIDDEN)
    tensors |= norm("norm", DIM) | pair("head", CLASSES, DIM)
    if specials == 2:
        tensors |= {"dist_token": drawn(1, 1, DIM)} | pair("head_dist", CLASSES, DIM)
    return tensors


def loaded(converted):
    """Check that converted tensors have the names and shapes of our state; return the model."""
    model = SoT(converted.config, fresh=False).double().eval()
    assert set(converted.names) == set(converted.weights) == set(model.state_dict())
    model.load_state_dict(converted.weights)
    return model


def untouched(converted, tensors):
    taken = {key for keys in converted.names.values() for key in keys.split(", ")}
    return set(tensors) - taken - set(converted.ignored)


def second_order_head(prefix, width, heads, side, *, class_token):
    tensors = {f"{prefix}representation.wr.weight": drawn(2 * heads * side, width)}
    tensors |= {f"{prefix}representation.norm.weight": drawn(side)}
    tensors |= pair(f"{prefix}visual_fc", CLASSES, heads * side * side)
    return tensors | (pair(f"{prefix}cls_fc", CLASSES, width) if class_token else {})


SIDE, WINDOW, SWIN_HEADS = 32, 4, (2, 4)  # patches of 4: grids of 8 and 4


def swin_file():
    tensors = {"patch_embed.proj.weight": drawn(8, 3, 4, 4), "patch_embed.proj.bias": drawn(8)}
    tensors |= norm("patch_embed.norm", 8)
    for stage, heads in enumerate(SWIN_HEADS):
        dim = 8 * 2**stage
        for layer in range(2):
            prefix = f"layers.{stage}.blocks.{layer}"
            tensors |= block(prefix, dim, 4 * dim)
            tensors[f"{prefix}.attn.relative_position_bias_table"] = drawn(49, heads)
            tensors[f"{prefix}.attn.relative_position_index"] = torch.zeros(16, 16).long()
    tensors["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    tensors |= norm("layers.0.downsample.norm", 32)
    tensors["layers.0.downsample.reduction.weight"] = drawn(16, 32)
    return tensors | norm("norm", 16) | pair("head", CLASSES, 16)
