# SPDX-License-Identifier: Apache-2.0
"""A pretrained trunk under a new head: every family that takes one, from every source of one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import labelled_sets
import numpy as np
import pytest
import timm_files
import torch
from places import TESTS
from safetensors.torch import save_file

from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.checkpoint import Checkpoint, load, save
from saccade.models.entry import imported
from saccade.models.families import entry_of
from saccade.models.layers.trunk import trunk_of
from saccade.models.official.convert import ConvertOptions, convert
from saccade.models.training.options import TrainOptions
from saccade.models.training.train import train

GOLDEN = TESTS / "golden" / "hugging_face"
ANSWERS = np.load(GOLDEN / "answers.npz")
HEADS: dict[str, dict[str, Any]] = {
    "sot": {"pool_heads": 1, "m": 2, "n": 2},
    "sparo": {
        "slots": 4, "slot_dim": 4, "text_layers": 1, "text_width": 8, "text_heads": 1,
        "text_hidden": 8,
    },
    "nac": {"modules": 4, "dim": 8, "propagator_layers": 1, "heads": 1},
}  # fmt: skip
# The patches that a family reads, after the trunk's last norm.
WORDS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "sot": lambda model, image: model.trunk(image).words,
    "sparo": lambda model, image: model.image_pool.norm(model.image(image)),
    "nac": lambda model, image: model.tokenizer(image),
}
NEW = {
    "sot": {"head"},
    "sparo": {"logit_scale", "image_pool.read_out", "text", "text_pool"},
    "nac": {"generator", "head", "read_in", "read_out", "propagators"},
}
Trained = Callable[..., Checkpoint]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train a family for two steps on small gray images, which take the trunk's form."""
    place = tmp_path_factory.mktemp("trunks")
    data = labelled_sets.class_folders(place / "data", labelled_sets.noise())

    def run(family: str, trunk: Path | str | None, **options: Any) -> Checkpoint:
        given = {"data": data, "set": HEADS.get(family, {}), "steps": 2, "batch": 4, "trunk": trunk}
        given |= {"force": True} | options
        if isinstance(trunk, Path) and "init" not in given:
            given["out"] = place / f"{family}-{trunk.name}.safetensors"
        out = given.pop("out", place / "other.safetensors")
        return train(family, TrainOptions(out, **given), progress=None)

    return run


def trunk_in(checkpoint: Checkpoint) -> Any:
    """The trunk that another model would get from a checkpoint, and its weights."""
    port = imported(entry_of(checkpoint.family).trunk)
    return port.read("it", checkpoint.config, checkpoint.weights)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("sot", name) for name in ("vit-embedding", "siglip", "resnet-basic")),
        *(("sparo", name) for name in ("registers-embedding", "swin")),
        *(("nac", name) for name in ("clip-states", "siglip-vision")),
    ],
)
def test_a_frozen_trunk_answers_as_in_transformers(
    family: str, name: str, trained: Trained
) -> None:
    child = trained(family, GOLDEN / name, freeze=("trunk",))
    given = trunk_in(child)
    trunk = trunk_of(given.shape).double().eval()
    trunk.load_state_dict(given.weights)
    images = torch.from_numpy(ANSWERS["large images" if name.startswith("resnet") else "images"])
    with torch.no_grad():
        tokens = trunk(images)
        read = WORDS[family](child.build(torch.float64), images)
    assert torch.allclose(read[:, -tokens.words.shape[1] :], tokens.words, atol=1e-12)
    if f"{name}/embedding" in ANSWERS and tokens.class_tokens is not None:
        class_token = torch.nn.functional.normalize(tokens.class_tokens[:, 0], dim=-1).numpy()
        assert np.abs(class_token - ANSWERS[f"{name}/embedding"]).max() < 1e-10


@pytest.mark.parametrize("family", HEADS)
def test_card_command_and_images_are_the_trunks(
    family: str, trained: Trained, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    child = trained(family, GOLDEN / "vit-embedding", freeze=("trunk",))
    trunk = child.card["trunk"]
    assert (trunk["name"], trunk["source"], trunk["tensors"]) == (
        "vit-embedding",
        "transformers",
        30,
    )
    assert trunk["shape"] == "ViT of 2 blocks, width 16, patches of 4 px"
    assert NEW[family] <= set(child.card["new_parts"])
    assert child.card["frozen"] == ["trunk"]
    assert " --trunk vit-embedding --freeze trunk " in child.card["command"]
    assert "30 tensors from vit-embedding; new: " in capsys.readouterr().err
    own = tmp_path / "own.safetensors"
    convert("auto", GOLDEN / "vit-embedding", ConvertOptions(own))
    assert child.preprocessing == load(own).preprocessing
    # The checkpoint of a converted folder is the same trunk; without --freeze, it is trained.
    moved = trained(family, own)
    before, after = trunk_in(child).weights, trunk_in(moved).weights
    assert moved.card["trunk"]["sha256"] == load(own).sha256
    assert not torch.equal(before["blocks.0.widen.weight"], after["blocks.0.widen.weight"])


def test_a_trunk_goes_from_family_to_family(trained: Trained) -> None:
    """Also a distillation token, and fields that only SoT has."""
    first = trained("sot", GOLDEN / "deit", freeze=("trunk",))
    second = trained("nac", first.path, freeze=("trunk",))
    third = trained("sparo", second.path, freeze=("trunk",))
    assert (first.config["distillation"], third.config["registers"]) == (True, 1)
    weights = [trunk_in(checkpoint).weights for checkpoint in (first, second, third)]
    assert weights[0].keys() == weights[1].keys() == weights[2].keys()
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]) and torch.equal(value, weights[2][name])


def test_a_folder_of_timm_without_classifier(trained: Trained, tmp_path: Path) -> None:
    """As timm's DINOv2 with registers: no head, no positions of the first tokens, layer scales."""
    tensors = {name: value.float() for name, value in timm_files.vit_file().items()}
    tensors = {name: value for name, value in tensors.items() if not name.startswith("head.")}
    tensors["pos_embed"] = tensors["pos_embed"][:, 1:]
    tensors["reg_token"] = torch.ones(1, 2, timm_files.DIM)
    tensors |= {f"blocks.0.ls{n}.gamma": torch.full((timm_files.DIM,), 2.0) for n in (1, 2)}
    folder = tmp_path / "vit"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"architecture": "vit_tiny_patch4_reg2_dinov2", **timm_files.HINT}
    (folder / "config.json").write_text(json.dumps(config))
    child = trained("sot", folder, freeze=("trunk",))
    assert child.config["registers"] == 2
    weights = trunk_in(child).weights
    assert torch.equal(weights["class_tokens"][1:], tensors["reg_token"][0])
    assert torch.equal(weights["position"][3:], tensors["pos_embed"][0])
    assert not weights["position"][:3].any()
    narrow = tensors["blocks.0.mlp.fc2.weight"]
    assert torch.allclose(weights["blocks.0.narrow.weight"], 2 * narrow)


def test_fields_beside_the_trunk(trained: Trained) -> None:
    child = trained("sparo", GOLDEN / "vit-embedding", set=HEADS["sparo"] | {"reduce_depth": 1})
    assert child.card["trunk"]["tensors"] == 30 - 12  # the read-out replaces the last block


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "two starts": ("sot", "vit", {"init": "shipped:sot-shapes"}, "--init .* both given"),
    "no trunk to take": ("slot-attention", "vit", {}, r"place .*images\. Leave .*sparo, sot"),
    "no trunk to give": ("sot", "shipped:slots-tetrominoes", {}, "-attention has no trunk of im"),
    "a file of another network": (
        "vqa",
        "vit/model.safetensors",
        {},
        "found the weights of transformers, .* saccade convert transformers .*vit/model.safet",
    ),
    "damaged file": ("vqa", "junk.pth", {}, r"junk\.pth: truncated or damaged"),
    "another tokenizer": ("sot", "shipped:digits-sum", {}, "the tokenizer 'conv', not"),
    "a stem": ("nac", "stem", {}, "found a trunk with resnet embedding"),
    "nothing": ("sot", "nowhere", {}, "nowhere.*no such file"),
    "a folder of other things": ("sot", ".", {}, "has neither config.json with model_type"),
    "a field of it": ("sot", "vit", {"set": {"layers": 3}}, "--set layers: the trunk .* \\(2\\)"),
    "side": ("sot", "vit", {"side_px": 20}, "--side-px is 20, but the trunk .* 16 x 16 px"),
    "generated images": ("sot", "vit", {"data": "shapes"}, "height_px is 16, but the data has 48"),
    "frozen head": ("sot", "vit", {"freeze": ("head",)}, "--freeze head: .* is new"),
    "no such part": ("nac", "vit", {"freeze": ("trnk",)}, "--freeze trnk: found no parameter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, trained: Trained, tmp_path: Path) -> None:
    family, trunk, options, message = REFUSED[case]
    if trunk == "stem":
        sizes = {"dim": 8, "heads": 1, "layers": 1, "mlp_dim": 8, "token_embedding": "resnet"}
        stem = {"set": HEADS["sot"] | sizes | {"patch_px": 8}, "side_px": 16}
        path: Any = trained("sot", None, out=tmp_path / "stem.safetensors", **stem).path
    elif trunk == "junk.pth":
        path = tmp_path / trunk
        path.write_bytes(b"PK\x03\x04junk")
    elif trunk in ("nowhere", "."):
        path = tmp_path / trunk
    else:
        path = trunk if trunk.startswith("shipped") else GOLDEN / trunk
    with pytest.raises(SaccadeError, match=f"(?s){message}"):
        trained(family, path, **{"out": tmp_path / "child.safetensors", **options})
    assert not list(tmp_path.glob("child*"))


def test_weights_of_another_model_are_refused(tmp_path: Path, trained: Trained) -> None:
    parent = trained("sot", GOLDEN / "vit")
    other = save(
        tmp_path / "other.safetensors",
        family="sot",
        config=parent.config,
        weights=parent.weights | {"trunk.blocks.0.widen.bias": torch.zeros(3)},
        preprocessing=parent.preprocessing,
        labels=parent.labels,
        calibration=parent.calibration,
        card={},
    )
    with pytest.raises(ShapeError, match=r"blocks.0.widen.bias: found floats \[3\],.*Copy both"):
        trained("sot", other.path, out=tmp_path / "child.safetensors")


def test_the_result_is_exported_and_answers(trained: Trained, tmp_path: Path) -> None:
    from quick_gate import FEW_SAMPLES

    from saccade.exporter.export import ExportOptions, export
    from saccade.serving.local.artefact import load_artefact

    child = trained("sot", GOLDEN / "vit", freeze=("trunk",))
    options = ExportOptions(tmp_path / "out", budget=("class",))
    export(child, options, FEW_SAMPLES, progress=None)
    with load_artefact(tmp_path / "out") as model:
        (answer,) = model.classify([ANSWERS["photograph 0"]])
    assert answer.labels[0][0] in child.labels
