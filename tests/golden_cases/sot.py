# SPDX-License-Identifier: Apache-2.0
"""Recorded tensors of the authors' SoT code, run through ours."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_refusals import arrays_of, lines_of, weights_of
from torch import Tensor

from saccade.models.layers.transformer import Block
from saccade.models.layers.vit import sinusoid
from saccade.models.official.conversion import Original, Reading
from saccade.models.official.json_files import declared
from saccade.models.official.sources import sot as official
from saccade.models.official.sources.sot import HeadJson, read_embedding, read_head
from saccade.models.official.sources.timm import VIT_BLOCKS, block_fields
from saccade.models.sot.config import SoTConfig
from saccade.models.sot.head import (
    ElementPower,
    Head,
    MultiHeadCrossCovariance,
    Scale,
    cross_covariance,
    square_root,
)
from saccade.models.sot.model import SoT
from saccade.models.sot.tokens import token_embedding
from saccade.plugins.ops import svpn_fast

Arrays = Mapping[str, np.ndarray]
# Pixels that are scaled already: (x / 255 - 0) / (1 / 255).
UNSCALED = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}


def check(folder: Path) -> list[str]:
    """One line for every recorded case that is not reproduced within its tolerance."""
    manifest = json.loads((folder / "manifest.json").read_text())
    runs = [(case["id"], partial(failures, folder, case)) for case in manifest["cases"]]
    runs += [(f["file"], partial(check_keys, folder / f["file"])) for f in manifest["key_lists"]]
    return [line for name, run in runs for line in lines_of(name, run)]


def count(folder: Path) -> int:
    """Number of cases that `check` runs."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return len(manifest["cases"]) + len(manifest["key_lists"])


def failures(folder: Path, case: dict[str, Any]) -> list[str]:
    """Failures of one case: answers further off than its manifest allows."""
    arrays = arrays_of(folder, case)
    with torch.random.fork_rng(devices=[]):
        actual = _KINDS[case["kind"]](case, arrays, weights_of(folder, case))
    if case.get("compare") is False:
        # Rounding noise decides these; only that there is an answer can be said.
        actual = {name: each for name, each in actual.items() if not np.isfinite(each).all()}
        return [f"{case['id']}: {name} is not finite" for name in actual]
    lines = []
    for name, atol in case["tolerance"]["atol"].items():
        if name not in actual:
            lines.append(f"{case['id']}: {name} was not computed")
            continue
        expected = arrays[name]
        excess = np.abs(actual[name] - expected) - case["tolerance"]["rtol"] * np.abs(expected)
        if not (actual[name].shape == expected.shape and (excess <= atol).all()):
            lines.append(f"{case['id']}: {name} is {excess.max():.2e} off, allowed {atol:.2e}")
    return lines


def check_keys(path: Path) -> list[str]:
    """A full-size list of keys, with and without the later timm's norms: it fits our model."""
    listed = json.loads(path.read_text())
    entries = listed["entries"]
    newer = [*entries, *listed["newer_timm"]["extra_entries"]]
    counts = (listed["num_params"], listed["newer_timm"]["num_params"])
    lines = []
    for wanted, keys in zip(counts, (entries, newer), strict=True):
        tensors = {
            key["key"]: torch.empty(key["shape"], dtype=getattr(torch, key["dtype"]))
            for key in keys
        }
        converted = official.convert(Original(path.name, tensors))
        model = SoT(converted.config, fresh=False)
        model.load_state_dict(converted.weights)
        left = sorted(set(tensors) - set(converted.names.values()))
        lines += [f"{path.name}: {key} was not taken" for key in left]
        if (count := sum(parameter.numel() for parameter in model.parameters())) != wanted:
            lines.append(f"{path.name}: {count} parameters, expected {wanted}")
    return lines


def _numpy(**tensors: Tensor) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def _with_gradients(
    arrays: Arrays, output: Tensor, of: Mapping[str, Tensor], shown: str = "output"
) -> dict[str, np.ndarray]:
    values = _numpy(**{shown: output})
    if "probe" in arrays:
        output.backward(torch.from_numpy(arrays["probe"]))
        for name, tensor in of.items():
            if tensor.grad is not None:
                values[f"grad/{name}"] = tensor.grad.numpy()
    return values


def _leaf(arrays: Arrays, name: str = "input") -> Tensor:
    return torch.from_numpy(arrays[name]).requires_grad_(True)


def _svpn(case: dict[str, Any], arrays: Arrays, weights: dict[str, Tensor]) -> Any:
    config, q = case["config"], _leaf(arrays)
    start = weights.get("weight", torch.ones(q.shape[-1])).requires_grad_(True)
    steps = {"singular_values": config["svNum"] or 0, "iterations": config["iterNum"]}
    y = svpn_fast(q, start, alpha=config["alpha"], **steps)
    if config["vec"] == "triu":
        rows, columns = torch.triu_indices(*q.shape[-2:])
        return _with_gradients(arrays, y[:, rows, columns, None], {"input": q, "weight": start})
    return _with_gradients(arrays, y.flatten(1), {"input": q, "weight": start})


def _covariance(case: dict[str, Any], arrays: Arrays, weights: dict[str, Tensor]) -> Any:
    config, x = case["config"], _leaf(arrays)
    leaves = {"input": x}
    if config["cross"]:
        leaves["input2"] = _leaf(arrays, "input2")
    y = leaves.get("input2", x)
    if config["conv"]:
        # Maps [b c h w] lose the mean of each channel, and are averaged over places.
        x, y = (matrix.flatten(2).mT for matrix in (x, y))
    kind = "channel" if config["conv"] else "scalar"
    divisor = x.shape[1] if config["cross"] else x.shape[2]
    removal = kind if config["remove_mean"] else "none"
    output = cross_covariance(x, y, x.shape[1], None, removal) * (x.shape[1] / divisor)
    return _with_gradients(arrays, output, leaves)


def _mpn(case: dict[str, Any], arrays: Arrays, weights: dict[str, Tensor]) -> Any:
    x = _leaf(arrays)
    root = square_root(x, case["config"]["iterNum"])
    rows, columns = torch.triu_indices(*root.shape[-2:])
    values = _with_gradients(arrays, root[:, rows, columns], {"input": x}) | _numpy(sqrt=root)
    if "grad/input" in values:
        # The authors wrote this gradient by hand: theirs and ours agree in the symmetric part.
        for each in (values, arrays):
            gradient = each["grad/input"]
            each["grad/input"] = (gradient + gradient.swapaxes(1, 2)) / 2  # type: ignore[index]
    return values


def _covariance_mpn(case: dict[str, Any], arrays: Arrays, weights: dict[str, Tensor]) -> Any:
    x = _leaf(arrays)
    removal = "scalar" if case["config"]["remove_mean"] else "none"
    covariance = cross_covariance(x, x, x.shape[1], None, removal) * (x.shape[1] / x.shape[2])
    root = square_root(covariance, case["config"]["iterNum"])
    rows, columns = torch.triu_indices(*root.shape[-2:])
    return _with_gradients(arrays, root[:, rows, columns], {"input": x})


def _epn(case: dict[str, Any], arrays: Arrays, weights: dict[str, Tensor]) -> Any:
    x = _leaf(arrays)
    # Their axis 1 is the rows' axis of [b m n] and the only one but the batch of [b n].
    matrices = x if x.dim() == 3 else x[..., None]
    y = ElementPower("rows", case["config"]["eps"])(matrices).reshape(x.shape)
    return _with_gradients(arrays, y, {"input": x})


def _scale(case: dict[str, Any], arrays: Arrays, weights: dict[str, Tensor]) -> Any:
    x, config = _leaf(arrays), case["config"]
    norm = Scale(x.shape[-2], learned=config["is_learnable"])
    with torch.no_grad():
        norm.factor.fill_(config["factor"])
    return _with_gradients(arrays, norm(x), {"input": x, "factor": norm.factor})


def _read(weights: Mapping[str, Tensor], case: dict[str, Any]) -> Reading:
    return Reading(case["id"], weights)


def _loaded(module: Any, reading: Reading, prefix: str) -> Any:
    module.load_state_dict({k.removeprefix(prefix): v for k, v in reading.weights.items()})
    return module.eval()


def _mgcrp(case: dict[str, Any], arrays: Arrays, weights: dict[str, Tensor]) -> Any:
    config, x = case["config"], _leaf(arrays)
    side, heads, dim = config["wr_dim"], config["num_heads"], config["dim"]
    named = {f"representation.{name}": weight for name, weight in weights.items()}
    for name, width in (("visual_fc", heads * side * side), ("cls_fc", dim)):
        named |= {f"{name}.weight": torch.zeros(2, width), f"{name}.bias": torch.zeros(2)}
    reading = _read(named, case)
    fields, _ = read_head(
        reading, "", dim, declared(HeadJson, {"representationConfig": {"args": config}})
    )
    head = Head(SoTConfig(**{"dim": dim, "heads": 1} | fields))
    module = _loaded(head, reading, "head.").pool
    assert isinstance(module, MultiHeadCrossCovariance)
    leaves = {"input": x, "wr.weight": module.project.weight, "wr.bias": module.project.bias}
    for name, tensor in module.norm.named_parameters():
        leaves[f"norm.{'weight' if name == 'start' else name}"] = tensor
    leaves = {name: leaf for name, leaf in leaves.items() if f"grad/{name}" in arrays}
    return _with_gradients(arrays, module(x).vector, leaves)


def _classifier(case: dict[str, Any], arrays: Arrays, weights: dict[str, Tensor]) -> Any:
    config, x = case["config"], torch.from_numpy(arrays["input"])
    reading = _read(weights, case)
    fields, _ = read_head(reading, "", config["input_dim"], declared(HeadJson, config))
    head = Head(SoTConfig(**{"dim": config["input_dim"], "heads": 1} | fields))
    _loaded(head, reading, "head.")
    visual = fields["fusion"] == "visual"
    answer = head(None, x) if visual else head(x[:, :1], x[:, 1:])
    return _both(answer.class_logits, answer.word_logits, fields["fusion"], "output")


def _both(first: Tensor | None, second: Tensor | None, fusion: str, name: str) -> Any:
    if fusion == "late":
        assert first is not None and second is not None
        return _numpy(**{f"{name}_cls": first, f"{name}_vis": second})
    given = [each for each in (first, second) if each is not None]
    return _numpy(**{name: torch.stack(given).sum(0)})


def _sinusoid(case: dict[str, Any], arrays: Arrays, weights: dict[str, Tensor]) -> Any:
    config = case["config"]
    return _numpy(output=sinusoid(config["n_position"], config["d_hid"])[None])


def _block(case: dict[str, Any], arrays: Arrays, weights: dict[str, Tensor]) -> Any:
    config = case["config"]
    reading = _read({f"blocks.0.{name}": weight for name, weight in weights.items()}, case)
    fields = block_fields(reading)
    reading.take(VIT_BLOCKS)
    block = Block(
        fields["dim"], config["num_heads"], fields["mlp_dim"], qkv_bias=fields["qkv_bias"]
    )
    _loaded(block, reading, "trunk.blocks.0.")
    if config.get("qk_scale"):
        # A scale of its own instead of 1 / sqrt(width of a head) goes into the queries.
        own = config["qk_scale"] * (fields["dim"] // config["num_heads"]) ** 0.5
        with torch.no_grad():
            for parameter in block.attention.qkv.parameters():
                parameter[: fields["dim"]] *= own
    return _numpy(output=block(torch.from_numpy(arrays["input"])))


def _tokens(case: dict[str, Any], arrays: Arrays, weights: dict[str, Tensor]) -> Any:
    reading = _read(weights, case)
    fields = read_embedding(reading, "tokens.", case["config"].get("img_size"))
    config = SoTConfig(**{"dim": case["config"]["embed_dim"], "heads": 1} | UNSCALED | fields)
    embed = _loaded(token_embedding(config), reading, "trunk.embed.")
    return _numpy(output=embed(torch.from_numpy(arrays["input"])))


def _model(case: dict[str, Any], arrays: Arrays, weights: dict[str, Tensor]) -> Any:
    converted = official.convert(Original(case["id"], weights, config=case["config"]))
    model = SoT(replace(converted.config, **UNSCALED), fresh=False)
    model.load_state_dict(converted.weights)
    image = torch.from_numpy(arrays["image"]).permute(0, 2, 3, 1)
    with torch.no_grad():
        answer = model.eval().answer(image)
        pixels = torch.from_numpy(arrays["image"][:1])
        words = model.trunk.embed(pixels)
        tokens = model.trunk(image[:1])
    normed = torch.cat((tokens.class_tokens, tokens.words), 1)
    logits = _both(answer.class_logits, answer.word_logits, converted.config.fusion, "logits")
    return logits | _numpy(visual_tokens=words, norm_tokens=normed)


_KINDS: dict[str, Callable[[dict[str, Any], Any, dict[str, Tensor]], dict[str, np.ndarray]]] = {
    "svpn": _svpn,
    "svpn_illposed": _svpn,
    "covariance": _covariance,
    "mpn": _mpn,
    "covariance_mpn": _covariance_mpn,
    "epn": _epn,
    "scalenorm": _scale,
    "mgcrp": _mgcrp,
    "classifier": _classifier,
    "visual_classifier": _classifier,
    "sinusoid": _sinusoid,
    "vit_block": _block,
    "token_embed": _tokens,
    "sot": _model,
}
