# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the NAC authors: the state dict of their model becomes a NAC of that form."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from saccade.core.errors import SaccadeError
from saccade.models.nac.config import NACConfig
from saccade.models.nac.generator import Circuit
from saccade.models.nac.kernel import Kernel
from saccade.models.nac.model import circuit_order
from saccade.models.official.authors_images import authors_images
from saccade.models.official.conversion import Conversion, Original, Reading
from saccade.models.official.json_files import check_stated, declared, flattened
from saccade.models.official.sources.nac_forms import (
    BACKBONE,
    GRAPH,
    GRID,
    PERCEIVER,
    NACForm,
    NACJson,
    bandwidths,
    circuit_fields,
    form_of,
    image_fields,
)
from saccade.models.official.tables import Row, Rows, no_bias, part, rows_of, scaled

JSON = NACJson
UNUSED = "has no part in the authors' forward pass"


def _layer(
    ours: str, theirs: str, scale: str = "", kinds: tuple[str, ...] = ("lin.", "native_")
) -> Rows:
    """Return the rows of a ModFC or FC; a layer without bias gets a bias of zeros.

    `scale` names the layer scale after it, if there is one, which is folded into its rows.
    """
    rows = [Row(f"{ours}.code.weight", f"{theirs}.scale.weight")]
    rows.append(Row(f"{ours}.alpha", f"{theirs}.scale_gain"))
    for kind in kinds:
        own = f"{theirs}.{kind}"
        for name in ("weight", "bias"):
            if scale:
                rows.append(
                    Row(f"{ours}.linear.{name}", (f"{own}{name}", f"{scale}.gamma"), scaled)
                )
            rows.append(Row(f"{ours}.linear.{name}", f"{own}{name}"))
        rows.append(Row(f"{ours}.linear.bias", f"{own}weight", no_bias))
    return tuple(rows)


def _attention(ours: str, theirs: str) -> Rows:
    """Return the rows of queries, keys, values and the exit layer with its layer scale."""
    names = ("query", "key", "value")
    parts = [row for x in names for row in _layer(f"{ours}.{x}", f"{theirs}.{x}_compiler")]
    return (*parts, *_layer(f"{ours}.output", f"{theirs}.exit_layer", f"{theirs}.layer_scale"))


def _ffn(ours: str, theirs: str, norm: str) -> Rows:
    """Return the rows of a ModFFN with the LayerNorm in front of it, which is `norm` here."""
    return (
        Row(f"{norm}.*", f"{theirs}.layernorm.*"),
        *_layer(f"{ours}.widen", f"{theirs}.ffn.0"),
        *_layer(f"{ours}.narrow", f"{theirs}.ffn.2", f"{theirs}.layer_scale"),
    )


def circuit_rows(graph: str, tokens: str = "tokenizer.norm", *, shared_norm: bool = False) -> Rows:
    """Return the rows of everything between tokens and the read-out's states.

    The read-in's LayerNorm of tokens becomes the tokenizer's last one, `tokens`. With a
    `shared_norm`, the read-out has one LayerNorm for its own modules and the processor's.
    """
    read_in, read_out = (f"{graph}read_in.read_in_attention", f"{graph}read_out.latent_attention")
    block = f"{graph}propagators.#.latent_attention"
    states = f"{read_out}.{'receiver' if shared_norm else 'sender'}_layernorm.*"
    head = f"{graph}read_out.head."
    return (
        Row(f"{tokens}.*", f"{read_in}.sender_layernorm.*"),
        Row("read_in.norm_query.*", f"{read_in}.receiver_layernorm.*"),
        *_attention("read_in", read_in),
        *_ffn("read_in.ffn", f"{graph}read_in.ffn", "read_in.norm"),
        Row("propagators.#.norm_attention.*", f"{block}.receiver_layernorm.*"),
        Row("propagators.#.norm_senders.*", f"{block}.sender_layernorm.*"),
        *_attention("propagators.#", block),
        *_ffn("propagators.#.ffn", f"{graph}propagators.#.ffn", "propagators.#.norm_ffn"),
        Row("read_out.norm_query.*", f"{read_out}.receiver_layernorm.*"),
        Row("read_out.norm_states.*", states),
        *_attention("read_out", read_out),
        *_ffn("read_out.ffn", f"{graph}read_out.ffn", "read_out.norm"),
        Row("head_norm.*", f"{head}0.module.*"),
        Row("head.*", f"{head}1.lin.*"),
        *_layer("head", f"{head}1", kinds=("native_",)),
        *seeder_rows("initial_state.", f"{graph}latent_seeder."),
    )


def seeder_rows(ours: str, theirs: str) -> Rows:
    """Return the rows of the layers that turn a code into an initial state."""
    names = {"norm.*": "layernorm.*", "mean.*": "code_to_state_mu.*"}
    return rows_of(ours, theirs, names | {"log_variance.*": "code_to_state_logvar.*"})


def pool_rows(theirs: str, temperature: float) -> Rows:
    """Return the rows of the confidence scorer, divided by its softmax's, and of the last layer."""
    score = Row("read_out.pool.score.*", f"{theirs}confidence_scorer.*", lambda x: x / temperature)
    return (score, Row("head.*", f"{theirs}to_logits.*"))


def grid_rows(grid: Tensor) -> Tensor:
    """Return a grid of vectors as rows.

    Shapes: [c h w] -> [h w c].
    """
    return grid.flatten(1).mT


_CONVNEXT = {
    # In the first stage the LayerNorm follows the convolution; in the others it precedes it.
    "stages.0.merge.*": "downsample_layers.0.0.*",
    "stages.0.norm.*": "downsample_layers.0.1.*",
    "stages.#.norm.*": "downsample_layers.#.0.*",
    "stages.#.merge.*": "downsample_layers.#.1.*",
    "stages.#.blocks.#.gamma": "stages.#.#.gamma",
    "stages.#.blocks.#.depthwise.*": "stages.#.#.dwconv.*",
    "stages.#.blocks.#.norm.*": "stages.#.#.norm.*",
    "stages.#.blocks.#.widen.*": "stages.#.#.pwconv1.*",
    "stages.#.blocks.#.narrow.*": "stages.#.#.pwconv2.*",
}
TOKENIZER = (
    *rows_of("tokenizer.", BACKBONE, _CONVNEXT),
    Row("tokenizer.position", GRID, grid_rows),
)


def _perceiver_attention(ours: str, theirs: str) -> Rows:
    pair = f"{theirs}fn.to_kv.weight"
    names = {"query_compiler.lin.weight": "fn.to_q.weight", "exit_layer.lin.*": "fn.to_out.*"}
    names |= {"receiver_layernorm.*": "norm.*", "sender_layernorm.*": "norm_context.*"}
    return (
        *rows_of(f"{GRAPH}{ours}", theirs, names),
        Row(f"{GRAPH}{ours}key_compiler.lin.weight", pair, part(0, 2)),
        Row(f"{GRAPH}{ours}value_compiler.lin.weight", pair, part(1, 2)),
    )


_PERCEIVER_FFN = {"layernorm.*": "norm.*", "ffn.0.lin.*": "fn.net.0.*", "ffn.2.lin.*": "fn.net.2.*"}
# The Perceiver IO baseline by the names of the NAC: keys and values share one tensor.
_PERCEIVER = (
    *_perceiver_attention("read_in.read_in_attention.", "cross_attend_blocks.0."),
    *rows_of(f"{GRAPH}read_in.ffn.", "cross_attend_blocks.1.", _PERCEIVER_FFN),
    *_perceiver_attention("propagators.#.latent_attention.", "layers.#.0."),
    *rows_of(f"{GRAPH}propagators.#.ffn.", "layers.#.1.", _PERCEIVER_FFN),
    *_perceiver_attention("read_out.latent_attention.", "decoder_cross_attn."),
    *rows_of(f"{GRAPH}read_out.ffn.", "decoder_ff.", _PERCEIVER_FFN),
    Row(f"{GRAPH}input_latents.codes_", "latents"),
    Row(f"{GRAPH}output_latents.codes_", "classification_query"),
    Row(f"{GRAPH}read_out.head.1.lin.*", "to_logits.*"),
    *(Row(key, key.removeprefix("input_")) for row in TOKENIZER for key in row.keys),
)


def is_perceiver(official: Original) -> bool:
    """Return True if the file contains the Perceiver IO baseline."""
    return {"latents", "decoder_cross_attn.fn.to_q.weight"} <= official.tensors.keys()


def perceiver_form(official: Original) -> NACForm:
    """Return the form of the baseline: no kernel, heads of 64 unless --config has others."""
    json = declared(NACJson, flattened(official.config))
    wide, read = json.latent_dim_head, json.cross_dim_head
    forms: dict[str, Any] = {"head_dim": wide, "read_in_head_dim": read, "read_out_head_dim": read}
    return replace(PERCEIVER, template="", **forms)


def convert(official: Original) -> Conversion:
    """Read a NAC or its Perceiver IO; --config takes the run's train_config.yml as JSON.

    Raises: SaccadeError if the file is not a NAC, or if its model draws in evaluation and
        --deterministic is not given.
    Source: github.com/mweiss17/NeuralAttentiveCircuits at commit 41ae372a.
    """
    reading = Reading(official.path, official.tensors)
    if baseline := is_perceiver(official):
        reading = Reading.renamed(official.path, official.tensors, _PERCEIVER)
    reading.shape(f"{GRAPH}input_latents.codes_")
    form = perceiver_form(official) if baseline else form_of(official)
    fields = {**circuit_fields(reading, form, GRAPH), **image_fields(reading, official)}
    if not baseline:
        check_stated(official.path, declared(NACJson, flattened(official.config)), fields)
    config = NACConfig.from_dict(fields)
    notes = (*_notes(form), *_draws(official, config, form))
    reading.take(TOKENIZER)
    take_circuit(reading, GRAPH, config)
    if config.confidence == "state":
        reading.take(pool_rows("output_tokenizer.", form.temperature))
    reading.put("module_order", order_of(reading.weights, config))
    return reading.converted(official, "nac", config, authors_images("nac", config), notes)


def take_circuit(
    reading: Reading, graph: str, config: NACConfig, tokens: str = "tokenizer.norm"
) -> None:
    """Take everything between tokens and the read-out's states, as `circuit_rows`."""
    shared, keys = config.read_in_codes == "shared", bandwidths(reading, graph)
    unused = {"mediator_latents.codes_"} if shared else set()
    unused |= set() if config.read_in_modules else {"input_latents.signatures_"}
    if config.connectivity == "dense":
        unused |= {f"{kind}_latents.signatures_" for kind in ("input", "mediator", "output")}
    for key in reading.tensors.keys() & {graph + name for name in unused}:
        reading.ignored[key] = UNUSED
    fixed = "no kernel" if config.connectivity == "dense" else "is the configuration's epsilon"
    for key in () if config.epsilon_learned else keys:
        reading.ignored[key] = fixed
    own = {} if shared else {"generator.read_in_codes": "input_latents.codes_"}
    names = own | {
        "generator.codes": f"{'input' if shared else 'mediator'}_latents.codes_",
        "read_out_codes": "output_latents.codes_",
        "generator.read_in_signatures": "input_latents.signatures_",
        "generator.signatures": "mediator_latents.signatures_",
        "read_out_signatures": "output_latents.signatures_",
    }
    norm = f"{graph}read_out.latent_attention.sender_layernorm.weight"
    reading.take(rows_of("", graph, names))
    reading.take(circuit_rows(graph, tokens, shared_norm=norm not in reading.tensors))
    if config.epsilon_learned:
        reading.take((Row("kernel.bandwidth", tuple(keys), lambda *x: torch.stack(x)),))


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


def _draws(official: Original, config: NACConfig, form: NACForm) -> tuple[str, ...]:
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
