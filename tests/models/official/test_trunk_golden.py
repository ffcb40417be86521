# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers and timm: their answers, and their trunks in every family."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import TESTS
from safetensors.torch import load_file, save_file

from saccade.core.errors import SaccadeError
from saccade.models.checkpoint import Checkpoint
from saccade.models.entry import imported
from saccade.models.families import build, entries
from saccade.models.official.convert import ConvertOptions, convert, read_trunk
from saccade.models.official.sources.swin import SwinJson, windows_of

TIMM, TRANSFORMERS = (TESTS / "golden" / name for name in ("timm", "hugging_face"))
ANSWERS = {place: np.load(place / "answers.npz") for place in (TIMM, TRANSFORMERS)}
# Of transformers, one folder of each kind of trunk; test_hugging_face.py compares all answers.
FOLDERS = (
    *(TIMM / name for name in ("siglip-tanh", "siglip-gap", "deit3", "registers", "swinv2-larger")),
    *(
        TRANSFORMERS / name
        for name in ("siglip-vision", "resnet", "resnet-basic", "resnet-embedding", "swin", "clip")
    ),
)
# Small circuits and heads; the trunk decides the rest.
SIZES: dict[str, dict[str, Any]] = {
    "sot": {"pool_heads": 1, "m": 2, "n": 2},
    "sparo": {"slots": 4, "slot_dim": 4, "attn_dim": 4, "text": False},
    "nac": {"modules": 4, "dim": 8, "propagator_layers": 1, "heads": 1},
}
# The patches that a family reads, after the trunk's last norm; a SPARO's pooling begins with it.
WORDS: dict[str, Callable[[Any, Any], Any]] = {
    "sot": lambda model, image: model.trunk(image).words,
    "sparo": lambda model, image: model.image(image),
    "nac": lambda model, image: model.tokenizer(image),
}
# The other ports take only ResNets; tests/models/training/test_train_language.py has them.
_PORTS = {name: imported(entry.trunk) for name, entry in entries() if entry.trunk}
PORTS = {name: port for name, port in _PORTS.items() if port.sizes_images}


@cache
def read(folder: Path) -> Checkpoint:
    return read_trunk(folder)


def images_of(folder: Path, checkpoint: Checkpoint) -> Any:
    answers, preprocessing = ANSWERS[folder.parent], checkpoint.preprocessing
    assert preprocessing is not None
    side = preprocessing.height_px
    images = answers["images"]
    if side > images.shape[1]:
        images = answers["large images"]
    return torch.from_numpy(images[:, :side, :side])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_every_trunk_answers_the_same_in_every_family(folder: Path) -> None:
    """Also folded, and after it has gone from family to family."""
    assert PORTS.keys() == SIZES.keys()
    checkpoint = read(folder)
    images, answers = images_of(folder, checkpoint), ANSWERS[folder.parent]
    trunk = PORTS[checkpoint.family].read("it", checkpoint.config, checkpoint.weights)
    wanted = answers[f"{folder.name}/features"]
    for family, port in PORTS.items():
        model: Any = build(family, port.fields(trunk.shape) | SIZES[family]).double()
        model.load_state_dict(model.state_dict() | port.state(trunk, model.config))
        for form in (model.eval(), model.fold()):
            with torch.no_grad():
                words = WORDS[family](form, images)
                # A ResNet has no norm, so that of a pooling is new.
                if hasattr(form, "image_pool") and not trunk.shape.is_resnet:
                    words = form.image_pool.norm(words)
            count = min(len(words[0]), len(wanted[0]))
            difference = words[:, -count:].numpy() - wanted[:, -count:]
            assert np.abs(difference).max() < 1e-10, (family, type(form))
        assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in form.modules())
        weights = {name: value.float() for name, value in model.state_dict().items()}
        trunk = port.read("it", model.config.to_dict(), weights)


@pytest.mark.parametrize(
    "folder", sorted(path for path in TIMM.iterdir() if path.is_dir()), ids=lambda path: path.name
)
def test_answers_are_those_of_timm(folder: Path) -> None:
    checkpoint = read(folder)
    images = images_of(folder, checkpoint)
    model = checkpoint.build(torch.float64)
    with torch.no_grad():
        outputs = model.components()[0].run(image=images)
    keys = {
        key.partition("/")[2] for key in ANSWERS[TIMM].files if key.startswith(f"{folder.name}/")
    }
    (key,) = keys & {"logits", "embedding"}
    assert np.abs(outputs[key].numpy() - ANSWERS[TIMM][f"{folder.name}/{key}"]).max() < 1e-10


def torchvision_names(place: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Save the golden ResNet under torchvision's names, whose norms an old file does not count."""
    trunk = PORTS["sot"].read("it", read(RESNET).config, read(RESNET).weights)
    tensors = {
        key.removeprefix("resnet."): value.clone()
        for key, value in trunk.weights.items()
        if not key.endswith("num_batches_tracked")
    }
    tensors |= {"fc.weight": torch.ones(3, 128), "fc.bias": torch.zeros(3)}
    change(tensors)
    save_file(tensors, place / "model.safetensors")
    return place / "model.safetensors"


RESNET = TRANSFORMERS / "resnet"
ARCHITECTURE = '{"architecture": "%s", "num_classes": 3, "label_names": ["a", "b", "c"]}'


def test_a_resnet_of_torchvision_and_a_folder_of_timm(tmp_path: Path) -> None:
    torchvision_names(tmp_path, lambda tensors: None)
    (tmp_path / "config.json").write_text(ARCHITECTURE % "resnet50")
    ours, theirs = read_trunk(tmp_path), read(RESNET)
    assert (ours.family, ours.config["height_px"]) == ("sot", 224)
    assert ours.config["stage_layers"] == theirs.config["stage_layers"]
    for name, value in theirs.weights.items():
        counted = name.endswith("num_batches_tracked")
        assert counted or name.startswith("head.") or torch.equal(ours.weights[name], value)
    with pytest.raises(SaccadeError, match=r"'resnet50d', expected one of vit_.*, resnet18, 26"):
        (tmp_path / "config.json").write_text(ARCHITECTURE % "resnet50d")
        read_trunk(tmp_path)


def _grouped(tensors: dict[str, Any]) -> None:
    tensors["layer1.0.conv2.weight"] = tensors["layer1.0.conv2.weight"][:, :2].clone()


def _deep_stem(tensors: dict[str, Any]) -> None:
    tensors["conv1.0.weight"] = tensors.pop("conv1.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_grouped, r"wrong shape: layer1.0.conv2.weight .*found \(4, 2, 3, 3\), expected \(4, 4"),
        (_deep_stem, "has no tensor 'conv1.weight'"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "unexpected: extra"),
        (
            lambda tensors: tensors.pop("layer2.1.bn2.bias"),
            r"missing: layer2.1.bn2.bias \(our trunk.resnet.layer2.1.bn2.b",
        ),
        (lambda tensors: tensors["bn1.bias"].fill_(torch.nan), "NaN or infinity"),
    ],
)
def test_another_convolutional_network_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    path, out = torchvision_names(tmp_path, change), tmp_path / "ours.safetensors"
    labels = tmp_path / "labels.txt"
    labels.write_text("a\nb\nc\n")
    with pytest.raises(SaccadeError, match=f"(?s){message}"):
        convert("resnet", path, ConvertOptions(out, labels=labels))
    assert not out.exists()


def open_clip_folder(place: Path, name: str = "vit_base_patch16_siglip_224") -> Path:
    """The folder of a SigLIP of OpenCLIP: its image tower is timm's."""
    tensors = load_file(TIMM / "siglip" / "model.safetensors")
    tower = {f"visual.trunk.{key}": value for key, value in tensors.items()}
    text = {"text.token_embedding.weight": torch.ones(4, 2), "logit_bias": torch.ones(())}
    save_file(tower | text, place / "open_clip_model.safetensors")
    model = {"embed_dim": 16, "vision_cfg": {"timm_model_name": name}, "num_heads": 4}
    half = {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.5, 0.125]}
    images = {"size": [16, 16], "resize_mode": "squash", **half}
    config = {"model_cfg": model, "num_heads": 4, "preprocess_cfg": images}
    (place / "open_clip_config.json").write_text(json.dumps(config))
    return place


def test_the_image_tower_of_a_siglip_of_open_clip(tmp_path: Path) -> None:
    ours, theirs = read_trunk(open_clip_folder(tmp_path)), read(TIMM / "siglip")
    assert ours.config == theirs.config
    assert all(torch.equal(ours.weights[name], value) for name, value in theirs.weights.items())
    assert ours.preprocessing is not None and ours.preprocessing.resize_mode == "squash"
    open_clip_folder(tmp_path, "convnext_base")
    with pytest.raises(SaccadeError, match="timm_model_name of vision_cfg is 'convnext_base', exp"):
        read_trunk(tmp_path)


def changed(name: str, place: Path, **config: Any) -> Path:
    """A copy of a folder of timm with other values in its JSON."""
    folder = shutil.copytree(TIMM / name, place / name)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))
    return folder


def test_windows_of_a_swin_v2_are_in_its_name(tmp_path: Path) -> None:
    with pytest.raises(SaccadeError, match=r"do not tell its windows\. Pass the name"):
        read_trunk(changed("swinv2", tmp_path, architecture="swinv2_tiny", model_args={}))
    later = SwinJson(architecture="swinv2_base_window12to16_192to256.ms")
    assert windows_of("it", later) == {"window": 16, "trained_windows": [12, 12, 12, 6]}
    once = SwinJson(architecture="swinv2_tiny_window8_256")
    assert windows_of("it", once) == {"window": 8}
    with pytest.raises(SaccadeError, match="'swinv2_cr_tiny_224', expected one of vit_"):
        read_trunk(changed("deit3", tmp_path, architecture="swinv2_cr_tiny_224"))


def test_activations_of_timm(tmp_path: Path) -> None:
    with pytest.raises(SaccadeError, match="model_args: act_layer is 'relu', expected one of ge"):
        read_trunk(changed("siglip", tmp_path, model_args={"act_layer": "relu", "num_heads": 4}))
    assert read(TIMM / "siglip-tanh").config["activation"] == "gelu_tanh"
    assert read(TIMM / "siglip").config["activation"] == "gelu"


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "class token": ("sparo", {"pooling": "cls"}, "another one: this trunk has no class token"),
    "fusion": ("sot", {"fusion": "sum"}, "visual: this trunk has no class token"),
    "distillation": ("sot", {"distillation": True}, "false unless the trunk is a ViT with a class"),
    "registers": ("sparo", {"registers": 1}, "patches_only is True, expected false unless"),
    "width": ("sparo", {"pooling": "map", "embed_dim": 8}, "embed_dim is 8, expected image_width"),
    "bottleneck": ("sparo", {"pooling": "mean", "bottleneck_dim": 4}, "expected 0 if pooling is m"),
    "remainder": ("sot", {"height_px": 18, "remainder": False}, "patch_px is 4, expected a div"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_trunk_without_class_token_lacks(case: str) -> None:
    family, fields, message = WRONG[case]
    checkpoint = read(TIMM / "siglip")
    trunk = PORTS["sparo"].read("it", checkpoint.config, checkpoint.weights)
    given = PORTS[family].fields(trunk.shape) | SIZES[family] | {"embed_dim": 16}
    given = {
        name: value for name, value in given.items() if family == "sparo" or name != "embed_dim"
    }
    with pytest.raises(SaccadeError, match=message):
        build(family, given | fields)


STAGED: dict[str, tuple[str, dict[str, Any], str]] = {
    "four stages": ("sot", {"stage_layers": [1, 1]}, "stage_layers is .*, expected 4 values"),
    "cells": ("sparo", {"height_px": 72}, "height_px is 72, expected a multiple of 32"),
    "first cells": ("nac", {"patch_px": 8}, "patch_px is 8, expected 4 for a ResNet"),
    "heads": ("nac", {"trunk_heads": [1]}, "trunk_heads is .*, expected none for a ResNet"),
    "width": ("sparo", {"image_width": 130, "image_heads": 1}, "a width that 4 stages divide"),
    "depth": ("sparo", {"reduce_depth": 1}, "reduce_depth is 1, expected at most 0"),
}


@pytest.mark.parametrize("case", STAGED)
def test_what_does_not_fit_a_resnet(case: str) -> None:
    family, fields, message = STAGED[case]
    trunk = PORTS["sot"].read("it", read(RESNET).config, read(RESNET).weights)
    with pytest.raises(SaccadeError, match=message):
        build(family, PORTS[family].fields(trunk.shape) | SIZES[family] | fields)


def test_rates_by_layer_and_dropped_paths_of_staged_towers() -> None:
    for folder, parts in ((RESNET, 5), (TIMM / "swin", 3)):
        own = read(folder)
        trunk = PORTS[own.family].read("it", own.config, own.weights)
        model: Any = build("sparo", PORTS["sparo"].fields(trunk.shape) | SIZES["sparo"])
        layers = model.parameter_layers()
        assert len(layers) == parts + 2
        names = {name for name, _ in model.named_parameters()}
        for layer in layers:
            assert any(name.startswith(layer) for name in names), layer
