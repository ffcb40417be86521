# SPDX-License-Identifier: Apache-2.0
"""Recorded tensors of the authors' slot attention code, run through ours."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_refusals import lines_of

from saccade.models.official.conversion import Original, Reading
from saccade.models.official.sources import invariant_slot_attention as official
from saccade.models.official.tables import Rows
from saccade.models.scores.ari import adjusted_rand_index
from saccade.models.slot_attention.config import SlotConfig
from saccade.models.slot_attention.decoder import Decoder, Painting, segmentation
from saccade.models.slot_attention.encoders import Encoder
from saccade.models.slot_attention.fold import fold_attention
from saccade.models.slot_attention.model import SlotModel
from saccade.models.slot_attention.rounds import SlotAttention, SlotState

KINDS = {
    "SlotAttention": "sa",
    "SlotAttentionTranslEquiv": "t-sa",
    "SlotAttentionTranslScaleEquiv": "ts-sa",
}
MODES = {"abs": "sa", "pos": "t-sa", "scale": "ts-sa"}
Errors = Iterator[tuple[str, float, float]]  # what, how far off, how far is allowed


def check(folder: Path) -> list[str]:
    """One line for every recorded case that is not reproduced within its tolerance."""
    runs = [(case["id"], partial(errors, folder, case)) for case in _cases(folder)]
    runs.append(("fg_ari", partial(fg_ari_errors, folder)))
    return [line for name, run in runs for line in lines_of(name, partial(_far, name, run))]


def _far(name: str, run: "Callable[[], Errors]") -> Iterator[str]:
    for what, error, allowed in run():
        if not error <= allowed:
            yield f"{name}: {what} is {error:.3g} off, allowed {allowed:.3g}"


def count(folder: Path) -> int:
    """Number of cases that `check` runs."""
    return len(_cases(folder)) + len(_manifest(folder).get("fg_ari", {}).get("cases", ()))


def errors(folder: Path, case: dict[str, Any]) -> Errors:
    """Every comparison of one case, in float64 and in float32."""
    data = dict(np.load(folder / case["file"]))
    run: Callable[..., Errors] = {
        "attention": _attention,
        "decoder": _decoder,
        "encoder": _encoder,
        "model": _model,
    }[case["kind"]]
    for dtype, name in ((torch.float64, "float64"), (torch.float32, "float32")):
        allowed = case["tolerance"][name]["atol"]
        for what, actual, expected in run(case, data, dtype):
            error = np.abs(np.asarray(actual, np.float64) - expected).max()
            scale = max(1.0, float(np.abs(expected).max()))
            if what.startswith("gradient") and dtype == torch.float32:
                continue  # of some weights it cancels to rounding noise, in the recording too
            if what == "recon_loss":
                rtol = case["tolerance"]["recon_loss"]["rtol"]
                yield f"{what} {name}", error, max(allowed, rtol * float(np.abs(expected)))
            else:
                yield f"{what} {name}", error, allowed * scale if "gradient" in what else allowed


def fg_ari_errors(folder: Path) -> Errors:
    """FG-ARI and ARI of every recorded pair of segmentations."""
    section = _manifest(folder).get("fg_ari")
    if section is None:
        return
    data = np.load(folder / section["file"])
    for case in section["cases"]:
        name = case["id"]
        parts = [data[f"{name}/{part}"] for part in ("true", "pred", "padding_mask")]
        for key, foreground in (("fg_ari", True), ("ari", False)):
            scores = adjusted_rand_index(*parts[:2], foreground=foreground, valid=parts[2])
            error = np.abs(scores - data[f"{name}/{key}"]).max()
            yield f"{name} {key}", float(error), section["tolerance"]["float64"]["atol"]


def _manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def _cases(folder: Path) -> list[dict[str, Any]]:
    """The recorded cases but those with rotations, which saccade does not have."""
    turned = ("SlotAttentionTranslRotScaleEquiv", "rot")
    return [
        case
        for case in _manifest(folder)["cases"]
        if case["config"].get("cls", case["config"].get("mode")) not in turned
    ]


def parameters(data: dict[str, np.ndarray], prefix: str = "params/") -> dict[str, torch.Tensor]:
    """The recorded Flax parameters, or their gradients, by their names."""
    return {
        key.removeprefix(prefix): torch.from_numpy(np.array(value))
        for key, value in data.items()
        if key.startswith(prefix)
    }


def attention_fields(att: dict[str, Any]) -> dict[str, Any]:
    """Our fields of the recorded attention's configuration."""
    fixed = att.get("init_with_fixed_scale", 0.1)
    return {
        "attention": KINDS[att["cls"]],
        "rounds": att["num_iterations"],
        "qkv_dim": att["qkv_size"],
        "mlp_dim": att["mlp_size"] or 0,
        "heads": att.get("num_heads", 1),
        "grid_mlp_dim": att.get("grid_encoder", {}).get("hidden_size", 1),
        "values_see_grid": att.get("add_rel_pos_to_values", True),
        "scales_factor": att.get("scales_factor", 1.0),
        "temperature": att.get("softmax_temperature", 1.0),
        "position_start": "zero" if att.get("zero_position_init", True) else "state",
        "scale_start": fixed or 0.0,
    }


def _attention(case: dict[str, Any], data: dict[str, np.ndarray], dtype: torch.dtype) -> Iterator:
    recorded = case["config"]
    fields = attention_fields({"cls": recorded["cls"], **recorded["cfg"]})
    config = SlotConfig.from_dict(fields | {"slots": recorded["K"], "slot_dim": recorded["S"]})
    inputs = torch.from_numpy(data["inputs/inputs"]).to(dtype).requires_grad_()
    state = torch.from_numpy(data["inputs/slots"]).to(dtype).requires_grad_()
    module = SlotAttention(config, inputs.shape[-1])
    module.load_state_dict(_taken(data, official.attention_rows("", config)))
    module.to(dtype)
    attended, attention = module(inputs, state)
    yield "slots_out", attended.joined().detach(), data["out/slots_out"]
    yield "attention", torch.stack(attention).detach(), data["out/attn_softmax_over_slots"]
    folded, folded_attention = fold_attention(module)(inputs, state)
    yield "folded slots_out", folded.joined().detach(), data["out/slots_out"]
    last = data["out/attn_softmax_over_slots"][-1]
    yield "folded attention", folded_attention[-1].detach(), last
    for rounds in range(config.rounds):
        key = f"out/slots_out_after_{rounds}_iterations"
        if key in data:
            module.config = SlotConfig.from_dict(config.to_dict() | {"rounds": rounds})
            yield f"after {rounds} rounds", module(inputs, state)[0].joined().detach(), data[key]
    (attended.joined() * torch.from_numpy(data["inputs/cotangent"]).to(dtype)).sum().backward()
    yield "gradient of inputs", inputs.grad, data["out/grad_inputs"]
    yield "gradient of the state", state.grad, data["out/grad_slots"]
    rows = official.attention_rows("", config)
    yield from _gradients(module, _taken(data, rows, "out/grad_params/"))


def _taken(data: dict[str, np.ndarray], rows: Rows, prefix: str = "params/") -> dict[str, Any]:
    """Recorded parameters of one component under our names in it."""
    reading = Reading("", parameters(data, prefix))
    reading.take(rows)
    return {name.partition(".")[2]: value for name, value in reading.weights.items()}


def _decoder(case: dict[str, Any], data: dict[str, np.ndarray], dtype: torch.dtype) -> Iterator:
    recorded = case["config"]
    config = SlotConfig.from_dict(
        decoder_fields(recorded)
        | {"attention": MODES[recorded["mode"]], "slots": recorded["K"]}
        | {"slot_dim": recorded["S"]}
    )
    module = Decoder(config)
    rows = official.decoder_rows(Reading("", parameters(data)), "", config)
    module.load_state_dict(_taken(data, rows))
    state = torch.from_numpy(data["inputs/slots"]).to(dtype)[:, 0]
    with torch.no_grad():
        painting = module.to(dtype)(state_of(state, config))
    yield from _painted(painting, data)


def _encoder(case: dict[str, Any], data: dict[str, np.ndarray], dtype: torch.dtype) -> Iterator:
    recorded = case["config"]
    height, width = recorded["image"]
    config = SlotConfig.from_dict(
        encoder_fields(recorded) | {"height_px": height, "width_px": width}
    )
    module = Encoder(config)
    rows = official.encoder_rows(Reading("", parameters(data)), "")
    module.load_state_dict(_taken(data, rows))
    pixels = torch.from_numpy(data["inputs/video"]).to(dtype)[:, 0]
    with torch.no_grad():
        tokens = module.to(dtype)(pixels)
        trunk = module.trunk(pixels.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    yield "features", tokens[:, None], data["out/features"]
    yield "backbone", trunk[:, None], data["out/backbone"]


def _model(case: dict[str, Any], data: dict[str, np.ndarray], dtype: torch.dtype) -> Iterator:
    tensors = parameters(data)
    given = model_fields(case)
    converted = official.convert(Original(path=case["file"], tensors=tensors, config=given))
    model = SlotModel(converted.config, fresh=False)
    model.load_state_dict(converted.weights)
    model.to(dtype)
    image = 255 * torch.from_numpy(data["inputs/video"]).to(dtype)[:, 0]
    state = torch.from_numpy(data["inputs/initial_slots"]).to(dtype)
    answer, _, painting = model(image, state)
    yield "states", answer.joined().detach()[:, None], data["out/states"]
    yield from _painted(Painting(*(part.detach() for part in painting)), data)
    target = torch.from_numpy(data["inputs/target"]).to(dtype)[:, 0]
    loss = (painting.reconstruction - target).square().sum((1, 2, 3)).mean()
    yield "recon_loss", loss.item(), data["out/recon_loss"]
    loss.backward()
    tensors = tensors | parameters(data, "out/grad_params/")
    gradients = official.convert(Original(path=case["file"], tensors=tensors, config=given))
    yield from _gradients(model, gradients.weights)


def _gradients(module: torch.nn.Module, recorded: dict[str, torch.Tensor]) -> Iterator:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad, recorded[name].numpy()


def _painted(painting: Painting, data: dict[str, np.ndarray]) -> Iterator:
    yield "alphas", painting.alphas[:, None, ..., None], data["out/segmentation_logits"]
    yield "masks", painting.masks[:, None, ..., None], data["out/targets_masks"]
    yield "reconstruction", painting.reconstruction[:, None], data["out/video"]
    yield "layers", painting.layers[:, None], data["out/video_channels"]
    chosen = segmentation(painting.alphas)[:, None, ..., None]
    yield "segmentation", chosen, data["out/segmentations"]


def state_of(joined: torch.Tensor, config: SlotConfig) -> SlotState:
    """A state from its joined layout, as it is."""
    widths = [config.slot_dim, *[2] * (config.equivariant + config.scaled)]
    return SlotState(*joined.split(widths, -1))


def encoder_fields(recorded: dict[str, Any]) -> dict[str, Any]:
    """Our fields of the recorded encoder's configuration."""
    backbone, place = recorded["backbone"], recorded["pos"]
    fields = {"grid_embedding": place["update_type"], "grid_embedding_mlp": place.get("mlp", 0)}
    if backbone["type"] == "ResNet":
        return fields | {"encoder": "resnet", "resnet_stages": backbone["stage_sizes"]}
    return fields | {
        "encoder_channels": backbone["features"],
        "encoder_kernels": [size for size, _ in backbone["kernel_size"]],
        "encoder_strides": [stride for stride, _ in backbone["strides"]],
    }


def decoder_fields(recorded: dict[str, Any]) -> dict[str, Any]:
    """Our fields of the recorded decoder's configuration."""
    backbone = recorded["backbone"]
    height, width = recorded["resolution"]
    fields = {"decoder_height": height, "decoder_width": width}
    if backbone["type"] == "MLP":
        hidden = [backbone["hidden_size"]] * backbone["num_hidden_layers"]
        return fields | {"decoder": "mlp", "decoder_channels": [*hidden, backbone["output_size"]]}
    return fields | {
        "decoder": "cnn",
        "decoder_channels": backbone["features"],
        "decoder_kernels": [size for size, _ in backbone["kernel_size"]],
        "decoder_strides": [stride for stride, _ in backbone["strides"]],
        "decoder_transposed": backbone["layer_transpose"],
    }


def model_fields(case: dict[str, Any]) -> dict[str, Any]:
    """Fields that a user gives with --config to convert the recorded model."""
    recorded = case["config"]
    attention = attention_fields(recorded["att"])
    fields = {
        name: attention[name]
        for name in ("rounds", "values_see_grid", "scales_factor", "position_start", "scale_start")
        if attention["attention"] != "sa" or name == "rounds"
    }
    wanted = ("encoder_strides", "decoder_strides", "decoder_transposed")
    given = encoder_fields(recorded["enc"]) | decoder_fields(recorded["dec"])
    return fields | {name: given[name] for name in wanted if name in given}
