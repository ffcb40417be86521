# SPDX-License-Identifier: Apache-2.0
"""Tensors that SPARO's own code made, against ours: read-outs, types, whole models, key lists."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_refusals import arrays_of, lines_of, weights_of

from saccade.models.official.conversion import Conversion, Original
from saccade.models.official.sources import clip, sparo
from saccade.models.sparo.config import ReadOutShape
from saccade.models.sparo.model import Sparo
from saccade.models.sparo.pooling import SlotReadOut, unit_code

# Our name of a read-out's parameter -> the authors'.
PARAMETERS = {
    "query": "q_emb",
    **{f"key.{n}": f"k.{n}" for n in ("weight", "bias")},
    **{f"value.{n}": f"v.{n}" for n in ("weight", "bias")},
    **{f"project.{n}": f"proj.{n}" for n in ("weight", "bias")},
}


def check(folder: Path) -> list[str]:
    """One line for each array that is further from ours than the manifest allows."""
    manifest = json.loads((folder / "manifest.json").read_text())
    runs = [(case["id"], partial(_check_case, folder, case)) for case in manifest["cases"]]
    files = [listed["file"] for listed in manifest["key_lists"]]
    runs += [(file, partial(check_keys, folder / file)) for file in files]
    return [line for name, run in runs for line in lines_of(name, run)]


def count(folder: Path) -> int:
    """Number of cases that `check` runs."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return len(manifest["cases"]) + len(manifest["key_lists"])


def _check_case(folder: Path, case: dict[str, Any]) -> Iterator[str]:
    arrays = arrays_of(folder, case)
    runs = {"sparo_module": run_module, "sparo_type": run_type}
    values = runs.get(case["kind"], run_clip)(case, arrays, weights_of(folder, case))
    recorded = set(arrays) - {"input", "probe", "eos_indices", "image", "text"}
    for name in sorted(recorded - set(values)):
        yield f"{case['id']}: {name} was not computed"
    for name in sorted(recorded & set(values)):
        error = np.abs(values[name] - arrays[name])
        allowed = case["tolerance"]["atol"][name] + case["tolerance"]["rtol"] * abs(arrays[name])
        if not np.all(error <= allowed):
            yield f"{case['id']}: {name} is off by {error.max():.2e}"


def run_module(
    case: dict[str, Any], arrays: dict[str, np.ndarray], weights: dict[str, torch.Tensor]
) -> dict[str, np.ndarray]:
    """Slots, attention and all gradients of one read-out in float64."""
    shape = module_shape(case["config"], case["shapes"])
    model = SlotReadOut(shape).double()
    state = {ours: weights[theirs] for ours, theirs in PARAMETERS.items() if theirs in weights}
    state["query"] = state["query"].reshape(-1, shape.attn_dim)
    if shape.share_kv:
        state = {name: value for name, value in state.items() if not name.startswith("value")}
    model.load_state_dict(state)
    x = torch.from_numpy(arrays["input"]).double().requires_grad_()
    end = torch.from_numpy(arrays["eos_indices"]) if case["config"]["eos"] else None
    slots, attention = model(x, end)
    (slots * torch.from_numpy(arrays["probe"])).sum().backward()
    values = {"slots": slots, "attn": attention, "grad/input": x.grad}
    for name, parameter in model.named_parameters():
        theirs = f"grad/{PARAMETERS[name]}"
        if theirs in arrays:
            values[theirs] = parameter.grad.reshape(arrays[theirs].shape)
    return {name: value.detach().numpy() for name, value in values.items()}


def module_shape(config: dict[str, Any], shapes: dict[str, Any]) -> ReadOutShape:
    group = shapes["slots_per_head"]
    return ReadOutShape(
        dim=config["dim"],
        head_of=tuple(slot // group for slot in range(config["L"])),
        attn_dim=config["attn_dim"],
        value_dim=config["value_dim"] or config["attn_dim"],
        slot_dim=config["V"],
        gated=False,
        share_kv=config["share_kv"],
    )


def run_type(
    case: dict[str, Any], arrays: dict[str, np.ndarray], weights: dict[str, torch.Tensor]
) -> dict[str, np.ndarray]:
    """The code of one type and its gradient in float64."""
    x = torch.from_numpy(arrays["input"]).double().requires_grad_()
    code = unit_code(x.unflatten(1, (case["config"]["L"], -1)), case["config"]["sparo_type"])
    (code * torch.from_numpy(arrays["probe"])).sum().backward()
    assert x.grad is not None
    return {"output": code.detach().numpy(), "grad/input": x.grad.numpy()}


def convert_case(case: dict[str, Any], weights: dict[str, torch.Tensor]) -> Conversion:
    """The case's file as `saccade convert` reads it."""
    source = sparo if case["config"].get("use_sparo") else clip
    config = {**case["config"], "quick_gelu": case["config"].get("quick_gelu", False)}
    return source.convert(Original(case["id"], weights, config=config))


def model_of(converted: Conversion) -> Sparo:
    """The converted model for pixels that were scaled before, in float64."""
    config = converted.config.from_dict(
        converted.config.to_dict() | {"mean": [0, 0, 0], "std": [1, 1, 1]}
    )
    model = Sparo(config, fresh=False)
    model.load_state_dict(converted.weights)
    return model.double().eval()


@torch.no_grad()
def run_clip(
    case: dict[str, Any], arrays: dict[str, np.ndarray], weights: dict[str, torch.Tensor]
) -> dict[str, np.ndarray]:
    """A whole model in float64 at the depth of tokens, slots, codes and logits."""
    model = model_of(convert_case(case, weights))
    pixels = torch.from_numpy(arrays["image"]).double().permute(0, 2, 3, 1) * 255
    tokens = torch.from_numpy(arrays["text"])
    image, text = model.encode_image(pixels), model.encode_text(tokens)
    logits = model(pixels, tokens)
    target = torch.arange(len(tokens))
    losses = [torch.nn.functional.cross_entropy(each, target) for each in (logits, logits.mT)]
    values = {
        "logits_per_image": logits,
        "logits_per_text": logits.mT,
        "logit_scale_exp": model.logit_scale.exp(),
        "clip_loss": sum(losses) / 2,
        "image_features": image.code,
        "text_features": text.code,
    }
    ends = ("image", image, model.image(pixels)), ("text", text, model.text(tokens))
    for name, pooled, trunk in ends:
        pool = getattr(model, f"{name}_pool")
        if pooled.slots is None:
            values[f"{name}_features_unnormalized"] = pooled.feature
        else:
            values[f"{name}_slots"], values[f"{name}_attn"] = pooled.slots, pooled.attention
            values[f"{name}_raw_slots"], values[f"{name}_tokens"] = pooled.raw, pool.norm(trunk)
    return {name: np.asarray(value) for name, value in values.items()}


def check_keys(path: Path) -> list[str]:
    """A full-size list of keys and shapes read without any weights, and its parameter count."""
    listed = json.loads(path.read_text())
    tensors = {
        entry["key"]: torch.empty(entry["shape"], device="meta") for entry in listed["entries"]
    }
    tied = {e["key"]: e["tied_to"] for e in listed["entries"] if "tied_to" in e}
    tensors |= {copy: tensors[source] for copy, source in tied.items()}
    source = sparo if listed["config"].get("use_sparo") else clip
    config = {**listed["config"], "quick_gelu": False}
    converted = source.convert(Original(path.name, tensors, config=config))
    with torch.device("meta"):
        model = Sparo(converted.config, fresh=False)
    failures = []
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    made = {name: tuple(value.shape) for name, value in converted.weights.items()}
    if wanted != made:
        failures.append(f"{path.name}: {sorted(set(wanted.items()) ^ set(made.items()))[:4]}")
    read = (set(converted.names.values()) | set(converted.ignored)) - {""}
    if read != set(tensors):
        failures.append(f"{path.name}: keys not read {sorted(set(tensors) ^ read)[:4]}")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters != listed["num_params"]:
        failures.append(f"{path.name}: {parameters} parameters, not {listed['num_params']}")
    return failures
