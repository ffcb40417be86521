# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as the authors' codes save them, of recorded weights or of documented names."""

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from saccade.models.layers.resnet import ResNet
from saccade.models.resnet_sizes import ResNetSizes

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
# What lies beside the weights in a checkpoint that a run can go on from.
_RUN = {
    "epoch": 3,
    "optimizer": {
        "state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.ones(3)}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}],
    },
}


@dataclass(frozen=True)
class OfficialFile:
    """A checkpoint, and what has to be said of it on the command line."""

    path: Path
    flags: tuple[str, ...] = ()
    source: str = ""  # of `saccade convert`; where it is not the name


def beside(name: str) -> ModuleType:
    """Another module of the tests' folder, such as `timm_files`."""
    path = TESTS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def golden_case(family: str, case_id: str) -> dict[str, Any]:
    """The manifest's entry of a recorded case."""
    manifest = json.loads((GOLDEN / family / "manifest.json").read_text())
    cases = manifest.get("cases", manifest.get("models"))
    return next(case for case in cases if case["id"] == case_id)


def _given(place: Path, **content: Any) -> tuple[str, ...]:
    """Files for flags: JSON for a configuration, a line a name for a list of names."""
    flags = []
    for flag, value in content.items():
        path = place / f"{flag}.{'json' if isinstance(value, Mapping) else 'txt'}"
        text = json.dumps(value) if isinstance(value, Mapping) else "\n".join(value)
        path.write_text(text)
        flags += [f"--{flag}", str(path)]
    return tuple(flags)


def names(count: int) -> list[str]:
    return [f"name {index}" for index in range(count)]


def of_several_gpus(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {f"module.{key}": value for key, value in tensors.items()}


def _clip(place: Path, case_id: str, **config: Any) -> OfficialFile:
    """OpenCLIP's training script: every name begins with `module.`."""
    case = golden_case("sparo", case_id)
    tensors = load_file(GOLDEN / "sparo" / case["weights"]["file"])
    path = place / "epoch_32.pt"
    torch.save({"name": "run", "state_dict": of_several_gpus(tensors), **_RUN}, path)
    return OfficialFile(path, _given(place, config=case["config"] | config))


def sparo_clip(place: Path) -> OfficialFile:
    return _clip(place, "clip_sparo_grouped_sqrtsem")


def open_clip(place: Path) -> OfficialFile:
    """A codebook with a bottleneck behind it."""
    return _clip(place, "clip_codebook_bottleneck", quick_gelu=False)


def attention_pooler(place: Path) -> OfficialFile:
    """Towers whose attentional poolers differ; the image's averages its answers."""
    return replace(_clip(place, "clip_attn_pool_gap", quick_gelu=False), source="open-clip")


def sparo_dino(place: Path) -> OfficialFile:
    """DINO's training script: two networks, of which the student is wrapped."""
    teacher = beside("models/sparo/test_sparo_official").dino_file()
    student = of_several_gpus({key: value + 1 for key, value in teacher.items()})
    run = {"args": argparse.Namespace(arch="vit_small"), "dino_loss": {"center": torch.ones(1, 3)}}
    torch.save({"student": student, "teacher": teacher, **_RUN, **run}, place / "checkpoint.pth")
    return OfficialFile(place / "checkpoint.pth")


def sot(place: Path) -> OfficialFile:
    """timm's training script."""
    case = golden_case("sot", "sot_naive28_sumloss")
    tensors = load_file(GOLDEN / "sot" / case["weights"]["file"])
    run = {"arch": "SoT_Tiny", "version": 2, "args": argparse.Namespace(lr=1e-3), "metric": 80.5}
    path = place / "model_best.pth.tar"
    torch.save({"state_dict": tensors, **_RUN, **run}, path)
    flags = _given(place, config=case["config"], labels=names(case["config"]["num_classes"]))
    return OfficialFile(path, flags)


def tvmax_vqa(place: Path) -> OfficialFile:
    """MCAN's training script; the file's name ends in .pkl."""
    case = golden_case("tvmax_vqa", "model_b")
    tensors = load_file(GOLDEN / "tvmax_vqa" / case["weights_file"])
    path = place / "epoch13.pkl"
    torch.save({"state_dict": tensors, "optimizer": _RUN["optimizer"], "lr_base": 1e-4}, path)
    config = {
        **case["config"],
        "IMG_FEAT_PAD_SIZE": case["pad_positions"],
        "grid": [9, 10],
        "question_length": case["pad_tokens"],
    }
    words = ["PAD", "UNK", *names(48)]
    lists = _given(place, config=config, labels=names(20), vocabulary=words)
    return OfficialFile(path, (*lists, "--attention", "tvmax", "--lam", "0.05"))


def nac(place: Path) -> OfficialFile:
    """The training script of the NAC authors: the model and its moving average."""
    case = golden_case("nac", "model_eval")
    where = case["weights"]
    tensors = load_file(GOLDEN / "nac" / where["file"])
    model = {key: tensors[where["prefix"] + key] for key in where["keys"]}
    average = of_several_gpus({key: value + 1 for key, value in model.items()})
    run = {"lr_scheduler": {"last_epoch": 3}, "scaler": {"scale": 65536.0}, "step": 7}
    stats = {"best_acc1": 60.5, "current_val_stats": {"acc1": 60.0, "loss": 1.5}}
    path = place / "checkpoint_best.pt"
    torch.save({"model": model, "model_ema": average, **_RUN, **run, **stats}, path)
    config = {"model": {"name": "NeuralCompiler", "kwargs": case["config"]}}
    return OfficialFile(path, _given(place, config=config, labels=names(7)))


def _slot_parameters() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    cases = beside("golden_cases/slot_attention")
    case = golden_case("slot_attention", "model_tssa")
    data = dict(np.load(GOLDEN / "slot_attention" / case["file"]))
    return cases.parameters(data), cases.model_fields(case)


def invariant_slot_attention(place: Path) -> OfficialFile:
    """A training state of Flax as MessagePack."""
    tensors, config = _slot_parameters()
    tree: dict[str, Any] = {}
    for key, value in tensors.items():
        *scopes, leaf = key.split("/")
        branch = tree
        for scope in scopes:
            branch = branch.setdefault(scope, {})
        branch[leaf] = value.numpy()
    state = {"step": 7, "params": tree, "opt_state": {"0": {"count": 7, "mu": tree, "nu": tree}}}
    beside("models/official/test_reading").write_messages(place / "ckpt-7.flax", state)
    return OfficialFile(place / "ckpt-7.flax", _given(place, config=config))


def invariant_slot_attention_npz(place: Path) -> OfficialFile:
    """The same parameters as NumPy saves them."""
    tensors, config = _slot_parameters()
    np.savez(place / "params.npz", **{key: value.numpy() for key, value in tensors.items()})
    return OfficialFile(place / "params.npz", _given(place, config=config))


def _timm(place: Path, tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> OfficialFile:
    narrow = {key: x.float() if x.is_floating_point() else x for key, x in tensors.items()}
    torch.save({"model": narrow}, place / "model.pth")
    labels = names(len(narrow["head.weight"]))
    return OfficialFile(place / "model.pth", _given(place, config=config, labels=labels))


def vit(place: Path) -> OfficialFile:
    files = beside("timm_files")
    return _timm(place, files.vit_file(), files.HINT)


def deit(place: Path) -> OfficialFile:
    """A distilled one, with its second classifier."""
    files = beside("timm_files")
    return _timm(place, files.vit_file(2), files.HINT)


def swin(place: Path) -> OfficialFile:
    files = beside("timm_files")
    return _timm(place, files.swin_file(), {"img_size": files.SIDE})


def resnet(place: Path) -> OfficialFile:
    """A narrow ResNet with torchvision's names, as saved by torch.save."""
    sizes = ResNetSizes((1, 1, 1, 1), (4, 8, 16, 32), basic=True)
    torch.manual_seed(5)
    torch.save(ResNet(sizes, classes=3).state_dict(), place / "model.pth")
    given = _given(place, config={"img_size": 64}, labels=names(3))
    return OfficialFile(place / "model.pth", given)


def hugging_face(place: Path) -> OfficialFile:
    """A folder that transformers saved, copied so that a test may change it."""
    shutil.copytree(GOLDEN / "hugging_face" / "vit", place / "vit")
    return OfficialFile(place / "vit")


FILES: dict[str, Callable[[Path], OfficialFile]] = {
    "nac": nac,
    "sparo-clip": sparo_clip,
    "open-clip": open_clip,
    "sparo-dino": sparo_dino,
    "sot": sot,
    "tvmax-vqa": tvmax_vqa,
    "invariant-slot-attention": invariant_slot_attention,
    "vit": vit,
    "deit": deit,
    "swin": swin,
    "resnet": resnet,
    "transformers": hugging_face,
}
# Other forms of a source's files.
FORMS: dict[str, Callable[[Path], OfficialFile]] = {"attention-pooler": attention_pooler}


def photographs(source: str) -> tuple[list[Path], np.ndarray]:
    """Files of photographs, and what the source's authors' own transform made of them.

    Shapes: -> uint8 [n h w c], of the size that the source's file here takes.
    """
    folder = GOLDEN / "preprocessing"
    name = "served_slots.npz" if source == "invariant-slot-attention" else "served.npz"
    said = json.loads((folder / "manifest.json").read_text())["photographs"]
    files, pixels = [], []
    with np.load(folder / name) as made:
        for key in made.files:
            if key.startswith(f"{source}/"):
                entry = said[key.partition("/")[2]]
                package = importlib.util.find_spec(entry["package"]) if "package" in entry else None
                place = Path(str(package.origin)).parent if package else folder
                files.append(place / entry["path"])
                pixels.append(made[key])
    return files, np.stack(pixels)
