# SPDX-License-Identifier: Apache-2.0
"""ViT, DeiT, Swin and SoT checkpoints under their documented names, read into our trunks."""

import json
from dataclasses import replace

import pytest
import timm_files as files
import torch
from places import TESTS
from torch import nn
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.models.official.conversion import Official
from saccade.models.official.sources import sot, swin, vit
from saccade.models.sot.config import PRESETS

KEYS = TESTS / "golden" / "sot" / "SoT_Tiny.keys.json"


def torch_tokens(tensors, pixels, specials):
    """The trunk again, in torch's own encoder."""
    words = F.conv2d(
        pixels, tensors["patch_embed.proj.weight"], tensors["patch_embed.proj.bias"], stride=4
    )
    first = [
        tensors[key].expand(len(pixels), -1, -1) for key in ("cls_token", "dist_token")[:specials]
    ]
    x = torch.cat((*first, words.flatten(2).mT), 1) + tensors["pos_embed"]
    for index in range(2):
        options = {"norm_first": True, "batch_first": True, "layer_norm_eps": 1e-6}
        layer = nn.TransformerEncoderLayer(
            files.DIM, files.HEADS, files.HIDDEN, 0.0, F.gelu, **options
        ).double()
        names = {
            "self_attn.in_proj_weight": "attn.qkv.weight",
            "self_attn.in_proj_bias": "attn.qkv.bias",
            **{f"self_attn.out_proj.{n}": f"attn.proj.{n}" for n in ("weight", "bias")},
            **{f"linear{i}.{n}": f"mlp.fc{i}.{n}" for i in (1, 2) for n in ("weight", "bias")},
            **{f"norm{i}.{n}": f"norm{i}.{n}" for i in (1, 2) for n in ("weight", "bias")},
        }
        layer.load_state_dict({o: tensors[f"blocks.{index}.{t}"] for o, t in names.items()})
        x = layer.eval()(x)
    return F.layer_norm(x, (files.DIM,), tensors["norm.weight"], tensors["norm.bias"], 1e-6)


def test_vit_is_what_torchs_encoder_computes():
    tensors = files.vit_file()
    converted = vit.convert(Official("vit.pth", tensors, config=files.HINT))
    assert files.untouched(converted, tensors) == set()
    assert (converted.config.height_px, converted.config.fusion) == (12, "class")
    pixels = (files.image(12).double() / 255 - 0.5).permute(0, 3, 1, 2) / 0.5
    token = torch_tokens(tensors, pixels, 1)[:, 0]
    expected = F.linear(token, tensors["head.weight"], tensors["head.bias"])
    torch.testing.assert_close(files.loaded(converted)(files.image(12)), expected)


def test_vit_of_imagenet_21k_has_a_tanh_before_its_classifier():
    tensors = (
        files.vit_file()
        | files.pair("pre_logits.fc", 7, files.DIM)
        | files.pair("head", files.CLASSES, 7)
    )
    model = files.loaded(vit.convert(Official("vit.pth", tensors, config=files.HINT)))
    pixels = (files.image(12).double() / 255 - 0.5).permute(0, 3, 1, 2) / 0.5
    token = torch_tokens(tensors, pixels, 1)[:, 0]
    state = F.linear(token, tensors["pre_logits.fc.weight"], tensors["pre_logits.fc.bias"]).tanh()
    expected = F.linear(state, tensors["head.weight"], tensors["head.bias"])
    torch.testing.assert_close(model(files.image(12)), expected)


def test_distilled_deit_answers_the_mean_of_its_classifiers():
    tensors = files.vit_file(2)
    converted = vit.convert_deit(Official("deit.pth", tensors, config=files.HINT))
    assert files.untouched(converted, tensors) == set()
    mean, std = (torch.tensor(getattr(converted.config, each)).double() for each in ("mean", "std"))
    pixels = ((files.image(12).double() / 255 - mean) / std).permute(0, 3, 1, 2)
    tokens = torch_tokens(tensors, pixels, 2)
    both = [
        F.linear(tokens[:, place], tensors[f"{key}.weight"], tensors[f"{key}.bias"])
        for place, key in enumerate(("head", "head_dist"))
    ]
    torch.testing.assert_close(files.loaded(converted)(files.image(12)), (both[0] + both[1]) / 2)
    with pytest.raises(SaccadeError, match="SOURCE 'deit'"):
        vit.convert(Official("deit.pth", tensors, config=files.HINT))


@pytest.mark.parametrize("names", [("ls1.gamma", "ls2.gamma"), ("gamma_1", "gamma_2")])
def test_deit_3_scales_its_blocks_and_gives_the_class_token_no_position(names):
    tensors = files.vit_file()
    pixels = (files.image(12).double() / 255 - 0.5).permute(0, 3, 1, 2) / 0.5
    scaled = dict(tensors)
    for index in range(2):
        for name, layer in zip(names, ("attn.proj", "mlp.fc2"), strict=True):
            factor = files.drawn(files.DIM)
            scaled[f"blocks.{index}.{name}"] = factor
            for leaf in ("weight", "bias"):
                key = f"blocks.{index}.{layer}.{leaf}"
                tensors[key] = (tensors[key].movedim(0, -1) * factor).movedim(-1, 0)
    scaled["pos_embed"] = tensors["pos_embed"][:, 1:]
    tensors["pos_embed"] = F.pad(scaled["pos_embed"], (0, 0, 1, 0))
    converted = vit.convert(Official("deit3.pth", scaled, config=files.HINT))
    assert files.untouched(converted, scaled) == set()
    token = torch_tokens(tensors, pixels, 1)[:, 0]
    expected = F.linear(token, tensors["head.weight"], tensors["head.bias"])
    torch.testing.assert_close(files.loaded(converted)(files.image(12)), expected)


def test_deit_with_the_second_order_head():
    tensors = files.vit_file() | files.second_order_head(
        "classifier.", files.DIM, 2, 3, class_token=True
    )
    del tensors["head.weight"], tensors["head.bias"]
    converted = vit.convert_deit(Official("deit.pth", tensors, config=files.HINT))
    config = converted.config
    assert files.untouched(converted, tensors) == set()
    assert (config.fusion, config.pool_heads, config.m, config.n) == ("sum", 2, 3, 3)
    assert (config.normalization, config.learned_start) == ("svpn-fast", True)
    assert any("fusion_type" in note for note in converted.notes)
    assert converted.exact == replace(config, svpn_epsilon=0.0)
    together = files.loaded(converted)(files.image(12))
    assert torch.isfinite(together).all()
    # The head alone in one file, the trunk with its old classifier in another.
    alone = {key: tensor for key, tensor in tensors.items() if key.startswith("classifier.")}
    trunk = {key: tensor for key, tensor in tensors.items() if key not in alone}
    trunk |= files.pair("head", files.CLASSES, files.DIM)
    apart = vit.convert_deit(Official("head.pth", alone, config=files.HINT, backbone=trunk))
    assert torch.equal(files.loaded(apart)(files.image(12)), together)


def sot_file():
    entries = json.loads(KEYS.read_text())["entries"]
    return {
        entry["key"]: torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for entry in entries
    }


def test_sot_tiny_is_recognised_by_its_tensors():
    config = sot.convert(Official("sot.pth", sot_file())).config
    assert config == replace(PRESETS["sot-tiny"], mean=config.mean, std=config.std)


def test_what_the_tensors_do_not_tell_is_asked_for_by_name():
    tensors = files.vit_file()
    with pytest.raises(SaccadeError, match=r'--config, a JSON file such as {"num_heads": 4}'):
        vit.convert(Official("vit.pth", tensors))
    tensors = sot_file()
    given = {"representationConfig": {"fusion_type": "sum_loss"}}
    assert sot.convert(Official("sot.pth", tensors, config=given)).config.fusion == "late"
    del tensors["classifier.representation.norm.weight"]
    with pytest.raises(SaccadeError, match=r'"type": "sqrt_d"'):
        sot.convert(Official("sot.pth", tensors))
    with pytest.raises(SaccadeError, match="has no tensor 'pos_embed'"):
        sot.convert(Official("sot.pth", {"weight": torch.zeros(1)}))
    with pytest.raises(SaccadeError, match="expected 112 or 224"):
        sot.convert(Official("sot.pth", sot_file(), config={"img_size": 64}))


# Swin: its answers are held against timm's in tests/models/official/test_trunk_golden.py.


def test_swin_of_later_releases_merges_at_the_start_of_a_stage():
    tensors = files.swin_file()
    later = {
        key.replace("layers.0.downsample", "layers.1.downsample").replace(
            "head.", "head.fc."
        ): tensor
        for key, tensor in tensors.items()
    }
    one, other = (
        files.loaded(swin.convert(Official("swin.pth", each, config={"img_size": files.SIDE})))
        for each in (tensors, later)
    )
    assert torch.equal(one(files.image(files.SIDE)), other(files.image(files.SIDE)))
    converted = swin.convert(Official("swin.pth", tensors, config={"img_size": files.SIDE}))
    assert files.untouched(converted, tensors) == set()
    assert all("recomputed" in reason for reason in converted.ignored.values())


def test_swin_with_the_second_order_head_pools_in_place_of_the_average():
    tensors = files.swin_file() | files.second_order_head("head.", 16, 2, 4, class_token=False)
    del tensors["head.weight"], tensors["head.bias"]
    converted = swin.convert(Official("swin.pth", tensors, config={"img_size": files.SIDE}))
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
    converted = source.convert(Official("file.pth", theirs, config=config))
    assert files.untouched(converted, theirs) == set()
    changes = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    one, other = (
        replace(each, config=replace(each.config, **changes))
        for each in (converted, source.convert(Official("file.pth", tensors, config=config)))
    )
    assert torch.equal(files.loaded(one)(files.image(side)), files.loaded(other)(files.image(side)))
