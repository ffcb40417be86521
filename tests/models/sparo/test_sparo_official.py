# SPDX-License-Identifier: Apache-2.0
"""Files of the SPARO fork, of OpenCLIP and of DINO with SPARO, read into our model."""

import json
from dataclasses import replace

import pytest
import torch
from places import TESTS
from safetensors.torch import load_file
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.models.official.conversion import Conversion, Original
from saccade.models.official.sources import clip, sparo
from saccade.models.sparo.model import Sparo

FOLDER = TESTS / "golden" / "sparo"


def golden(case_id: str) -> Original:
    """The file of a recorded case with its JSON."""
    cases = json.loads((FOLDER / "manifest.json").read_text())["cases"]
    case = next(case for case in cases if case["id"] == case_id)
    config = {"quick_gelu": False} | case["config"]
    return Original(case_id, load_file(FOLDER / case["weights"]["file"]), config=config)


def check_whole(official: Original, converted: Conversion) -> Sparo:
    """Every key of the file is read or left out for a reason, and nothing of ours is missing."""
    model = Sparo(converted.config, fresh=False)
    model.load_state_dict(converted.weights)
    assert set(converted.names) == set(model.state_dict())
    read = set(converted.names.values()) - {""}
    assert read | set(converted.ignored) == set(official.tensors)
    return model.double().eval()


def test_copies_of_shared_keys_may_be_left_out():
    official = golden("clip_sparo_grouped_sqrtsem")
    whole = sparo.convert(official)
    check_whole(official, whole)
    assert set(whole.ignored) == {
        f"{tower}.v.{name}"
        for tower in ("visual.sparo", "text_sparo")
        for name in ("weight", "bias")
    }
    tensors = {key: value for key, value in official.tensors.items() if ".v." not in key}
    bare = replace(official, tensors=tensors)
    converted = sparo.convert(bare)
    check_whole(bare, converted)
    assert converted.config == whole.config and not converted.ignored
    assert converted.config.slot_heads == 4 and converted.config.slots == 8


def test_a_json_that_contradicts_the_file_is_refused():
    official = golden("clip_sparo_sep_kv_rd0")
    check_whole(official, sparo.convert(official))
    for change, message in (
        ({"share_kv": True}, "visual.sparo.v.weight differs"),
        ({"L": 8}, "L 8, but the file's tensors have 6"),
        ({"reduce_depth": 1}, "layers 2, but the file's tensors have 3"),
    ):
        config = {**official.config, **change}
        with pytest.raises(SaccadeError, match=message):
            sparo.convert(replace(official, config=config))


def test_shared_queries_are_found_with_and_without_their_copy():
    official = golden("clip_sparo_norm_quickgelu")
    query = official.tensors["visual.sparo.q_emb"][..., :12]
    towers = ("visual.sparo", "text_sparo")
    tensors = dict(official.tensors)
    for tower in towers:
        for name in ("k", "v"):
            for part in ("weight", "bias"):
                key = f"{tower}.{name}.{part}"
                tensors[key] = tensors[key].unflatten(0, (5, -1))[:, :12].flatten(0, 1)
        tensors[f"{tower}.proj.weight"] = tensors[f"{tower}.proj.weight"][:, :12]
        tensors[f"{tower}.q_emb"] = query
    config = {key: value for key, value in official.config.items() if key != "share_queries"}
    shared = replace(official, tensors=tensors, config=config)
    converted = sparo.convert(shared)
    assert converted.config.share_queries and "text_sparo.q_emb" in converted.ignored
    check_whole(shared, converted)
    assert not sparo.convert(replace(shared, config=official.config)).config.share_queries


def test_what_tensors_cannot_tell_is_asked_for_by_name():
    baseline = golden("clip_codebook")
    with pytest.raises(SaccadeError, match=r"--config, at least .*quick_gelu"):
        clip.convert(replace(baseline, config=None))
    with pytest.raises(SaccadeError, match=r"vision_cfg\.head_width"):
        clip.convert(replace(baseline, config={"quick_gelu": False}))
    with pytest.raises(SaccadeError, match="sparo-dino"):
        sparo.convert(baseline)
    with pytest.raises(SaccadeError, match="sparo-clip"):
        clip.convert(golden("clip_sparo_sep_kv_rd0"))
    with pytest.raises(SaccadeError, match="60 tokens minus"):
        clip.convert(replace(baseline, vocabulary=("a b",)))
    assert "token ids" in " ".join(clip.convert(baseline).notes)


def test_poolers_of_both_towers_are_read_apart():
    official = golden("clip_attn_pool_gap")
    config = clip.convert(official).config
    image, text = config.pooler("image"), config.pooler("text")
    assert (image.queries, image.heads, image.mean) == (3, 2, True)
    assert (text.queries, text.heads, text.mean) == (5, 4, False)
    narrow = golden("clip_codebook_bottleneck")
    config = clip.convert(narrow).config
    assert (config.embed_dim, config.bottleneck_dim, config.codes) == (20, 12, 24)
    for source, change, message in (
        (official, {"text_cfg": {"n_queries": 3}}, "text_cfg.n_queries 3, but the .* have 5"),
        (narrow, {"bottleneck_dim": 16}, "bottleneck_dim 16, but the file's tensors have 12"),
        (narrow, {"embed_dim": 12}, "embed_dim 12, but the file's tensors have 20"),
        (golden("clip_attn_pool"), {"bottleneck_dim": 12}, "12, but the file's tensors have 0"),
    ):
        config = {**source.config, **change}
        for tower in ("vision_cfg", "text_cfg"):
            config[tower] = {**source.config[tower], **change.get(tower, {})}
        with pytest.raises(SaccadeError, match=message):
            clip.convert(replace(source, config=config))


def test_the_mean_of_a_texts_tokens_is_no_model_of_the_authors():
    official = golden("clip_attn_pool_gap")
    tensors = {k: v for k, v in official.tensors.items() if not k.startswith("text_attn_pool")}
    text = {**official.config["text_cfg"], "attentional_pool": False, "global_average_pool": True}
    config = {**official.config, "text_cfg": text}
    with pytest.raises(SaccadeError, match="text_cfg has global_average_pool without"):
        clip.convert(replace(official, tensors=tensors, config=config))


def dino_file() -> dict[str, torch.Tensor]:
    """A teacher of two blocks, 64 wide, with 6 slots of 5 values, and its training head."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    tensors = {
        "cls_token": draw(1, 1, 64),
        "pos_embed": draw(1, 10, 64),
        "patch_embed.proj.weight": draw(64, 3, 4, 4),
        "patch_embed.proj.bias": draw(64),
        "sparo.q_emb": draw(1, 6, 1, 1, 7),
    }
    layers = {"norm": (64,), "sparo.k": (42, 64), "sparo.v": (42, 64), "sparo.proj": (5, 7)}
    for i in range(2):
        layers |= {f"blocks.{i}.norm1": (64,), f"blocks.{i}.norm2": (64,)}
        layers |= {f"blocks.{i}.attn.qkv": (192, 64), f"blocks.{i}.attn.proj": (64, 64)}
        layers |= {f"blocks.{i}.mlp.fc1": (96, 64), f"blocks.{i}.mlp.fc2": (64, 96)}
    for name, shape in layers.items():
        tensors |= {f"{name}.weight": draw(*shape), f"{name}.bias": draw(shape[0])}
    tensors |= {
        f"sparo.v.{name}": tensors[f"sparo.k.{name}"].clone() for name in ("weight", "bias")
    }
    return {f"backbone.{key}": value for key, value in tensors.items()} | {
        "head.mlp.0.weight": draw(3, 30)
    }


def dino_code(tensors: dict[str, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    """The network written out: DINO's blocks (one head of 64), a norm, the paper's equation 1.

    Shapes: pixels [b 3 h w] -> [b 30].
    """
    t = {key.removeprefix("backbone."): value.double() for key, value in tensors.items()}

    def layer(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, t[f"{name}.weight"], t[f"{name}.bias"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (64,), t[f"{name}.weight"], t[f"{name}.bias"], 1e-6)

    patches = F.conv2d(pixels, t["patch_embed.proj.weight"], t["patch_embed.proj.bias"], 4)
    x = patches.flatten(2).mT
    x = torch.cat([t["cls_token"].expand(len(x), 1, 64), x], 1) + t["pos_embed"]
    for i in range(2):
        q, k, v = layer(f"blocks.{i}.attn.qkv", norm(f"blocks.{i}.norm1", x)).chunk(3, -1)
        x = x + layer(f"blocks.{i}.attn.proj", (q @ k.mT / 8).softmax(-1) @ v)
        hidden = F.gelu(layer(f"blocks.{i}.mlp.fc1", norm(f"blocks.{i}.norm2", x)))
        x = x + layer(f"blocks.{i}.mlp.fc2", hidden)
    x = norm("norm", x)
    slots = []
    for slot in range(6):
        rows = slice(7 * slot, 7 * slot + 7)
        keys = F.linear(x, t["sparo.k.weight"][rows], t["sparo.k.bias"][rows])
        weights = (keys @ t["sparo.q_emb"].reshape(6, 7)[slot] / 7**0.5).softmax(-1)
        slots.append(layer("sparo.proj", (weights[:, None] @ keys)[:, 0]))
    return torch.cat(slots, 1)


@torch.no_grad()
def test_dino_with_slots_is_read_as_it_is_written_out():
    tensors = dino_file()
    official = Original("teacher", tensors)
    converted = sparo.convert_dino(official)
    assert "no official file seen" in converted.notes[0]
    assert set(converted.ignored) == {
        "head.mlp.0.weight",
        "backbone.sparo.v.weight",
        "backbone.sparo.v.bias",
    }
    model = check_whole(official, converted)
    assert [component.role for component in model.components()] == [""]
    image = torch.randint(0, 256, (2, 12, 12, 3), generator=torch.Generator().manual_seed(0))
    pixels = (image.double() / 255 - model.image.scale.mean) / model.image.scale.std
    expected = F.normalize(dino_code(tensors, pixels.permute(0, 3, 1, 2)), dim=-1)
    assert (model.encode_image(image).code - expected).abs().max() < 1e-12


def test_dino_without_slots_is_refused():
    tensors = {key: value for key, value in dino_file().items() if "sparo" not in key}
    with pytest.raises(SaccadeError, match=r"has no tensor 'backbone\.sparo\.q_emb'"):
        sparo.convert_dino(Original("teacher", tensors))
