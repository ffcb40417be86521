# SPDX-License-Identifier: Apache-2.0
"""ViT, DeiT, Swin and SoT checkpoints under their documented names, read into our trunks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'saccade[export]'")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from saccade.models.official import deit, sot, swin, vit  # noqa: E402
from saccade.models.official.conversion import Official  # noqa: E402
from saccade.models.sot import SoT  # noqa: E402
from saccade.models.sot_config import PRESETS  # noqa: E402
from saccade.plugins.errors import SaccadeError  # noqa: E402

DIM, HEADS, HIDDEN, CLASSES = 12, 3, 20, 5
KEYS = Path(__file__).with_name("golden") / "sot" / "SoT_Tiny.keys.json"
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
    for each in range(2):
        tensors |= block(f"blocks.{each}", DIM, HIDDEN)
    tensors |= norm("norm", DIM) | pair("head", CLASSES, DIM)
    if specials == 2:
        tensors |= {"dist_token": drawn(1, 1, DIM)} | pair("head_dist", CLASSES, DIM)
    return tensors


def loaded(converted):
    """The model of a conversion whose names cover our state and whose tensors fit it."""
    model = SoT(converted.config, fresh=False).double().eval()
    assert set(converted.names) == set(converted.weights) == set(model.state_dict())
    model.load_state_dict(converted.weights)
    return model


def untouched(converted, tensors):
    taken = {key for keys in converted.names.values() for key in keys.split(", ")}
    return set(tensors) - taken - set(converted.ignored)


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
        layer = nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, 0.0, F.gelu, **options).double()
        names = {
            "self_attn.in_proj_weight": "attn.qkv.weight",
            "self_attn.in_proj_bias": "attn.qkv.bias",
            **{f"self_attn.out_proj.{n}": f"attn.proj.{n}" for n in ("weight", "bias")},
            **{f"linear{i}.{n}": f"mlp.fc{i}.{n}" for i in (1, 2) for n in ("weight", "bias")},
            **{f"norm{i}.{n}": f"norm{i}.{n}" for i in (1, 2) for n in ("weight", "bias")},
        }
        layer.load_state_dict({o: tensors[f"blocks.{index}.{t}"] for o, t in names.items()})
        x = layer.eval()(x)
    return F.layer_norm(x, (DIM,), tensors["norm.weight"], tensors["norm.bias"], 1e-6)


def test_vit_is_what_torchs_encoder_computes():
    tensors = vit_file()
    converted = vit.convert(Official("vit.pth", tensors, config=HINT))
    assert untouched(converted, tensors) == set()
    assert (converted.config.height_px, converted.config.fusion) == (12, "class")
    pixels = (image(12).double() / 255 - 0.5).permute(0, 3, 1, 2) / 0.5
    token = torch_tokens(tensors, pixels, 1)[:, 0]
    expected = F.linear(token, tensors["head.weight"], tensors["head.bias"])
    torch.testing.assert_close(loaded(converted)(image(12)), expected)


def test_vit_of_imagenet_21k_has_a_tanh_before_its_classifier():
    tensors = vit_file() | pair("pre_logits.fc", 7, DIM) | pair("head", CLASSES, 7)
    model = loaded(vit.convert(Official("vit.pth", tensors, config=HINT)))
    pixels = (image(12).double() / 255 - 0.5).permute(0, 3, 1, 2) / 0.5
    token = torch_tokens(tensors, pixels, 1)[:, 0]
    state = F.linear(token, tensors["pre_logits.fc.weight"], tensors["pre_logits.fc.bias"]).tanh()
    expected = F.linear(state, tensors["head.weight"], tensors["head.bias"])
    torch.testing.assert_close(model(image(12)), expected)


def test_distilled_deit_answers_the_mean_of_its_classifiers():
    tensors = vit_file(2)
    converted = deit.convert(Official("deit.pth", tensors, config=HINT))
    assert untouched(converted, tensors) == set()
    mean, std = (torch.tensor(getattr(converted.config, each)).double() for each in ("mean", "std"))
    pixels = ((image(12).double() / 255 - mean) / std).permute(0, 3, 1, 2)
    tokens = torch_tokens(tensors, pixels, 2)
    both = [
        F.linear(tokens[:, place], tensors[f"{key}.weight"], tensors[f"{key}.bias"])
        for place, key in enumerate(("head", "head_dist"))
    ]
    torch.testing.assert_close(loaded(converted)(image(12)), (both[0] + both[1]) / 2)
    with pytest.raises(SaccadeError, match="SOURCE 'deit'"):
        vit.convert(Official("deit.pth", tensors, config=HINT))


def second_order_head(prefix, width, heads, side, *, class_token):
    tensors = {f"{prefix}representation.wr.weight": drawn(2 * heads * side, width)}
    tensors |= {f"{prefix}representation.norm.weight": drawn(side)}
    tensors |= pair(f"{prefix}visual_fc", CLASSES, heads * side * side)
    return tensors | (pair(f"{prefix}cls_fc", CLASSES, width) if class_token else {})


def test_deit_with_the_second_order_head():
    tensors = vit_file() | second_order_head("classifier.", DIM, 2, 3, class_token=True)
    del tensors["head.weight"], tensors["head.bias"]
    converted = deit.convert(Official("deit.pth", tensors, config=HINT))
    config = converted.config
    assert untouched(converted, tensors) == set()
    assert (config.fusion, config.pool_heads, config.m, config.n) == ("sum", 2, 3, 3)
    assert (config.normalization, config.learned_start) == ("svpn-fast", True)
    assert any("fusion_type" in note for note in converted.notes)
    assert converted.exact == replace(config, svpn_epsilon=0.0)
    assert torch.isfinite(loaded(converted)(image(12))).all()


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


def swin_tokens(tensors, pixels):
    """The trunk again: attention over all tokens, and a rule for who sees whom."""

    def normed(x, prefix):
        return F.layer_norm(x, x.shape[-1:], tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"])

    def linear(x, prefix):
        return F.linear(x, tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"])

    proj = "patch_embed.proj"
    x = F.conv2d(pixels, tensors[f"{proj}.weight"], tensors[f"{proj}.bias"], stride=4)
    x, grid = normed(x.flatten(2).mT, "patch_embed.norm"), 8
    for stage, heads in enumerate(SWIN_HEADS):
        row, column = torch.arange(grid * grid) // grid, torch.arange(grid * grid) % grid
        for layer in range(2):
            prefix = f"layers.{stage}.blocks.{layer}"
            shift = WINDOW // 2 if layer == 1 and grid > WINDOW else 0
            sees = torch.ones(grid * grid, grid * grid, dtype=torch.bool)
            for place in (row, column):
                window, wrapped = (place - shift) % grid // WINDOW, place < shift
                sees &= (window[:, None] == window) & (wrapped[:, None] == wrapped)
            down, right = row[:, None] - row + WINDOW - 1, column[:, None] - column + WINDOW - 1
            at = torch.where(sees, down * (2 * WINDOW - 1) + right, 0)
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
    return ((image(SIDE).double() / 255 - mean) / std).permute(0, 3, 1, 2)


def test_swin_is_attention_among_the_tokens_that_see_each_other():
    tensors = swin_file()
    converted = swin.convert(Official("swin.pth", tensors, config={"img_size": SIDE}))
    assert untouched(converted, tensors) == set()
    assert all("made anew" in reason for reason in converted.ignored.values())
    words = swin_tokens(tensors, swin_pixels(converted.config))
    expected = F.linear(words.mean(1), tensors["head.weight"], tensors["head.bias"])
    model = loaded(converted)
    torch.testing.assert_close(model(image(SIDE)), expected)
    torch.testing.assert_close(model.fold()(image(SIDE)), expected)


def test_swin_of_later_releases_merges_at_the_start_of_a_stage():
    tensors = swin_file()
    later = {
        key.replace("layers.0.downsample", "layers.1.downsample").replace("head.", "head.fc."): each
        for key, each in tensors.items()
    }
    one, other = (
        loaded(swin.convert(Official("swin.pth", each, config={"img_size": SIDE})))
        for each in (tensors, later)
    )
    assert torch.equal(one(image(SIDE)), other(image(SIDE)))


def test_swin_with_the_second_order_head_pools_in_place_of_the_average():
    tensors = swin_file() | second_order_head("head.", 16, 2, 4, class_token=False)
    del tensors["head.weight"], tensors["head.bias"]
    converted = swin.convert(Official("swin.pth", tensors, config={"img_size": SIDE}))
    assert untouched(converted, tensors) == set()
    assert (converted.config.fusion, converted.config.pooling) == ("visual", "mgcrp")
    assert torch.isfinite(loaded(converted)(image(SIDE))).all()


def sot_file():
    entries = json.loads(KEYS.read_text())["entries"]
    return {
        each["key"]: torch.zeros(each["shape"], dtype=getattr(torch, each["dtype"]))
        for each in entries
    }


def test_sot_tiny_is_recognised_by_its_tensors():
    found = sot.convert(Official("sot.pth", sot_file())).config
    assert found == replace(PRESETS["sot-tiny"], mean=found.mean, std=found.std)


def test_what_the_tensors_do_not_tell_is_asked_for_by_name():
    tensors = vit_file()
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
