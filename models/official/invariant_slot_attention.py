# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the Invariant Slot Attention code (JAX and Flax), read into SlotModel."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.models.official.authors_images import authors_images
from saccade.models.official.conversion import Converted, Official, Reading
from saccade.models.slot_attention.config import SlotConfig

if TYPE_CHECKING:
    from torch import Tensor


class Translation(Reading):
    """Flax parameters being translated to our keys, with the origin of each.

    The methods take our key without `.weight` and `.bias`, and the Flax scope of the layer.
    """

    def has(self, key: str) -> bool:
        """Return True if the file has that tensor."""
        return key in self.tensors

    def scope_of(self, end: str, *, within: str) -> str:
        """Return the scope of the first key that ends with `end`.

        Raises: SaccadeError if there is none.
        """
        for key in self.tensors:
            if key.startswith(within) and (key == within + end or key.endswith("/" + end)):
                return key.removesuffix(end)
        raise SaccadeError(f"found no tensor {within}.../{end}, expected one. {_ASK}")

    def copy(self, ours: str, key: str) -> None:
        """Copy a tensor unchanged."""
        self._set(ours, self._get(key), key)

    def dense(self, ours: str, scope: str, *, inputs: int = 1) -> None:
        """Copy a Dense or DenseGeneral layer; its first `inputs` axes are the inputs."""
        kernel = self._get(scope + "/kernel")
        flat = kernel.flatten(0, inputs - 1).flatten(1) if kernel.dim() > 2 else kernel
        self._set(ours + ".weight", flat.mT, scope + "/kernel")
        self._bias(ours, scope)

    def norm(self, ours: str, scope: str) -> None:
        """Copy a LayerNorm or GroupNorm."""
        self._set(ours + ".weight", self._get(scope + "/scale"), scope + "/scale")
        self._bias(ours, scope)

    def conv(self, ours: str, scope: str) -> None:
        """Copy a convolution, whose kernel is (height, width, inputs, outputs)."""
        kernel = self._get(scope + "/kernel")
        self._set(ours + ".weight", kernel.permute(3, 2, 0, 1), scope + "/kernel")
        self._bias(ours, scope)

    def transposed_conv(self, ours: str, scope: str) -> None:
        """Copy a transposed convolution; torch mirrors its kernel, Flax does not."""
        kernel = self._get(scope + "/kernel").permute(2, 3, 0, 1).flip(2, 3)
        self._set(ours + ".weight", kernel, scope + "/kernel")
        self._bias(ours, scope)

    def gate(self, ours: str, scope: str) -> None:
        """Join a GRU cell's six layers into two; only inputs and the candidate have biases."""
        inputs = [f"{scope}/{gate}" for gate in ("ir", "iz", "in")]
        state = [f"{scope}/{gate}" for gate in ("hr", "hz", "hn")]
        self._join(ours + ".inputs.weight", [name + "/kernel" for name in inputs])
        self._join(ours + ".inputs.bias", [name + "/bias" for name in inputs])
        self._join(ours + ".state.weight", [name + "/kernel" for name in state])
        self.copy(ours + ".candidate_bias", scope + "/hn/bias")

    def _join(self, ours: str, keys: list[str]) -> None:
        import torch

        joined = torch.cat([self._get(key) for key in keys], -1)
        self._set(ours, joined.mT if joined.dim() == 2 else joined, ", ".join(keys))

    def _bias(self, ours: str, scope: str) -> None:
        if self.has(scope + "/bias"):
            self.copy(ours + ".bias", scope + "/bias")

    def _get(self, key: str) -> "Tensor":
        if key not in self.tensors:
            raise SaccadeError(f"found no tensor {key}, expected one. {_ASK}")
        return self.tensors[key]

    def _set(self, ours: str, value: "Tensor", key: str) -> None:
        self.put(ours, value.contiguous(), key)


_ASK = "Pass all parameters of the authors' model, and a --config that fits them."


SOURCE = "invariant-slot-attention"
# In the scope of the attention; the one with scale first, because its name contains the other.
_KINDS = {"TranslScaleEquiv": "ts-sa", "TranslEquiv": "t-sa", "SlotAttention_": "sa"}
# Values that all of the authors' configurations share and no file tells, by kind.
_STANDARD: dict[str, dict[str, Any]] = {
    "sa": {"rounds": 3},
    "t-sa": {"rounds": 3, "values_see_grid": True},
    "ts-sa": {
        "rounds": 3,
        "values_see_grid": True,
        "scales_factor": 5.0,
        "decoder_scales_factor": 5.0,
    },
}


def convert(official: Official) -> Converted:
    """Read a SlotModel; widths come from the file, strides from --config.

    Raises: SaccadeError naming the keys of --config that the file does not tell, or the first
        tensor that is missing.
    """
    scopes = _scopes(official)
    given = dict(official.config or {})
    config = _config(official, scopes, given)
    translation = Translation(official.path, official.tensors)
    attention(translation, scopes["attention"], "attention.", config)
    encoder(translation, scopes["encoder"], "encoder.", config)
    decoder(translation, scopes["decoder"], "decoder.", config)
    translation.copy("initial.slots", scopes["initial"] + "state_init")
    images = authors_images("invariant-slot-attention", config)
    standard = _STANDARD[config.attention].items()
    assumed = [f"{name} {value}" for name, value in standard if name not in given]
    notes = (f"assumed, as the authors' configurations have it: {', '.join(assumed)}",)
    return translation.converted(
        official, "slot-attention", config, images, notes if assumed else ()
    )


def attention(translation: Translation, scope: str, ours: str, config: SlotConfig) -> None:
    """Translate the rounds. Flax numbers layers by the order of calls, which varies by kind."""
    equivariant = config.equivariant
    translation.norm(ours + "norm_inputs", f"{scope}LayerNorm_{0 if equivariant else 1}")
    translation.norm(ours + "norm_slots", f"{scope}LayerNorm_{1 if equivariant else 0}")
    translation.dense(ours + "queries", scope + "general_dense_q_0")
    translation.dense(ours + "reader.keys", scope + "general_dense_k_0")
    translation.dense(ours + "reader.values", scope + "general_dense_v_0")
    if equivariant:
        translation.dense(ours + "reader.grid", scope + "dense_gp_0")
        if config.grid_norm:
            translation.norm(ours + "reader.norm", scope + "MLP_0/LayerNorm_0")
        translation.dense(ours + "reader.widen", scope + "MLP_0/dense_mlp_0")
        translation.dense(ours + "reader.narrow", scope + "MLP_0/dense_mlp_1")
    elif config.heads > 1:
        merge = scope + "InvertedDotProductAttention_0/DenseGeneral_0"
        translation.dense(ours + "reader.merge", merge, inputs=2)
    translation.gate(ours + "gate", scope + "GRU_0/GRUCell_0")
    if config.mlp_dim:
        _normed_mlp(translation, ours + "mlp", f"{scope}MLP_{1 if equivariant else 0}")


def encoder(translation: Translation, scope: str, ours: str, config: SlotConfig) -> None:
    """Translate the trunk and the grid embedding."""
    if config.encoder == "simple-cnn":
        trunk = translation.scope_of("conv_simple_0/kernel", within=scope)
        for index in range(len(config.encoder_channels)):
            layer = f"{ours}trunk.layers.{index}.conv"
            translation.conv(layer, f"{trunk}conv_simple_{index}")
    else:
        _resnet(translation, scope, ours + "trunk.", config)
    embedding = translation.scope_of("pos_embedding", within=scope)
    translation.copy(ours + "embedding.grid", embedding + "pos_embedding")
    if config.grid_embedding == "project_add":
        translation.dense(ours + "embedding.project", embedding + "dense_pe_0")
        if config.grid_embedding_mlp:
            _normed_mlp(translation, ours + "embedding.mlp", embedding + "MLP_0")


def decoder(translation: Translation, scope: str, ours: str, config: SlotConfig) -> None:
    """Translate the broadcast grid, the backbone, and the color and alpha layers."""
    embedding = translation.scope_of("pos_embedding", within=scope)
    translation.copy(ours + "grid", embedding + "pos_embedding")
    translation.dense(ours + "project", embedding + "dense_pe_0")
    for index in range(len(config.decoder_channels)):
        layer = f"{ours}backbone.layers.{index}"
        if config.decoder == "mlp":
            translation.dense(layer, f"{scope}MLP_0/dense_mlp_{index}")
        elif config.decoder_transposed[index]:
            translation.transposed_conv(layer + ".conv", f"{scope}CNN_0/conv_{index}")
        else:
            translation.conv(layer + ".conv", f"{scope}CNN_0/conv_{index}")
    translation.dense(ours + "alpha", scope + "alphas")
    translation.dense(ours + "colour", scope + "Readout_0/MLP_0/dense_mlp_0")


def _normed_mlp(translation: Translation, ours: str, scope: str) -> None:
    translation.norm(ours + ".0", scope + "/LayerNorm_0")
    translation.dense(ours + ".1", scope + "/dense_mlp_0")
    translation.dense(ours + ".3", scope + "/dense_mlp_1")


def _resnet(translation: Translation, scope: str, ours: str, config: SlotConfig) -> None:
    trunk = translation.scope_of("init_conv/kernel", within=scope)
    translation.conv(ours + "root.conv", trunk + "init_conv")
    translation.norm(ours + "root_norm", trunk + "init_bn")
    count = 0
    for stage, blocks in enumerate(config.resnet_stages, 1):
        for number in range(1, blocks + 1):
            block, here = f"{trunk}stage{stage}/block{number}/", f"{ours}blocks.{count}."
            translation.conv(here + "first.conv", block + "conv1")
            translation.norm(here + "first_norm", block + "bn1")
            translation.conv(here + "second.conv", block + "conv2")
            translation.norm(here + "second_norm", block + "bn2")
            if translation.has(block + "proj_conv/kernel"):
                translation.conv(here + "shortcut.0.conv", block + "proj_conv")
                translation.norm(here + "shortcut.1", block + "proj_bn")
            count += 1


def _scopes(official: Official) -> dict[str, str]:
    """Find the scopes of the components; their names depend on the version of Flax."""
    marks = {
        "attention": r"general_dense_q_0/kernel",
        "decoder": r"alphas/kernel",
        "initial": r"state_init",
        "encoder": r"[^/]+/(conv_simple_0|init_conv)/kernel",
    }
    scopes = {}
    for part, mark in marks.items():
        keys = [re.fullmatch(f"(.*?){mark}", key) for key in official.tensors]
        places = [match.group(1) for match in keys if match]
        if len(places) != 1:
            raise SaccadeError(
                f"{official.path}: found {len(places)} tensors named ...{mark} (the {part}), "
                f"expected one. Pass the parameters of an image model of {SOURCE}, "
                "without the optimizer's state."
            )
        scopes[part] = places[0]
    return scopes


def _config(official: Official, scopes: Mapping[str, str], given: dict[str, Any]) -> SlotConfig:
    tensors = official.tensors
    values = _attention_sizes(official, scopes["attention"], given)
    values |= _STANDARD.get(values["attention"], {})
    values |= _encoder_sizes(tensors, scopes["encoder"])
    values |= _decoder_sizes(tensors, scopes["decoder"])
    slots, slot_dim = tensors[scopes["initial"] + "state_init"].shape
    values |= {"slots": slots, "slot_dim": slot_dim}
    wanted = ["encoder_strides"] if values["encoder"] == "simple-cnn" else []
    if values["decoder"] == "cnn":
        wanted += ["decoder_strides", "decoder_transposed"]
    missing = [name for name in wanted if name not in given]
    if missing:
        layers = {name: len(values[f"{name.split('_')[0]}_channels"]) for name in missing}
        raise SaccadeError(
            f"{official.path}: the file does not contain {', '.join(missing)}. Pass --config with "
            f"these keys, one value per layer: {layers}."
        )
    grow = 1
    if values["decoder"] == "cnn":
        turned = zip(given["decoder_strides"], given["decoder_transposed"], strict=False)
        for stride, transposed in turned:
            grow *= stride if transposed else 1
    values["height_px"] = values["decoder_height"] * grow
    values["width_px"] = values["decoder_width"] * grow
    return SlotConfig.from_dict(values | given)


def _attention_sizes(official: Official, scope: str, given: dict[str, Any]) -> dict[str, Any]:
    tensors = official.tensors
    keys = tensors[scope + "general_dense_k_0/kernel"]
    kinds = [kind for name, kind in _KINDS.items() if name in scope]
    kind = given.get("attention") or ("sa" if keys.dim() == 3 else next(iter(kinds), None))
    if kinds and kind != kinds[0]:
        raise SaccadeError(
            f"{official.path}: --config has attention {kind!r}, but the scope {scope!r} belongs to "
            f"{kinds[0]!r}. Leave the key out."
        )
    if kind is None:
        raise SaccadeError(
            f"{official.path}: the scope {scope!r} does not tell whether slots have scales. "
            'Pass --config with the key "attention": "t-sa" or "ts-sa".'
        )
    slot_mlp, grid_mlp = ("MLP_0/", "") if kind == "sa" else ("MLP_1/", "MLP_0/")
    values = {
        "attention": kind,
        "heads": keys.shape[1] if keys.dim() == 3 else 1,
        "qkv_dim": keys[0].numel(),
        "mlp_dim": _width(tensors, f"{scope}{slot_mlp}dense_mlp_0/bias"),
        "grid_norm": f"{scope}MLP_0/LayerNorm_0/scale" in tensors,
    }
    if grid_mlp:
        values["grid_mlp_dim"] = _width(tensors, f"{scope}{grid_mlp}dense_mlp_0/bias")
    return values


def _encoder_sizes(tensors: "Mapping[str, Tensor]", scope: str) -> dict[str, Any]:
    convs = _layers(tensors, scope + r"[^/]+/conv_simple_(\d+)/kernel")
    added = [key for key in tensors if key.startswith(scope) and key.endswith("dense_pe_0/kernel")]
    place = added[0].removesuffix("dense_pe_0/kernel") if added else ""
    values: dict[str, Any] = {"grid_embedding": "project_add" if added else "concat"}
    if added:
        values["grid_embedding_mlp"] = _width(tensors, place + "MLP_0/dense_mlp_0/bias")
    if convs:
        return values | {
            "encoder": "simple-cnn",
            "channels": convs[0].shape[2],
            "encoder_channels": [kernel.shape[3] for kernel in convs],
            "encoder_kernels": [kernel.shape[0] for kernel in convs],
        }
    pattern = re.compile(re.escape(scope) + r"[^/]+/stage(\d+)/block(\d+)/conv1/kernel")
    blocks = [match.groups() for key in tensors if (match := pattern.fullmatch(key))]
    stages = sorted({int(stage) for stage, _ in blocks})
    root = next(value for key, value in tensors.items() if key.endswith("init_conv/kernel"))
    return values | {
        "encoder": "resnet",
        "channels": root.shape[2],
        "resnet_width": root.shape[3],
        "resnet_stages": [sum(int(index) == stage for index, _ in blocks) for stage in stages],
    }


def _decoder_sizes(tensors: "Mapping[str, Tensor]", scope: str) -> dict[str, Any]:
    grid = next(
        value
        for key, value in tensors.items()
        if key.startswith(scope) and key.endswith("pos_embedding")
    )
    values: dict[str, Any] = {"decoder_height": grid.shape[1], "decoder_width": grid.shape[2]}
    convs = _layers(tensors, scope + r"CNN_0/conv_(\d+)/kernel")
    if not convs:
        layers = _layers(tensors, scope + r"MLP_0/dense_mlp_(\d+)/kernel")
        channels = [kernel.shape[-1] for kernel in layers]
        return values | {"decoder": "mlp", "decoder_channels": channels}
    return values | {
        "decoder": "cnn",
        "decoder_channels": [kernel.shape[-1] for kernel in convs],
        "decoder_kernels": [kernel.shape[0] for kernel in convs],
    }


def _layers(tensors: "Mapping[str, Tensor]", pattern: str) -> "list[Tensor]":
    matches = [(re.fullmatch(pattern, key), value) for key, value in tensors.items()]
    numbered = {int(match.group(1)): value for match, value in matches if match}
    return [numbered[index] for index in sorted(numbered)]


def _width(tensors: "Mapping[str, Tensor]", key: str) -> int:
    return tensors[key].shape[0] if key in tensors else 0
