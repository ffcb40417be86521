# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the NAC authors: the state dict of their model becomes a NAC of that form."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.core.errors import SaccadeError
from saccade.models.nac.config import NACConfig
from saccade.models.nac.generator import Circuit
from saccade.models.nac.kernel import Kernel
from saccade.models.nac.prune import circuit_order
from saccade.models.official.authors_images import authors_images
from saccade.models.official.conversion import Converted, Official, Reading
from saccade.models.official.given_files import whole_number
from saccade.models.official.nac_forms import (
    GRAPH,
    NACForm,
    bandwidths,
    check_told,
    circuit_fields,
    form_of,
    image_fields,
)
from saccade.models.official.vit_keys import hint

if TYPE_CHECKING:
    from torch import Tensor

_ATTENTION = (r"fn\.to_q\.(weight)", "query_compiler.lin"), (r"fn\.to_out\.(.*)", "exit_layer.lin")
_NORMS = (r"norm\.(.*)", "receiver_layernorm"), (r"norm_context\.(.*)", "sender_layernorm")
_FFN = (
    (r"norm\.(.*)", "layernorm"),
    (r"fn\.net\.0\.(.*)", "ffn.0.lin"),
    (r"fn\.net\.2\.(.*)", "ffn.2.lin"),
)
_PLACES = (
    (r"cross_attend_blocks\.0\.", "read_in.read_in_attention.", (*_ATTENTION, *_NORMS)),
    (r"cross_attend_blocks\.1\.", "read_in.ffn.", _FFN),
    (r"layers\.(\d+)\.0\.", r"propagators.\1.latent_attention.", (*_ATTENTION, *_NORMS)),
    (r"layers\.(\d+)\.1\.", r"propagators.\1.ffn.", _FFN),
    (r"decoder_cross_attn\.", "read_out.latent_attention.", (*_ATTENTION, *_NORMS)),
    (r"decoder_ff\.", "read_out.ffn.", _FFN),
)
_WHOLE = {
    "latents": "input_latents.codes_",
    "classification_query": "output_latents.codes_",
    "to_logits.weight": "read_out.head.1.lin.weight",
    "to_logits.bias": "read_out.head.1.lin.bias",
}


def is_perceiver(tensors: "Mapping[str, Tensor]") -> bool:
    """Return True if the file contains the Perceiver IO baseline."""
    return "latents" in tensors and "decoder_cross_attn.fn.to_q.weight" in tensors


def renamed(tensors: "Mapping[str, Tensor]") -> "tuple[dict[str, Tensor], dict[str, str]]":
    """Return the tensors by the names of the NAC, and the file's key for each of these names.

    Keys and values share one tensor, the keys first. Unknown names stay as they are.
    """
    ours_by_name: dict[str, Tensor] = {}
    keys: dict[str, str] = {}
    for key, value in tensors.items():
        pair = re.fullmatch(r"(.*)fn\.to_kv\.weight", key)
        if pair is not None and (place := _place(pair[1])) is not None:
            names = [f"{GRAPH}{place}{kind}_compiler.lin.weight" for kind in ("key", "value")]
            ours_by_name |= dict(zip(names, value.chunk(2), strict=True))
        else:
            names = [_name(key)]
            ours_by_name[names[0]] = value
        keys |= dict.fromkeys(names, key)
    return ours_by_name, keys


def _place(start: str) -> str | None:
    for pattern, ours, _ in _PLACES:
        if match := re.fullmatch(pattern, start):
            return match.expand(ours)
    return None


def _name(key: str) -> str:
    if key in _WHOLE:
        return GRAPH + _WHOLE[key]
    if key.startswith("tokenizer."):
        return f"input_{key}"
    for pattern, ours, parts in _PLACES:
        for part, name in parts:
            if match := re.fullmatch(pattern + part, key):
                return f"{GRAPH}{match.expand(ours)}{name}.{match[match.lastindex or 0]}"
    return key


def perceiver_form(official: Official) -> NACForm:
    """Return the form of the baseline: no kernel, heads of 64 unless --config has others."""
    config = hint(official.config, "model", "kwargs", default=official.config)
    wide = whole_number(hint(config, "latent_dim_head", default=64), "latent_dim_head")
    read = whole_number(hint(config, "cross_dim_head", default=64), "cross_dim_head")
    return NACForm(head_dim=wide, read_in_head_dim=read, read_out_head_dim=read, dense=True)


CONVNEXT = (
    (r"downsample_layers\.(\d+)\.([01])\.(weight|bias)", None),
    (r"stages\.(\d+)\.(\d+)\.gamma", r"stages.\1.blocks.\2.gamma"),
    (r"stages\.(\d+)\.(\d+)\.dwconv\.(weight|bias)", r"stages.\1.blocks.\2.depthwise.\3"),
    (r"stages\.(\d+)\.(\d+)\.norm\.(weight|bias)", r"stages.\1.blocks.\2.norm.\3"),
    (r"stages\.(\d+)\.(\d+)\.pwconv1\.(weight|bias)", r"stages.\1.blocks.\2.widen.\3"),
    (r"stages\.(\d+)\.(\d+)\.pwconv2\.(weight|bias)", r"stages.\1.blocks.\2.narrow.\3"),
)
ATTENTION = {"query": "query_compiler", "key": "key_compiler", "value": "value_compiler"}


def put_norm(reading: Reading, theirs: str, ours: str) -> None:
    """Put the weight and bias of a LayerNorm, or of a linear layer."""
    for name in ("weight", "bias"):
        reading.shape(f"{theirs}.{name}")
        reading.put(f"{ours}.{name}", reading.tensors[f"{theirs}.{name}"], f"{theirs}.{name}")


def put_modfc(reading: Reading, theirs: str, ours: str, *, scale: str | None = None) -> None:
    """Put a ModFC or FC; `scale` names the layer scale after it, which is folded into its rows.

    A layer without bias gets a bias of zeros.
    """
    plain = f"{theirs}.lin.weight" in reading.tensors
    key, bias = (
        (f"{theirs}.lin.weight", f"{theirs}.lin.bias")
        if plain
        else (
            f"{theirs}.native_weight",
            f"{theirs}.native_bias",
        )
    )
    rows, _ = reading.shape(key)
    weight = reading.tensors[key]
    behind = reading.tensors.get(f"{scale}.gamma") if scale else None
    used = () if behind is None else (f"{scale}.gamma",)
    scaled = weight if behind is None else weight * behind[:, None]
    reading.put(f"{ours}.linear.weight", scaled, key, *used)
    if bias in reading.tensors:
        shift = reading.tensors[bias]
        shift = shift if behind is None else shift * behind
        reading.put(f"{ours}.linear.bias", shift, bias, *used)
    else:
        reading.put(f"{ours}.linear.bias", weight.new_zeros(rows))
    if not plain:
        name = f"{theirs}.scale.weight"
        reading.shape(name)
        reading.put(f"{ours}.code.weight", reading.tensors[name], name)
        if f"{theirs}.scale_gain" in reading.tensors:
            gain = f"{theirs}.scale_gain"
            reading.put(f"{ours}.alpha", reading.tensors[gain], gain)


def put_attention(reading: Reading, theirs: str, ours: str) -> None:
    """Put queries, keys, values and the exit layer with its layer scale."""
    for mine, name in ATTENTION.items():
        put_modfc(reading, f"{theirs}.{name}", f"{ours}.{mine}")
    put_modfc(reading, f"{theirs}.exit_layer", f"{ours}.output", scale=f"{theirs}.layer_scale")


def put_ffn(reading: Reading, theirs: str, ours: str, *, norm: str) -> None:
    """Put a ModFFN with the LayerNorm in front of it, which is called `norm` here."""
    put_norm(reading, f"{theirs}.layernorm", norm)
    put_modfc(reading, f"{theirs}.ffn.0", f"{ours}.widen")
    put_modfc(reading, f"{theirs}.ffn.2", f"{ours}.narrow", scale=f"{theirs}.layer_scale")


def put_read_in(reading: Reading, theirs: str, *, tokens: str | None) -> None:
    """Put the read-in; its LayerNorm of tokens becomes the tokenizer's last one, `tokens`."""
    attention = f"{theirs}read_in_attention"
    if tokens is not None:
        put_norm(reading, f"{attention}.sender_layernorm", tokens)
    put_norm(reading, f"{attention}.receiver_layernorm", "read_in.norm_query")
    put_attention(reading, attention, "read_in")
    put_ffn(reading, f"{theirs}ffn", "read_in.ffn", norm="read_in.norm")


def put_propagator(reading: Reading, theirs: str, ours: str) -> None:
    """Put one propagator."""
    attention = f"{theirs}latent_attention"
    put_norm(reading, f"{attention}.receiver_layernorm", f"{ours}norm_attention")
    if f"{attention}.sender_layernorm.weight" in reading.tensors:
        put_norm(reading, f"{attention}.sender_layernorm", f"{ours}norm_senders")
    put_attention(reading, attention, ours.rstrip("."))
    put_ffn(reading, f"{theirs}ffn", f"{ours}ffn", norm=f"{ours}norm_ffn")


def put_read_out(reading: Reading, theirs: str) -> None:
    """Put the read-out, and its head if it has one."""
    attention = f"{theirs}latent_attention"
    put_norm(reading, f"{attention}.receiver_layernorm", "read_out.norm_query")
    shared = f"{attention}.sender_layernorm.weight" not in reading.tensors
    senders = "receiver_layernorm" if shared else "sender_layernorm"
    put_norm(reading, f"{attention}.{senders}", "read_out.norm_states")
    put_attention(reading, attention, "read_out")
    put_ffn(reading, f"{theirs}ffn", "read_out.ffn", norm="read_out.norm")
    if f"{theirs}head.0.module.weight" in reading.tensors:
        put_norm(reading, f"{theirs}head.0.module", "head_norm")
    if f"{theirs}head.1.native_weight" in reading.tensors:
        put_modfc(reading, f"{theirs}head.1", "head")
    elif f"{theirs}head.1.lin.weight" in reading.tensors:
        put_norm(reading, f"{theirs}head.1.lin", "head")


def put_pool(reading: Reading, theirs: str, ours: str, *, temperature: float) -> None:
    """Put the confidence scorer, divided by the temperature of its softmax, and the last layer."""
    for name in ("weight", "bias"):
        key = f"{theirs}confidence_scorer.{name}"
        reading.shape(key)
        reading.put(f"{ours}read_out.pool.score.{name}", reading.tensors[key] / temperature, key)
    put_norm(reading, f"{theirs}to_logits", f"{ours}head")


def put_seeder(reading: Reading, theirs: str, ours: str) -> None:
    """Put the layers that turn a code into an initial state, if that is not the code itself."""
    parts = {
        "layernorm": "norm",
        "code_to_state_mu": "mean",
        "code_to_state_logvar": "log_variance",
    }
    for name, mine in parts.items():
        if f"{theirs}{name}.weight" in reading.tensors:
            put_norm(reading, f"{theirs}{name}", f"{ours}{mine}")


def put_tokenizer(reading: Reading, theirs: str, ours: str) -> None:
    """Put the stages of the ConvNeXt and the grid of positions.

    In the first stage the LayerNorm follows the convolution; in the others it precedes it.
    """
    backbone = f"{theirs}backbone."
    for key in reading.tensors:
        if key.startswith(backbone):
            name = our_stage(key.removeprefix(backbone))
            if name is not None:
                reading.put(f"{ours}{name}", reading.tensors[key], key)
    grid = f"{theirs}positional_grid.grid"
    if grid in reading.tensors:
        reading.put(f"{ours}position", rows_of(reading.tensors[grid]), grid)


def our_stage(name: str) -> str | None:
    """Return our name of a ConvNeXt tensor; None if it is not part of the ConvNeXt."""
    for pattern, ours in CONVNEXT:
        match = re.fullmatch(pattern, name)
        if match and ours is not None:
            return match.expand(ours)
        if match:
            first = match[1] == "0"
            part = "merge" if (match[2] == "0") == first else "norm"
            return f"stages.{match[1]}.{part}.{match[3]}"
    return None


def rows_of(grid: "Tensor") -> "Tensor":
    """Return a grid of vectors as rows.

    Shapes: [c h w] -> [h w c].
    """
    return grid.flatten(1).mT


UNUSED = "has no part in the authors' forward pass"


def convert(official: Official) -> Converted:
    """Read a NAC or its Perceiver IO; --config takes the run's train_config.yml as JSON.

    Raises: SaccadeError if the file is not a NAC, or if its model draws in evaluation and
        --deterministic is not given.
    Source: github.com/mweiss17/NeuralAttentiveCircuits at commit 41ae372a.
    """
    if baseline := is_perceiver(official.tensors):
        tensors, keys = renamed(official.tensors)
        reading = Reading(official.path, tensors, file_keys=keys)
    else:
        reading = Reading(official.path, official.tensors)
    reading.shape(f"{GRAPH}input_latents.codes_")
    form = perceiver_form(official) if baseline else form_of(official)
    fields = {**circuit_fields(reading, form, GRAPH), **image_fields(reading, official)}
    if not baseline:
        check_told(official.path, official.config, fields)
    config = NACConfig.from_dict(fields)
    notes = (*_notes(form), *_draws(official, config, form))
    put_tokenizer(reading, "input_tokenizer.", "tokenizer.")
    put_circuit(reading, GRAPH, config, tokens="tokenizer.norm")
    if config.confidence == "state":
        put_pool(reading, "output_tokenizer.", "", temperature=form.temperature)
    reading.put("module_order", order_of(reading.weights, config))
    return reading.converted(official, "nac", config, authors_images("nac", config), notes)


def put_circuit(reading: Reading, graph: str, config: NACConfig, *, tokens: str | None) -> None:
    """Put everything between tokens and the read-out's states; `tokens` names their LayerNorm."""
    put_tables(reading, graph, config)
    put_read_in(reading, f"{graph}read_in.", tokens=tokens)
    for index in range(config.propagator_layers):
        put_propagator(reading, f"{graph}propagators.{index}.", f"propagators.{index}.")
    put_read_out(reading, f"{graph}read_out.")
    keys = bandwidths(reading, graph)
    if config.epsilon_learned:
        reading.put("kernel.bandwidth", torch.stack([reading.tensors[key] for key in keys]), *keys)
    fixed = "no kernel" if config.connectivity == "dense" else "is the configuration's epsilon"
    for key in () if config.epsilon_learned else keys:
        reading.ignored[key] = fixed


def put_tables(reading: Reading, graph: str, config: NACConfig) -> None:
    """Put the codes, the signatures, and the layers that turn them into states."""
    shared = config.read_in_codes == "shared"
    names = {
        "input_latents.codes_": "generator.codes" if shared else "generator.read_in_codes",
        "mediator_latents.codes_": None if shared else "generator.codes",
        "output_latents.codes_": "read_out_codes",
        "input_latents.signatures_": "generator.read_in_signatures"
        if config.read_in_modules
        else None,
        "mediator_latents.signatures_": "generator.signatures",
        "output_latents.signatures_": "read_out_signatures",
    }
    put_seeder(reading, f"{graph}latent_seeder.", "initial_state.")
    for theirs, ours in names.items():
        key = f"{graph}{theirs}"
        if ours is None or (config.connectivity == "dense" and "signatures" in theirs):
            if key in reading.tensors:
                reading.ignored[key] = UNUSED
        else:
            reading.shape(key)
            reading.put(ours, reading.tensors[key], key)


def order_of(weights: dict[str, Tensor], config: NACConfig) -> Tensor:
    """Return the processor modules by descending degree.

    Shapes: -> int64 [u].
    """
    codes, signatures = weights["generator.codes"], weights.get("generator.signatures")
    if signatures is None or signatures.is_meta:
        return torch.arange(config.modules, device=codes.device)
    kernel = Kernel(config).eval()
    with torch.no_grad():
        if config.epsilon_learned:
            kernel.bandwidth.copy_(weights["kernel.bandwidth"])
        return circuit_order(Circuit(signatures, codes), kernel)


def _notes(form: NACForm) -> tuple[str, ...]:
    """Return notes on what was assumed because the tensor names are those of a template."""
    if not form.template:
        return ()
    cut = f"links cut above {form.truncate}" if form.truncate else "no link cut"
    residual = "with" if form.read_in_residual else "without"
    return (
        f"named as the authors' template {form.template}, so heads of {form.head_dim}, {cut}, "
        f"read-in {residual} residual and pooling by a plain softmax were assumed; --config, the "
        "JSON of the run's train_config.yml, says it for certain",
    )


def _draws(official: Official, config: NACConfig, form: NACForm) -> tuple[str, ...]:
    """Return notes on the draws that the authors' code makes in evaluation and ours does not.

    Raises: SaccadeError if there are such draws and --deterministic was not given.
    """
    drawn = []
    if config.state_noise:
        drawn.append("initial states around their mean (latent_seeder.code_to_state_logvar)")
    if form.gumbel:
        drawn.append("the pooling's weights (softmax_type gumbel)")
    if drawn and not official.deterministic:
        raise SaccadeError(
            f"{official.path}: the authors' code draws {' and '.join(drawn)} in evaluation too, so "
            "that two answers to one image differ. A served model has to give one answer. Pass "
            "--deterministic to use the mean instead of the draw."
        )
    return tuple(f"deterministic: without drawing {reason}" for reason in drawn)
