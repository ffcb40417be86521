# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the Invariant Slot Attention code (JAX and Flax), read into SlotModel.

Flax numbers layers by the order of calls, which varies by the kind of attention.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count
from saccade.models.official.authors_images import authors_images
from saccade.models.official.conversion import Conversion, Original, Reading
from saccade.models.official.json_files import declared
from saccade.models.official.tables import Row, Rows
from saccade.models.slot_attention.config import SlotConfig

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "invariant-slot-attention"
# In the scope of the attention; the one with scale first, because its name contains the other.
_KINDS = {"TranslScaleEquiv": "ts-sa", "TranslEquiv": "t-sa", "SlotAttention_": "sa"}
# Values that all of the authors' configurations share and no file tells, by kind.
_STANDARD: dict[str, dict[str, Any]] = {"sa": {"rounds": 3}}
_STANDARD["t-sa"] = _STANDARD["sa"] | {"values_see_grid": True}
_SCALES = {"scales_factor": 5.0, "decoder_scales_factor": 5.0}
_STANDARD["ts-sa"] = _STANDARD["t-sa"] | _SCALES
# What tells the scope of a component; its name depends on the version of Flax.
_MARKS = {
    "attention": r"general_dense_q_0/kernel",
    "decoder": r"alphas/kernel",
    "initial": r"state_init",
    "encoder": r"[^/]+/(?:conv_simple_0|init_conv)/kernel",
}


@dataclass(frozen=True)
class StridesJson:
    """What --config tells of the decoder's convolutions; the other keys are our fields."""

    decoder_strides: tuple[Count, ...] = ()
    decoder_transposed: tuple[bool, ...] = ()


def _dense(kernel: "Tensor") -> "Tensor":
    """Return the weight of a Dense or DenseGeneral layer, whose first axis is the input."""
    return kernel.flatten(1).mT


def _merge(kernel: "Tensor") -> "Tensor":
    """Return the weight of a DenseGeneral layer whose first two axes are the inputs."""
    return kernel.flatten(0, 1).mT


def _conv(kernel: "Tensor") -> "Tensor":
    """Return the weight of a convolution; theirs is (height, width, inputs, outputs)."""
    return kernel.permute(3, 2, 0, 1)


def _transposed_conv(kernel: "Tensor") -> "Tensor":
    """Return the weight of a transposed one; torch mirrors its kernel, Flax does not."""
    return kernel.permute(2, 3, 0, 1).flip(2, 3)


def _gates(*kernels: "Tensor") -> "Tensor":
    """Join the layers of a GRU cell's gates."""
    import torch

    return torch.cat(kernels, -1).mT


def _biases(*biases: "Tensor") -> "Tensor":
    import torch

    return torch.cat(biases)


def _layer(ours: str, scope: str, made: "Callable[[Tensor], Tensor]" = _dense) -> Rows:
    return (Row(f"{ours}.weight", f"{scope}/kernel", made), Row(f"{ours}.bias", f"{scope}/bias"))


def _norm(ours: str, scope: str) -> Rows:
    return Row(f"{ours}.weight", f"{scope}/scale"), Row(f"{ours}.bias", f"{scope}/bias")


def _normed_mlp(ours: str, scope: str) -> Rows:
    return (
        *_norm(f"{ours}.0", f"{scope}/LayerNorm_0"),
        *_layer(f"{ours}.1", f"{scope}/dense_mlp_0"),
        *_layer(f"{ours}.3", f"{scope}/dense_mlp_1"),
    )


def convert(official: Original) -> Conversion:
    """Read a SlotModel; widths come from the file, strides from --config.

    Raises: SaccadeError naming the keys of --config that the file does not tell.
    """
    reading, given = (Reading(official.path, official.tensors), dict(official.config or {}))
    scopes = {part: _scope(reading, part) for part in _MARKS}
    config = _config(reading, scopes, given)
    reading.take(attention_rows(scopes["attention"], config))
    reading.take(encoder_rows(reading, scopes["encoder"]))
    reading.take(decoder_rows(reading, scopes["decoder"], config))
    reading.take((Row("initial.slots", f"{scopes['initial']}state_init"),))
    images = authors_images(SOURCE, config)
    standard = _STANDARD[config.attention].items()
    assumed = [f"{name} {value}" for name, value in standard if name not in given]
    notes = (f"assumed, as the authors' configurations have it: {', '.join(assumed)}",)
    return reading.converted(official, "slot-attention", config, images, notes if assumed else ())


def attention_rows(scope: str, config: SlotConfig) -> Rows:
    """Return the rows of the rounds."""
    first, second = (0, 1) if config.equivariant else (1, 0)
    cell, merge = (
        f"{scope}GRU_0/GRUCell_0",
        f"{scope}InvertedDotProductAttention_0/DenseGeneral_0",
    )
    inputs, state = ([f"{cell}/{gate}" for gate in gates] for gates in (_INPUTS, _STATE))
    return (
        *_norm("attention.norm_inputs", f"{scope}LayerNorm_{first}"),
        *_norm("attention.norm_slots", f"{scope}LayerNorm_{second}"),
        *_layer("attention.queries", f"{scope}general_dense_q_0"),
        *_layer("attention.reader.keys", f"{scope}general_dense_k_0"),
        *_layer("attention.reader.values", f"{scope}general_dense_v_0"),
        *(_grid_rows(scope) if config.equivariant else ()),
        *_layer("attention.reader.merge", merge, _merge),
        # Only inputs and the candidate have biases.
        Row("attention.gate.inputs.weight", tuple(f"{x}/kernel" for x in inputs), _gates),
        Row("attention.gate.inputs.bias", tuple(f"{x}/bias" for x in inputs), _biases),
        Row("attention.gate.state.weight", tuple(f"{x}/kernel" for x in state), _gates),
        Row("attention.gate.candidate_bias", f"{cell}/hn/bias"),
        *_normed_mlp("attention.mlp", f"{scope}MLP_{second}"),
    )


_INPUTS, _STATE = ("ir", "iz", "in"), ("hr", "hz", "hn")


def _grid_rows(scope: str) -> Rows:
    return (
        *_layer("attention.reader.grid", f"{scope}dense_gp_0"),
        *_norm("attention.reader.norm", f"{scope}MLP_0/LayerNorm_0"),
        *_layer("attention.reader.widen", f"{scope}MLP_0/dense_mlp_0"),
        *_layer("attention.reader.narrow", f"{scope}MLP_0/dense_mlp_1"),
    )


def encoder_rows(reading: Reading, scope: str) -> Rows:
    """Return the rows of the trunk and the grid embedding."""
    grid, trunk = _within(reading, scope, "pos_embedding"), _trunk(reading, scope)
    return (
        *_layer("encoder.trunk.layers.#.conv", f"{trunk}conv_simple_#", _conv),
        *_layer("encoder.trunk.root.conv", f"{trunk}init_conv", _conv),
        *_norm("encoder.trunk.root_norm", f"{trunk}init_bn"),
        *_resnet_rows(reading, trunk),
        Row("encoder.embedding.grid", f"{grid}pos_embedding"),
        *_layer("encoder.embedding.project", f"{grid}dense_pe_0"),
        *_normed_mlp("encoder.embedding.mlp", f"{grid}MLP_0"),
    )


def _resnet_rows(reading: Reading, trunk: str) -> Rows:
    rows: list[Row] = []
    stages = enumerate(_stages(reading, trunk), 1)
    blocks = [f"stage{stage}/block{i + 1}" for stage, count in stages for i in range(count)]
    for index, block in enumerate(blocks):
        ours, theirs = f"encoder.trunk.blocks.{index}", f"{trunk}{block}"
        for name, mine in {"1": "first", "2": "second"}.items():
            rows += _layer(f"{ours}.{mine}.conv", f"{theirs}/conv{name}", _conv)
            rows += _norm(f"{ours}.{mine}_norm", f"{theirs}/bn{name}")
        rows += _layer(f"{ours}.shortcut.0.conv", f"{theirs}/proj_conv", _conv)
        rows += _norm(f"{ours}.shortcut.1", f"{theirs}/proj_bn")
    return tuple(rows)


def decoder_rows(reading: Reading, scope: str, config: SlotConfig) -> Rows:
    """Return the rows of the broadcast grid, the backbone, and the color and alpha layers."""
    grid = _within(reading, scope, "pos_embedding")
    convolutions = [
        row
        for index, transposed in enumerate(config.decoder_transposed)
        for row in _layer(
            f"decoder.backbone.layers.{index}.conv",
            f"{scope}CNN_0/conv_{index}",
            _transposed_conv if transposed else _conv,
        )
    ]
    return (
        Row("decoder.grid", f"{grid}pos_embedding"),
        *_layer("decoder.project", f"{grid}dense_pe_0"),
        *_layer("decoder.backbone.layers.#", f"{scope}MLP_0/dense_mlp_#"),
        *convolutions,
        *_layer("decoder.alpha", f"{scope}alphas"),
        *_layer("decoder.colour", f"{scope}Readout_0/MLP_0/dense_mlp_0"),
    )


def _scope(reading: Reading, part: str) -> str:
    """Return the scope of a component.

    Raises: SaccadeError unless there is exactly one.
    """
    matches = [re.fullmatch(f"(.*?){_MARKS[part]}", key) for key in reading.tensors]
    places = [match[1] for match in matches if match]
    if len(places) != 1:
        raise SaccadeError(
            f"{reading.path}: found {len(places)} tensors named ...{_MARKS[part]} (the {part}), "
            f"expected one. Pass the parameters of an image model of {SOURCE}, "
            "without the optimizer's state."
        )
    return places[0]


def _within(reading: Reading, scope: str, *ends: str) -> str:
    """Return the scope of the first key in a scope that has one of these ends.

    Raises: SaccadeError if there is none.
    """
    for key in reading.tensors:
        for end in ends:
            if key.startswith(scope) and (key == scope + end or key.endswith(f"/{end}")):
                return key.removesuffix(end)
    raise SaccadeError(
        f"{reading.path}: found no tensor {scope}.../{ends[0]}, expected one. Pass all parameters "
        "of the authors' model, and a --config that fits them."
    )


def _trunk(reading: Reading, scope: str) -> str:
    return _within(reading, scope, "conv_simple_0/kernel", "init_conv/kernel")


def _config(reading: Reading, scopes: dict[str, str], given: dict[str, Any]) -> SlotConfig:
    values = _attention_sizes(reading, scopes["attention"], given)
    values |= _STANDARD.get(values["attention"], {})
    values |= _encoder_sizes(reading, scopes["encoder"]) | _decoder_sizes(
        reading, scopes["decoder"]
    )
    values["slots"], values["slot_dim"] = reading.shape(f"{scopes['initial']}state_init", 2)
    wanted = ["encoder_strides"] if values["encoder"] == "simple-cnn" else []
    if values["decoder"] == "cnn":
        wanted += ["decoder_strides", "decoder_transposed"]
    missing = [name for name in wanted if name not in given]
    if missing:
        layers = {name: len(values[f"{name.split('_')[0]}_channels"]) for name in missing}
        raise SaccadeError(
            f"{reading.path}: the file does not contain {', '.join(missing)}. Pass --config with "
            f"these keys, one value per layer: {layers}."
        )
    grow = 1
    if values["decoder"] == "cnn":
        json = declared(StridesJson, given)
        turned = zip(json.decoder_strides, json.decoder_transposed, strict=False)
        for stride, transposed in turned:
            grow *= stride if transposed else 1
    values["height_px"] = values["decoder_height"] * grow
    values["width_px"] = values["decoder_width"] * grow
    return SlotConfig.from_dict(values | given)


def _attention_sizes(reading: Reading, scope: str, given: dict[str, Any]) -> dict[str, Any]:
    _, *heads, width = reading.shape(f"{scope}general_dense_k_0/kernel")
    named = next((kind for name, kind in _KINDS.items() if name in scope), None)
    kind = given.get("attention") or ("sa" if heads else named)
    if named is not None and kind != named:
        raise SaccadeError(
            f"{reading.path}: --config has attention {kind!r}, but the scope {scope!r} belongs to "
            f"{named!r}. Leave the key out."
        )
    if kind is None:
        raise SaccadeError(
            f"{reading.path}: the scope {scope!r} does not tell whether slots have scales. "
            'Pass --config with the key "attention": "t-sa" or "ts-sa".'
        )
    widths = [reading.size(f"{scope}MLP_{number}/dense_mlp_0/bias") for number in (0, 1)]
    count = heads[0] if heads else 1
    values = {"attention": kind, "heads": count, "qkv_dim": count * width}
    values["grid_norm"] = f"{scope}MLP_0/LayerNorm_0/scale" in reading.tensors
    if kind == "sa":
        return values | {"mlp_dim": widths[0]}
    return values | {"mlp_dim": widths[1], "grid_mlp_dim": widths[0]}


def _encoder_sizes(reading: Reading, scope: str) -> dict[str, Any]:
    added = [k for k in reading.tensors if k.startswith(scope) and k.endswith("dense_pe_0/kernel")]
    values: dict[str, Any] = {"grid_embedding": "project_add" if added else "concat"}
    if added:
        mlp = f"{added[0].removesuffix('dense_pe_0/kernel')}MLP_0/dense_mlp_0/bias"
        values["grid_embedding_mlp"] = reading.size(mlp)
    trunk = _trunk(reading, scope)
    if convs := _shapes(reading, f"{trunk}conv_simple_#/kernel"):
        return values | {
            "encoder": "simple-cnn",
            "channels": convs[0][2],
            "encoder_channels": [shape[3] for shape in convs],
            "encoder_kernels": [shape[0] for shape in convs],
        }
    *_, channels, width = reading.shape(f"{trunk}init_conv/kernel", 4)
    return values | {
        "encoder": "resnet",
        "channels": channels,
        "resnet_width": width,
        "resnet_stages": _stages(reading, trunk),
    }


def _stages(reading: Reading, trunk: str) -> list[int]:
    """Return the number of blocks per stage, which count from 1."""
    stages = range(1, reading.depth(f"{trunk}stage#/"))
    return [reading.depth(f"{trunk}stage{stage}/block#/") - 1 for stage in stages]


def _decoder_sizes(reading: Reading, scope: str) -> dict[str, Any]:
    grid = _within(reading, scope, "pos_embedding")
    _, height, width, _ = reading.shape(f"{grid}pos_embedding", 4)
    values: dict[str, Any] = {"decoder_height": height, "decoder_width": width}
    convs = _shapes(reading, f"{scope}CNN_0/conv_#/kernel")
    if not convs:
        dense = _shapes(reading, f"{scope}MLP_0/dense_mlp_#/kernel")
        return values | {"decoder": "mlp", "decoder_channels": [shape[-1] for shape in dense]}
    return values | {
        "decoder": "cnn",
        "decoder_channels": [shape[-1] for shape in convs],
        "decoder_kernels": [shape[0] for shape in convs],
    }


def _shapes(reading: Reading, template: str) -> list[tuple[int, ...]]:
    """Return the shapes of numbered layers' tensors."""
    count = reading.depth(template)
    return [reading.shape(template.replace("#", str(index))) for index in range(count)]
