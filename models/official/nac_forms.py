# SPDX-License-Identifier: Apache-2.0
"""The configuration of the NAC authors' models: from the shapes of their tensors and, for what
shapes do not tell, from their JSON or from the template that the tensor names show.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.models.official.conversion import Official, Reading
from saccade.models.official.given_files import check_stated, whole_number
from saccade.models.official.vit_keys import hint
from saccade.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD

GRAPH = "latent_graphs.0."


@dataclass(frozen=True)
class NACForm:
    """The form of a NAC: how two files with the same tensors may differ."""

    template: str = ""  # the authors' template, if the tensor names showed it
    head_dim: int = 64
    read_in_head_dim: int = 64
    read_out_head_dim: int = 64
    one: bool = True  # 1 + gain
    read_in_residual: bool = True
    read_out_residual: bool = False
    truncate: float = 0.0
    truncate_read_out: float = 0.0
    dense: bool = False
    union: bool = False  # read-in modules stay, besides the processor's, and are read
    gumbel: bool = False  # pooling draws at random, also in evaluation
    temperature: float = 1.0  # of the pooling's softmax
    epsilon_learned: bool = False
    stochastic: bool = True  # in training
    tau: float = 0.5
    drop_path: float = 0.0
    code_noise: float = 0.0
    size: tuple[int, int] | None = None  # of the image, if no grid of positions tells it


PAPER = NACForm(template="INET-110E-NC-*")
PERCEIVER = NACForm(template="TINET-PIOLIKE-X", dense=True)
_SOFT = {"one": False, "union": True, "truncate": 0.9, "epsilon_learned": True, "tau": 1.0}
TINY = NACForm(
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


def form_of(official: Official) -> NACForm:
    """Return the form given by --config, or by the template that the tensor names show.

    Raises: SaccadeError if neither tells the form.
    """
    if official.config is not None:
        return told(official.path, model_arguments(official.config))
    return recognised(official)


def recognised(official: Official) -> NACForm:
    """Return the form of the template that has these tensor names.

    Raises: SaccadeError if it is not a template that the authors ship.
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
            f"{official.path}: matches none of the templates that the authors ship (plain layers: "
            f"{marks[0]}, learned gains: {marks[1]}, seeder: {marks[2]}, biases of queries: "
            f"{marks[3]}), so residuals and kernel are unknown. Pass --config with the run's "
            "train_config.yml as JSON."
        )
    return forms[marks]


def model_arguments(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of the authors' model: the JSON itself, or its model / kwargs.

    Raises: SaccadeError if they are missing.
    """
    given = hint(config, "model", "kwargs", default=config)
    if not isinstance(hint(given, "latent_graph_kwargs"), Mapping):
        raise SaccadeError(
            f"--config: no latent_graph_kwargs in {sorted(map(str, config))[:8]}, nor at model / "
            "kwargs. Pass the run's train_config.yml as JSON, or its model's arguments."
        )
    arguments: Mapping[str, Any] = given
    return arguments


def check_told(path: str, config: Mapping[str, Any] | None, fields: Mapping[str, Any]) -> None:
    """Check that the counts of a configuration are those of the tensors.

    Raises: SaccadeError naming the first that differs.
    """
    arguments = model_arguments(config) if config is not None else {}
    stated = {
        "num_iterations": "propagator_layers",
        "num_heads": "heads",
        "num_mediator_latents": "modules",
        "num_output_latents": "readout_modules",
        "signature_dim": "signature_dim",
    }
    checks = {
        name: (hint(arguments, "latent_graph_kwargs", name), fields[ours])
        for name, ours in stated.items()
    }
    checks["output_dim"] = (hint(arguments, "output_dim"), fields["classes"])
    check_stated(path, checks)


def told(path: str, arguments: Mapping[str, Any]) -> NACForm:
    """Return the form that a configuration describes, with the defaults of the authors' code.

    Raises: SaccadeError if it sets something that has no counterpart here.
    """
    graph = arguments["latent_graph_kwargs"]
    head_dim = whole_number(hint(graph, "head_dim", default=64), "head_dim")
    attention = hint(graph, "propagator_kwargs", "latent_attention_kwargs", default={}) or {}
    kernel = hint(attention, "kernel_kwargs", default={}) or {}
    read_out = hint(graph, "read_out_kwargs", "latent_attention_kwargs", default={}) or {}
    _check_kernels(path, kernel, hint(read_out, "kernel_kwargs", default={}) or {})
    pooled = arguments.get("output_tokenizer_type") == "OutputLatentPooling"
    kind = hint(arguments, "output_tokenizer_kwargs", "softmax_type", default="gumbel")
    return NACForm(
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
    """Return True if no kernel masks the attention.

    Raises: SaccadeError if a kernel masks only the propagators or only the read-out.
    """
    name = "mask_attn_scores_with_affinities"
    masked = {bool(hint(module, name, default=True)) for module in (attention, read_out)}
    if len(masked) == 2:
        raise SaccadeError(
            f"{path}: --config has {name} for only one of propagators and read-out, expected the "
            "same for both. Such a NAC is not supported."
        )
    return masked == {False}


def _check_kernels(path: str, *kernels: Mapping[str, Any]) -> None:
    """Refuse arguments that no shipped configuration sets.

    Raises: SaccadeError naming the argument.
    """
    for name in ("eliminate_diagonal", "use_gumbel_along_functions"):
        if any(kernel.get(name) for kernel in kernels):
            raise SaccadeError(
                f"{path}: --config sets {name}, which is not supported. Expected false, as in "
                "every configuration that the authors ship."
            )


def _cut(kernel: Mapping[str, Any]) -> float:
    return float(hint(kernel, "truncation", default=None) or 0)


def _union(path: str, graph: Mapping[str, Any]) -> bool:
    """Return True if the read-in's modules stay, in addition to the processor's.

    Raises: SaccadeError for a combination that is not supported.
    """
    flags = tuple(
        bool(graph.get(name, default))
        for name, default in (
            ("disable_input_mediator_communication", False),
            ("use_input_states_as_mediator_states", False),
            ("enable_input_output_communication", True),
            ("enable_persistent_input_mediator_communication", True),
        )
    )
    if flags[:3] == (True, True, False):
        return False
    if flags == (False, False, True, True):
        return True
    raise SaccadeError(
        f"{path}: --config has disable_input_mediator_communication, "
        "use_input_states_as_mediator_states and enable_input_output_communication "
        f"{', '.join(map(str, flags[:3]))}. Expected True, True, False (the read-in's modules are "
        "the processor's) or False, False, True with persistent communication (they stay)."
    )


BACKBONE = "input_tokenizer.backbone."
GRID = "input_tokenizer.positional_grid.grid"


def circuit_fields(reading: Reading, form: NACForm, graph: str) -> dict[str, Any]:
    """Return the fields of the circuit's tables, widths and layers.

    Raises: SaccadeError if a width is not a multiple of a head's, or the tables do not fit.
    """
    first = f"{graph}propagators.0."
    plain = f"{first}ffn.ffn.0.lin.weight" in reading.tensors
    weight = "lin.weight" if plain else "native_weight"
    (dim,) = reading.shape(f"{first}ffn.layernorm.weight")
    wide, hidden = (reading.shape(f"{first}ffn.ffn.{index}.{weight}") for index in (0, 2))
    return {
        "dim": dim,
        "propagator_layers": reading.depth(rf"{re.escape(graph)}propagators\.(\d+)\."),
        "ffn_dim": hidden[1],
        "ffn_gate": "geglu" if wide[0] == 2 * hidden[1] else "none",
        "modulation": not plain,
        "modfc_one": form.one,
        "modfc_norm_affine": False,
        "read_in_residual": form.read_in_residual,
        "read_in_query_norm": True,
        "read_out_residual": form.read_out_residual,
        "read_out_query_norm": True,
        "sender_norm": f"{first}latent_attention.sender_layernorm.weight" in reading.tensors,
        **table_fields(reading, form, graph, plain=plain),
        **head_widths(reading, form, graph, weight),
        **kernel_fields(reading, form, graph),
        **last_fields(reading, f"{graph}read_out."),
    }


def table_fields(reading: Reading, form: NACForm, graph: str, *, plain: bool) -> dict[str, Any]:
    """Return the fields of modules, codes and signatures, and of their initial state.

    Raises: SaccadeError if the two tables do not fit.
    """
    readers, code_dim = reading.shape(f"{graph}input_latents.codes_")
    # Plain layers use no codes, so a baseline may leave the processor's out.
    key = "input" if plain else "mediator"
    modules = reading.shape(f"{graph}{key}_latents.codes_")[0]
    if not form.union and modules != readers:
        raise SaccadeError(
            f"{reading.path}: has {readers} read-in and {modules} processor modules. Expected "
            "equal numbers, because the read-in's states become the processor's. Pass --config "
            "with the run's train_config.yml as JSON."
        )
    signatures = f"{graph}mediator_latents.signatures_"
    known = signatures in reading.tensors
    seeder = f"{graph}latent_seeder.code_to_state_mu.weight" in reading.tensors
    noise = f"{graph}latent_seeder.code_to_state_logvar.weight" in reading.tensors
    return {
        "modules": modules,
        "readout_modules": reading.shape(f"{graph}output_latents.codes_")[0],
        "code_dim": code_dim,
        "signature_dim": reading.shape(signatures)[1] if known else 1,
        "signature_init": "random",
        "initial_state": "linear" if seeder else "code",
        "state_noise": noise,
        "read_in_codes": "shared" if plain and not form.union else "own",
        "read_in_modules": readers if form.union else 0,
    }


def head_widths(reading: Reading, form: NACForm, graph: str, weight: str) -> dict[str, Any]:
    """Return the heads of the propagators, and of read-in and read-out, which must be equal.

    Raises: SaccadeError if a width is not a multiple of a head's.
    """
    places = {
        "propagators": (f"{graph}propagators.0.latent_attention", form.head_dim),
        "read_in": (f"{graph}read_in.read_in_attention", form.read_in_head_dim),
        "read_out": (f"{graph}read_out.latent_attention", form.read_out_head_dim),
    }
    heads = {}
    for name, (place, head_dim) in places.items():
        width = reading.shape(f"{place}.query_compiler.{weight}")[0]
        if width % head_dim:
            raise SaccadeError(
                f"{reading.path}: {name} has width {width}, which is not a multiple of the head "
                f"width {head_dim}. Pass --config, the run's train_config.yml as JSON, with "
                "head_dim."
            )
        heads[name] = (width // head_dim, head_dim)
    if heads["read_in"] != heads["read_out"]:
        raise SaccadeError(
            f"{reading.path}: read-in and read-out have {heads['read_in']} and "
            f"{heads['read_out']} heads and widths, expected the same. Such a NAC is not supported."
        )
    (count, width), (read_count, read_width) = heads["propagators"], heads["read_in"]
    read = {"read_heads": read_count, "read_head_dim": read_width}
    return {"heads": count, "head_dim": width, **read}


def bandwidths(reading: Reading, graph: str) -> list[str]:
    """Return the keys of the kernels' bandwidths: every propagator's, then the read-out's."""
    layers = reading.depth(rf"{re.escape(graph)}propagators\.(\d+)\.")
    places = [f"propagators.{index}" for index in range(layers)]
    keys = [f"{graph}{place}.latent_attention.kernel.bandwidth" for place in (*places, "read_out")]
    return [key for key in keys if key in reading.tensors]


def kernel_fields(reading: Reading, form: NACForm, graph: str) -> dict[str, Any]:
    """Return the fields of bandwidth and cutoff, and of their training."""
    values = [reading.tensors[key] for key in bandwidths(reading, graph)]
    known = (
        []
        if any(tensor.is_meta for tensor in values)
        else [float(tensor.detach()) for tensor in values]
    )
    learned = form.epsilon_learned or len(set(known)) > 1
    cut = max(form.truncate, form.truncate_read_out)
    # From the authors' training: form of the targets, loss, matching. The graph is not recorded.
    prior = {"prior_form": "official", "structure_loss": "mse", "matching": "hungarian"}
    return {
        **prior,
        "graph_refresh_steps": 1,
        "connectivity": "dense" if form.dense else "learned",
        "epsilon": known[0] if known and not form.dense else 1.0,
        "epsilon_learned": learned and not form.dense,
        "truncate": cut,
        "truncate_read_out": form.truncate_read_out > 0 or cut == 0,
        "kernel_draw": "sample" if form.stochastic else "none",
        "kernel_clamp": "dtype",
        "tau": form.tau,
        "drop_path": form.drop_path,
        "code_noise": form.code_noise,
    }


def last_fields(reading: Reading, read_out: str) -> dict[str, Any]:
    """Return the fields for the layers from the read-out modules' states to logits."""
    for key, kind in (("native_weight", "modulated"), ("lin.weight", "linear")):
        name = f"{read_out}head.1.{key}"
        if name in reading.tensors:
            norm = f"{read_out}head.0.module.weight" in reading.tensors
            classes = reading.shape(name)[0]
            return {"classes": classes, "confidence": "first", "head": kind, "head_norm": norm}
    pooled = "output_tokenizer.to_logits.weight"
    return {"classes": reading.shape(pooled)[0]} if pooled in reading.tensors else {}


def image_fields(reading: Reading, official: Official) -> dict[str, Any]:
    """Return the fields of the tokenizer and the image size.

    Raises: SaccadeError if there is no grid of positions and no size in --config.
    """
    stages = reading.depth(rf"{re.escape(BACKBONE)}downsample_layers\.(\d+)\.")
    places = [f"{BACKBONE}downsample_layers.{index}." for index in range(stages)]
    widths = [
        reading.shape(f"{place}{0 if index == 0 else 1}.weight")[0]
        for index, place in enumerate(places)
    ]
    blocks = [
        reading.depth(rf"{re.escape(BACKBONE)}stages\.{index}\.(\d+)\.") for index in range(stages)
    ]
    channels = reading.shape(f"{BACKBONE}downsample_layers.0.0.weight")[1]
    side_px = 4 * 2 ** (stages - 1)
    if GRID in reading.tensors:
        behind, rows, columns = reading.shape(GRID)
        size = rows * side_px, columns * side_px
    else:
        behind, size = 0, _told_size(official)
    return {
        "tokenizer": "convnext",
        "convnext_widths": widths,
        "convnext_blocks": blocks,
        "positions": "concat" if behind else "none",
        "token_width": widths[-1] + behind,
        "height_px": size[0],
        "width_px": size[1],
        "channels": channels,
        "mean": IMAGENET_MEAN if channels == 3 else (sum(IMAGENET_MEAN) / 3,),
        "std": IMAGENET_STD if channels == 3 else (sum(IMAGENET_STD) / 3,),
    }


def _told_size(official: Official) -> tuple[int, int]:
    given = hint(official.config, "data", "dataset", "kwargs", "input_size")
    side = hint(official.config, "input_size", default=given)
    if not isinstance(side, int) or side < 1:
        raise SaccadeError(
            f"{official.path}: has no grid of positions, so the image size is not in the file; "
            f'found {side!r}. Pass it with --config: {{"input_size": 224, ...}}.'
        )
    return side, side
