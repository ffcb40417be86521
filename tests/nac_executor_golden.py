# SPDX-License-Identifier: Apache-2.0
"""The authors' NAC tensors against ours, of the executor: layers, circuits, whole models.

Their weights are the leaves of one graph, which the converter's own names and scales go through, so
that gradients come back under their names.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from saccade.models.nac import layers as parts
from saccade.models.nac.generator import Circuit, CircuitInputs, link_distances
from saccade.models.nac.kernel import Kernel
from saccade.models.nac.model import NAC, NACConfig, execute_layers
from saccade.models.nac.tokenizers import ConvNeXtTokenizer
from saccade.models.official.conversion import Original, Reading
from saccade.models.official.json_files import declared
from saccade.models.official.sources import nac, nac_forms
from saccade.models.official.tables import Rows

Tensors = dict[str, Tensor]
Run = Callable[[dict[str, Any], Tensors, Tensors], Tensors]
IMAGE = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


@contextmanager
def drawn(values: list[Tensor]) -> Iterator[None]:
    """Draws recorded in the place of what torch draws, in the order of the calls."""
    left = list(values)

    def draw(*shape: Any, **_: Any) -> Tensor:
        value = left.pop(0)
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        assert tuple(value.shape) == tuple(wanted), f"{tuple(value.shape)} drawn as {wanted}"
        return value

    def like(tensor: Tensor, **_: Any) -> Tensor:
        return draw(*tensor.shape)

    patched = {"rand": draw, "randn": draw, "rand_like": like, "randn_like": like}
    exponential = mock.patch.object(Tensor, "exponential_", like)  # of a Gumbel softmax
    with mock.patch.multiple(torch, **patched), exponential:
        yield
    assert not left, f"{len(left)} recorded draws were not asked for"


class Called(nn.Module):
    """Layers, and what is done with them, for `torch.func.functional_call`."""

    def __init__(self, layers: nn.Module, call: Callable[..., Tensors]) -> None:
        super().__init__()
        self.layers, self.call = layers, call

    def forward(self, *given: Any) -> Tensors:
        return self.call(self.layers, *given)


def called(
    case: dict[str, Any], layers: nn.Module, weights: Tensors, call: Callable[..., Tensors]
) -> Tensors:
    """Output of `call` for layers that have these weights, in the case's mode, with its draws."""
    layers = layers.double().train(case["mode"] == "train")
    named = {f"layers.{name}": value for name, value in weights.items()}
    missing = {f"layers.{name}" for name in layers.state_dict()} - named.keys() - OPTIONAL
    assert not missing and named.keys() <= Called(layers, call).state_dict().keys(), missing
    with drawn(case["drawn"]):
        outputs: Tensors = torch.func.functional_call(Called(layers, call), named, ())
    return outputs


OPTIONAL = {"layers.module_order"}


def layer_config(case: dict[str, Any], **more: Any) -> NACConfig:
    """The configuration of a single layer of a case."""
    given = case["config"]
    mod, ffn = given.get("mod_fc_kwargs") or {}, given.get("ffn_kwargs") or {}
    attention = given.get("latent_attention_kwargs") or {}
    kernel = attention.get("kernel_kwargs") or {}
    fields = {
        "dim": given["state_dim"],
        "code_dim": given["code_dim"],
        "propagator_layers": 1,
        **dict.fromkeys(("heads", "read_heads"), given["num_heads"]),
        **dict.fromkeys(("head_dim", "read_head_dim"), given["head_dim"]),
        "ffn_dim": round(given["state_dim"] * given["ffn_capacity_factor"]),
        "ffn_gate": "geglu" if ffn.get("use_geglu", given.get("use_geglu")) else "none",
        "modulation": given.get("mod_fc_cls") != "FC",
        "modfc_one": mod.get("add_one_to_scale", False),
        "modfc_norm_affine": False,
        "read_in_residual": given.get("include_residual_in_read_in_attention", False),
        "read_in_query_norm": True,
        "read_out_residual": given.get("include_residual_in_latent_attention", True),
        "read_out_query_norm": True,
        "sender_norm": not attention.get("share_layernorm", False),
        "truncate": kernel.get("truncation") or 0.0,
        "epsilon_learned": kernel.get("learnable_bandwidth", True),
        "epsilon": 1.0,
        "kernel_draw": "sample" if kernel.get("stochastic_kernel") else "none",
        "kernel_clamp": "dtype",
        "tau": kernel.get("stochastic_sampling_temperature", 1.0),
        "drop_path": given.get("path_drop_prob", 0.0),
        "code_noise": given.get("code_noise_scale") or 0.0,
        "classes": given.get("output_dim") or 1,
        "signature_init": "random",
    }
    return NACConfig.from_dict(fields | more)


def run_read_in(case: dict[str, Any], inputs: Tensors, leaves: Tensors) -> Tensors:
    """One read-in with the LayerNorm of its tokens."""
    config = layer_config(case, token_width=case["config"]["input_dim"])
    norm = nn.LayerNorm(config.tokens_width)
    layers = nn.ModuleDict({"read_in": parts.ReadIn(config), "norm": norm})
    reading = placed(case, leaves, "read_in.", nac.circuit_rows("", "norm"))
    plain = case["config"].get("read_in_attention_kwargs") or {}
    if plain.get("share_key_value_projectors"):
        # A gain of 1 + 0 * LayerNorm(0): a layer that is the same for all modules.
        for name in ("read_in.key", "read_in.value"):
            width = reading.weights[f"{name}.linear.weight"].shape[1]
            reading.weights[f"{name}.code.weight"] = torch.zeros(width, config.code_dim).double()
            reading.weights[f"{name}.alpha"] = torch.zeros(()).double()

    def call(layers: nn.ModuleDict) -> Tensors:
        theta, code = inputs["receiver_states"], inputs["receiver_codes"]
        read_in, tokens = layers["read_in"], layers["norm"](inputs["tokens"])
        scores = read_in.scores(read_in.asked(theta, code), tokens, code).transpose(1, 2)
        output = read_in(theta, tokens, code)
        return {"output": output, "scores": scores, "attention": scores.softmax(-1)}

    return called(case, layers, reading.weights, call)


def placed(case: dict[str, Any], leaves: Tensors, place: str, rows: Rows) -> Reading:
    """A part of a circuit, read by the table of the whole one."""
    reading = Reading(case["id"], {place + name: leaf for name, leaf in leaves.items()})
    reading.take(rows)
    return reading


def put_kernel(config: NACConfig, leaves: Tensors) -> Tensors:
    """Weights of the kernel of one layer: the same bandwidth for propagator and read-out."""
    bandwidth = leaves["latent_attention.kernel.bandwidth"]
    return {"kernel.bandwidth": torch.stack([bandwidth] * 2)} if config.epsilon_learned else {}


def run_propagator(case: dict[str, Any], inputs: Tensors, leaves: Tensors) -> Tensors:
    """One propagator with its kernel."""
    config = layer_config(case)
    reading = placed(case, leaves, "propagators.0.", nac.circuit_rows(""))
    weights = {k.replace("propagators.0.", "propagator."): v for k, v in reading.weights.items()}
    layers = nn.ModuleDict({"propagator": parts.Propagator(config), "kernel": Kernel(config)})

    def call(layers: nn.ModuleDict) -> Tensors:
        states, codes = inputs["states"], inputs["codes"]
        circuit = Circuit(inputs["signatures"], codes)
        given: dict[str, Tensor] = {}
        if "input_states" in inputs:
            circuit = circuit._replace(read_in_signatures=inputs["input_signatures"])
            given["senders"] = torch.cat((states, inputs["input_states"]), 1)
            given["sender_code"] = torch.cat((codes, inputs["input_codes"]))
        between, _ = link_distances(circuit, inputs["signatures"])
        bias = next(iter(layers["kernel"].layers(between, len(states))))
        return {"output": layers["propagator"](states, codes, bias, **given)}

    return called(case, layers, weights | put_kernel(config, leaves), call)


def run_read_out(case: dict[str, Any], inputs: Tensors, leaves: Tensors) -> Tensors:
    """One read-out, with its head where it has one."""
    shared = "latent_attention.sender_layernorm.weight" not in leaves
    rows = nac.circuit_rows("", shared_norm=shared)
    reading = placed(case, leaves, "read_out.", rows)
    count = inputs["states"].shape[1]
    config = layer_config(
        case, readout_modules=count, **nac_forms.last_fields(reading, "read_out.")
    )
    layers: dict[str, nn.Module] = {"read_out": parts.ReadOut(config), "kernel": Kernel(config)}
    layers["read_out"].pool = nn.Identity()  # the authors' pooling is a layer of its own
    if config.confidence == "first":
        layers["head"] = parts.last_layer(config)
        layers["head_norm"] = parts.norm_where(config.head_norm, config.dim)

    def call(layers: nn.ModuleDict) -> Tensors:
        states, codes = inputs["processor_states"], inputs["processor_codes"]
        circuit = Circuit(inputs["processor_signatures"], codes)
        _, distance = link_distances(circuit, inputs["signatures"])
        bias = layers["kernel"].read_out(distance, len(states))
        answer = layers["read_out"](inputs["states"], inputs["codes"], states, codes, bias)
        if "head" in layers:
            answer = layers["head"](layers["head_norm"](answer), inputs["codes"])
        return {"output": answer}

    weights = reading.weights | put_kernel(config, leaves)
    return called(case, nn.ModuleDict(layers), weights, call)


def run_tokenizer(case: dict[str, Any], inputs: Tensors, leaves: Tensors) -> Tensors:
    """The tokenizer in front of its LayerNorm, on scaled pixels."""
    named = {f"input_tokenizer.{name}": value for name, value in leaves.items()}
    reading = Reading(case["id"], named)
    size = {"input_size": 16}  # where no grid of positions says it, any will do
    given = nac_forms.image_fields(reading, Original(case["id"], named, config=size))
    model = ConvNeXtTokenizer(NACConfig.from_dict(given | IMAGE))
    model.norm = nn.Identity()
    reading.take(nac.TOKENIZER)
    weights = {name.removeprefix("tokenizer."): x for name, x in reading.weights.items()}
    pixels = inputs["image"].permute(0, 2, 3, 1)
    return called(case, model, weights, lambda layers: {"tokens": layers.placed(pixels)})


def run_graph(case: dict[str, Any], inputs: Tensors, leaves: Tensors) -> Tensors:
    """Read-in, propagators and read-out on tokens; the head where the read-out has one."""
    reading = Reading(case["id"], leaves)
    form = declared(nac_forms.NACForm, {"latent_graph_kwargs": case["config"]})
    width = case["config"]["input_dim"]
    fields = {"input": "tokens", "token_dim": 1, "token_width": width}
    config = NACConfig.from_dict(nac_forms.circuit_fields(reading, form, "") | fields)
    model = NAC(config, fresh=False)
    model.tokenizer, model.norm = nn.Identity(), nn.LayerNorm(width)
    if config.confidence == "state":
        model.read_out.pool, model.head = nn.Identity(), nn.Identity()
    nac.take_circuit(reading, "", config, tokens="norm")

    def call(model: Any) -> Tensors:
        # The authors draw around the initial states in evaluation too.
        model.initial_state.train(bool(case.get("draws")))
        given = CircuitInputs(model.norm(inputs["tokens"]), None, None, None)
        read, theta, states = execute_layers(model, given, model.generator())
        if config.confidence == "first":
            states = model.logits(states)
        return {"input_states": read, "mediator_states": theta, "output_states": states}

    return called(case, model, reading.weights, call)


def run_model(case: dict[str, Any], inputs: Tensors, leaves: Tensors) -> Tensors:
    """A whole model as `saccade convert` reads it, on scaled pixels."""
    converted = nac.convert(Original(case["id"], leaves, config=case["config"]))
    model = NAC(NACConfig.from_dict(converted.config.to_dict() | IMAGE), fresh=False)
    pixels = inputs["image"].permute(0, 2, 3, 1) * 255
    weights = {name: weight for name, weight in converted.weights.items() if name != "module_order"}

    def call(model: Any) -> Tensors:
        given = CircuitInputs(model.tokenizer(pixels), None, None, None)
        read, theta, states = execute_layers(model, given, model.generator())
        pixel = pixels / 255
        return {
            "logits": model.logits(model.read_out.pool(states)),
            "tokens": model.tokenizer.placed(pixel),
            "input_states": read,
            "mediator_states": theta,
            # The authors' read-out has the head inside where there is no pooling.
            "output_states": model.logits(states) if model.read_out.pool.first else states,
        }

    return called(case, model, weights, call)


def run_pool(case: dict[str, Any], inputs: Tensors, leaves: Tensors) -> Tensors:
    """Confidences and the last layer."""
    given = case["config"]
    config = NACConfig(
        dim=given["state_dim"],
        **dict.fromkeys(("heads", "read_heads"), 1),  # of no layer here, but they have to fit
        classes=given["output_dim"],
        readout_modules=inputs["states"].shape[1],
        confidence_noise=given["softmax_type"] == "gumbel",
    )
    # The authors draw in evaluation too.
    drawing = case | {"mode": "train" if config.confidence_noise else "eval"}
    layers = nn.ModuleDict({"pool": parts.ConfidencePool(config), "head": parts.last_layer(config)})
    reading = Reading(case["id"], leaves)
    reading.take(nac.pool_rows("", given.get("softmax_temperature", 1.0)))
    weights = {name.removeprefix("read_out."): weight for name, weight in reading.weights.items()}

    def call(layers: nn.ModuleDict) -> Tensors:
        return {"logits": layers["head"](layers["pool"](inputs["states"]))}

    return called(drawing, layers, weights, call)


def run_seeder(case: dict[str, Any], inputs: Tensors, leaves: Tensors) -> Tensors:
    """The states that modules start from, for as many samples as are drawn."""
    given = case["config"]
    config = NACConfig(
        dim=given["state_dim"],
        heads=1,
        code_dim=given["code_dim"],
        initial_state="code" if given.get("use_code_as_mean_state") else "linear",
        state_noise=given.get("use_state_noise", True),
    )
    reading = Reading(case["id"], leaves)
    reading.take(nac.seeder_rows("", ""))
    # The authors draw in evaluation too.
    drawing = case | {"mode": "train" if config.state_noise else "eval"}

    samples = len(case["drawn"][0]) if case["drawn"] else 1  # equal ones if nothing is drawn

    def call(layers: nn.Module) -> Tensors:
        return {"states": layers(inputs["codes"], samples)}

    return called(drawing, parts.initial_state(config), reading.weights, call)


RUNS: dict[str, Run] = {
    "pooling": run_pool,
    "seeder": run_seeder,
    "read_in": run_read_in,
    "propagator": run_propagator,
    "read_out": run_read_out,
    "tokenizer": run_tokenizer,
    "graph": run_graph,
    "model": run_model,
}
