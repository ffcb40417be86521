# SPDX-License-Identifier: Apache-2.0
"""What the tensors of the authors' NAC do not tell: by their configuration, or by the template."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from saccade.errors import SaccadeError
from saccade.models.official.claims import check_claims, whole_number
from saccade.models.official.conversion import Official
from saccade.models.official.vit_keys import hint

GRAPH = "latent_graphs.0."


@dataclass(frozen=True)
class Form:
    """What two files of the same tensors may differ in."""

    template: str = ""  # of the authors, where it was recognised by the names of the tensors
    head_dim: int = 64
    read_in_head_dim: int = 64
    read_out_head_dim: int = 64
    one: bool = True  # 1 + gain
    read_in_residual: bool = True
    read_out_residual: bool = False
    truncate: float = 0.0
    truncate_read_out: float = 0.0
    dense: bool = False
    union: bool = False  # read-in modules stay beside the processor's and are heard
    gumbel: bool = False  # pooling draws, in evaluation too
    temperature: float = 1.0  # of the pooling's softmax
    epsilon_learned: bool = False
    stochastic: bool = True  # in training
    tau: float = 0.5
    drop_path: float = 0.0
    code_noise: float = 0.0
    size: tuple[int, int] | None = None  # of the image, where no grid of positions tells


PAPER = Form(template="INET-110E-NC-*")
PERCEIVER = Form(template="TINET-PIOLIKE-X", dense=True)
_SOFT = {"one": False, "union": True, "truncate": 0.9, "epsilon_learned": True, "tau": 1.0}
TINY = Form(
    template="TINY-INET-NC-X",
    read_in_residual=False,
    read_out_residual=True,
    stochastic=False,
    drop_path=0.1,
    **_SOFT,  # type: ignore[arg-type]
)
FULL = replace(
    TINY,
    template="nc_full_tiny_imnet",
    read_in_residual=True,
    read_out_residual=False,
    code_noise=0.05,
)


def form_of(official: Official) -> Form:
    """The form that --config says, or that of the template that the tensors' names show.

    Raises: SaccadeError if neither tells.
    """
    if official.config is not None:
        return told(official.path, model_arguments(official.config))
    return recognised(official)


def recognised(official: Official) -> Form:
    """The template whose names of tensors these are.

    Raises: SaccadeError if it is none of those that the authors ship.
    """
    names = official.tensors
    first = f"{GRAPH}propagators.0."
    marks = (
        f"{first}latent_attention.query_compiler.lin.weight" in names,
        f"{first}ffn.ffn.0.scale_gain" in names,
        f"{GRAPH}latent_seeder.code_to_state_mu.weight" in names,
        f"{first}latent_attention.query_compiler.native_bias" in names,
    )
    forms = {
        (True, False, False, False): PERCEIVER,
        (False, True, False, False): PAPER,
        (False, False, True, True): TINY,
        (False, False, True, False): FULL,
    }
    if marks not in forms:
        raise SaccadeError(
            f"{official.path}: is of none of the templates that the authors ship (plain layers: "
            f"{marks[0]}, learned gains: {marks[1]}, seeder: {marks[2]}, biases of queries: "
            f"{marks[3]}), so residuals and kernel cannot be guessed. Pass --config, the JSON of "
            "the run's train_config.yml."
        )
    return forms[marks]


def model_arguments(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of the authors' model: the JSON itself, or what stands at model / kwargs.

    Raises: SaccadeError if they are not there.
    """
    found = hint(config, "model", "kwargs", default=config)
    if not isinstance(hint(found, "latent_graph_kwargs"), Mapping):
        raise SaccadeError(
            f"--config: no latent_graph_kwargs in {sorted(map(str, config))[:8]}, nor at model / "
            "kwargs. Pass the JSON of the run's train_config.yml, or of its model's arguments."
        )
    arguments: Mapping[str, Any] = found
    return arguments


def check_told(path: str, config: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> None:
    """The counts of a configuration are those of the tensors.

    Raises: SaccadeError naming the first that differs.
    """
    arguments = model_arguments(config) if config is not None else {}
    claims = {
        "num_iterations": "propagator_layers",
        "num_heads": "heads",
        "num_mediator_latents": "modules",
        "num_output_latents": "readout_modules",
        "signature_dim": "signature_dim",
    }
    found = {
        name: (hint(arguments, "latent_graph_kwargs", name), fields[ours])
        for name, ours in claims.items()
    }
    found["output_dim"] = (hint(arguments, "output_dim"), fields["classes"])
    check_claims(path, found)


def told(path: str, arguments: Mapping[str, Any]) -> Form:
    """What a configuration says, with the defaults of the authors' code.

    Raises: SaccadeError if it asks for what has no counterpart here.
    """
    graph = arguments["latent_graph_kwargs"]
    head_dim = whole_number(hint(graph, "head_dim", default=64), "head_dim")
    attention = hint(graph, "propagator_kwargs", "latent_attention_kwargs", default={}) or {}
    kernel = hint(attention, "kernel_kwargs", default={}) or {}
    read_out = hint(graph, "read_out_kwargs", "latent_attention_kwargs", default={}) or {}
    _check_kernels(path, kernel, hint(read_out, "kernel_kwargs", default={}) or {})
    pooled = arguments.get("output_tokenizer_type") == "OutputLatentPooling"
    kind = hint(arguments, "output_tokenizer_kwargs", "softmax_type", default="gumbel")
    return Form(
        head_dim=head_dim,
        read_in_head_dim=hint(graph, "read_in_kwargs", "head_dim", default=head_dim),
        read_out_head_dim=hint(graph, "read_out_kwargs", "head_dim", default=head_dim),
        one=bool(hint(graph, "mod_fc_kwargs", "add_one_to_scale", default=False)),
        read_in_residual=bool(
            hint(graph, "read_in_kwargs", "include_residual_in_read_in_attention", default=False)
        ),
        read_out_residual=bool(
            hint(graph, "read_out_kwargs", "include_residual_in_latent_attention", default=True)
        ),
        truncate=_cut(kernel),
        truncate_read_out=_cut(hint(read_out, "kernel_kwargs", default={}) or {}),
        dense=_dense(path, attention, read_out),
        union=_union(path, graph),
        gumbel=pooled and kind == "gumbel",
        temperature=float(
            hint(arguments, "output_tokenizer_kwargs", "softmax_temperature", default=1.0)
        ),
        epsilon_learned=bool(hint(kernel, "learnable_bandwidth", default=True)),
        stochastic=bool(hint(kernel, "stochastic_kernel", default=False)),
        tau=float(hint(kernel, "stochastic_sampling_temperature", default=1.0)),
        drop_path=float(hint(graph, "path_drop_prob", default=0.0) or 0),
        code_noise=float(hint(graph, "code_noise_scale", default=None) or 0),
    )


def _dense(path: str, attention: Mapping[str, Any], read_out: Mapping[str, Any]) -> bool:
    """Whether no kernel masks the attention.

    Raises: SaccadeError if it masks one of propagators and read-out alone.
    """
    name = "mask_attn_scores_with_affinities"
    masked = {bool(hint(each, name, default=True)) for each in (attention, read_out)}
    if len(masked) == 2:
        raise SaccadeError(
            f"{path}: --config has {name} in one of propagators and "
            "read-out alone, expected the same in both. No NAC here has that."
        )
    return masked == {False}


def _check_kernels(path: str, *kernels: Mapping[str, Any]) -> None:
    """Stop what no shipped configuration sets.

    Raises: SaccadeError naming the argument.
    """
    for name in ("eliminate_diagonal", "use_gumbel_along_functions"):
        if any(each.get(name) for each in kernels):
            raise SaccadeError(
                f"{path}: --config sets {name}, which no NAC here has. Expected false, as in every "
                "configuration that the authors ship."
            )


def _cut(kernel: Mapping[str, Any]) -> float:
    return float(hint(kernel, "truncation", default=None) or 0)


def _union(path: str, graph: Mapping[str, Any]) -> bool:
    """Whether the read-in's modules stay beside the processor's.

    Raises: SaccadeError for a mixture that no NAC here has.
    """
    found = tuple(
        bool(graph.get(name, default))
        for name, default in (
            ("disable_input_mediator_communication", False),
            ("use_input_states_as_mediator_states", False),
            ("enable_input_output_communication", True),
            ("enable_persistent_input_mediator_communication", True),
        )
    )
    if found[:3] == (True, True, False):
        return False
    if found == (False, False, True, True):
        return True
    raise SaccadeError(
        f"{path}: --config has disable_input_mediator_communication, "
        "use_input_states_as_mediator_states and enable_input_output_communication "
        f"{', '.join(map(str, found[:3]))}. Expected True, True, False (the read-in's modules are "
        "the processor's) or False, False, True with persistent communication (they stay beside)."
    )
