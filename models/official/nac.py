# SPDX-License-Identifier: Apache-2.0
"""The NAC authors' checkpoints: their model's dictionary becomes a NAC of that form."""

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.models.nac.config import NACConfig
from saccade.models.nac.generator import Circuit
from saccade.models.nac.kernel import Kernel
from saccade.models.nac.prune import circuit_order
from saccade.models.official.authors_images import authors_images
from saccade.models.official.conversion import Converted, Official, Reading
from saccade.models.official.nac_forms import (
    GRAPH,
    Form,
    bandwidths,
    check_told,
    circuit_fields,
    form_of,
    image_fields,
)
from saccade.models.official.nac_keys import (
    is_perceiver,
    perceiver_form,
    put_pool,
    put_propagator,
    put_read_in,
    put_read_out,
    put_seeder,
    put_tokenizer,
    renamed,
)

UNUSED = "has no part in the authors' forward pass"


def convert(official: Official) -> Converted:
    """Read a NAC or its Perceiver IO; --config takes the JSON of the run's train_config.yml.

    Raises: SaccadeError if the file is no NAC, or its model draws in evaluation and
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
    """Everything between tokens and the read-out's states; `tokens` names their LayerNorm here."""
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
    """Codes, signatures and what makes states of them."""
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
    """Processor modules by descending degree.

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


def _notes(form: Form) -> tuple[str, ...]:
    """What was assumed because the names of the tensors are those of a template."""
    if not form.template:
        return ()
    cut = f"links cut above {form.truncate}" if form.truncate else "no link cut"
    residual = "with" if form.read_in_residual else "without"
    return (
        f"named as the authors' template {form.template}, so heads of {form.head_dim}, {cut}, "
        f"read-in {residual} residual and pooling by a plain softmax were assumed; --config, the "
        "JSON of the run's train_config.yml, says it for certain",
    )


def _draws(official: Official, config: NACConfig, form: Form) -> tuple[str, ...]:
    """What the authors' code draws in evaluation and this one does not.

    Raises: SaccadeError if there is such a thing and --deterministic was not given.
    """
    drawn = []
    if config.state_noise:
        drawn.append("initial states around their mean (latent_seeder.code_to_state_logvar)")
    if form.gumbel:
        drawn.append("the pooling's weights (softmax_type gumbel)")
    if drawn and not official.deterministic:
        raise SaccadeError(
            f"{official.path}: the authors' code draws {' and '.join(drawn)} in evaluation too, so "
            "that two answers to one image differ. A served model has one answer: pass "
            "--deterministic for the mean in place of the draw."
        )
    return tuple(f"deterministic: without drawing {each}" for each in drawn)
