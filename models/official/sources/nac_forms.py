# SPDX-License-Identifier: Apache-2.0
"""The configuration of the NAC authors' models: from the shapes of their tensors and, for what
shapes do not tell, from their JSON or from the template that the tensor names show.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count
from saccade.models.official.conversion import Original, Reading
from saccade.models.official.json_files import at, declared, flattened
from saccade.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD

GRAPH = "latent_graphs.0."


_PLACE = "latent_graph_kwargs"
_READ_IN, _READ_OUT = f"{_PLACE}.read_in_kwargs", f"{_PLACE}.read_out_kwargs"
_ATTENTION = f"{_PLACE}.propagator_kwargs.latent_attention_kwargs"
_LAST = f"{_READ_OUT}.latent_attention_kwargs"
_KERNEL, _LAST_KERNEL = f"{_ATTENTION}.kernel_kwargs", f"{_LAST}.kernel_kwargs"
_MASKED = "mask_attn_scores_with_affinities"


@dataclass(frozen=True)
class NACForm:
    """The form of a NAC: how two files with the same tensors may differ.

    It is read from the run's train_config.yml as JSON, with the defaults of the authors' code.
    """

    template: str = at(None, "")  # the authors' template, if the tensor names showed it
    head_dim: Count = at(f"{_PLACE}.head_dim", 64)
    read_in_head_dim: Count | None = at(f"{_READ_IN}.head_dim")
    read_out_head_dim: Count | None = at(f"{_READ_OUT}.head_dim")
    one: bool = at(f"{_PLACE}.mod_fc_kwargs.add_one_to_scale", False)  # 1 + gain
    read_in_residual: bool = at(f"{_READ_IN}.include_residual_in_read_in_attention", False)
    read_out_residual: bool = at(f"{_READ_OUT}.include_residual_in_latent_attention", True)
    truncate: float | None = at(f"{_KERNEL}.truncation")
    truncate_read_out: float | None = at(f"{_LAST_KERNEL}.truncation")
    masked: bool = at(f"{_ATTENTION}.{_MASKED}", True)  # by the kernel, in the propagators
    masked_read_out: bool = at(f"{_LAST}.{_MASKED}", True)
    # The read-in's modules do not become the processor's, and are read beside them.
    apart: bool = at(f"{_PLACE}.disable_input_mediator_communication", False)
    same_states: bool = at(f"{_PLACE}.use_input_states_as_mediator_states", False)
    read_at_end: bool = at(f"{_PLACE}.enable_input_output_communication", True)
    persistent: bool = at(f"{_PLACE}.enable_persistent_input_mediator_communication", True)
    pooling: str | None = at("output_tokenizer_type")
    softmax: str = at("output_tokenizer_kwargs.softmax_type", "gumbel")
    temperature: float = at("output_tokenizer_kwargs.softmax_temperature", 1.0)
    epsilon_learned: bool = at(f"{_KERNEL}.learnable_bandwidth", True)
    stochastic: bool = at(f"{_KERNEL}.stochastic_kernel", False)  # in training
    tau: float = at(f"{_KERNEL}.stochastic_sampling_temperature", 1.0)
    drop_path: float | None = at(f"{_PLACE}.path_drop_prob")
    code_noise: float | None = at(f"{_PLACE}.code_noise_scale")
    # Not supported.
    eliminate_diagonal: bool | None = at(f"{_KERNEL}.eliminate_diagonal")
    eliminate_diagonal_last: bool | None = at(f"{_LAST_KERNEL}.eliminate_diagonal")
    use_gumbel: bool | None = at(f"{_KERNEL}.use_gumbel_along_functions")
    use_gumbel_last: bool | None = at(f"{_LAST_KERNEL}.use_gumbel_along_functions")

    @property
    def union(self) -> bool:
        """True if the read-in's modules stay, in addition to the processor's."""
        return not self.apart

    @property
    def gumbel(self) -> bool:
        """True if the pooling draws at random, also in evaluation."""
        return self.pooling == "OutputLatentPooling" and self.softmax == "gumbel"


@dataclass(frozen=True)
class NACJson(NACForm):
    """All that is read of a run's JSON; `Any` is only compared with the tensors."""

    num_iterations: Any = at(f"{_PLACE}.num_iterations", ours="propagator_layers")
    num_heads: Any = at(f"{_PLACE}.num_heads", ours="heads")
    num_mediator_latents: Any = at(f"{_PLACE}.num_mediator_latents", ours="modules")
    num_output_latents: Any = at(f"{_PLACE}.num_output_latents", ours="readout_modules")
    signature_dim: Any = at(f"{_PLACE}.signature_dim", ours="signature_dim")
    output_dim: Any = at("output_dim", ours="classes")
    latent_dim_head: Count = 64  # of the Perceiver IO baseline
    cross_dim_head: Count = 64
    input_size: Any = None
    data_size: Any = at("data.dataset.kwargs.input_size")


# The read-in's modules become the processor's.
_JOINED: dict[str, Any] = {
    "apart": True,
    "same_states": True,
    "read_at_end": False,
    "epsilon_learned": False,
}
PAPER = NACForm(
    template="INET-110E-NC-*",
    one=True,
    read_in_residual=True,
    read_out_residual=False,
    stochastic=True,
    tau=0.5,
    **_JOINED,
)
PERCEIVER = replace(PAPER, template="TINET-PIOLIKE-X", masked=False, masked_read_out=False)
TINY = NACForm(template="TINY-INET-NC-X", truncate=0.9, drop_path=0.1)
FULL = replace(
    TINY,
    template="nc_full_tiny_imnet",
    read_in_residual=True,
    read_out_residual=False,
    code_noise=0.05,
)


def form_of(official: Original) -> NACForm:
    """Return the form given by --config, or by the template that the tensor names show.

    Raises: SaccadeError if neither tells the form.
    """
    if official.config is None:
        return recognised(official)
    given = flattened(official.config)
    if not isinstance(given.get(_PLACE), Mapping):
        raise SaccadeError(
            f"--config: no latent_graph_kwargs in {sorted(map(str, official.config))[:8]}, nor at "
            "model / kwargs. Pass the run's train_config.yml as JSON, or its model's arguments."
        )
    return checked(official.path, declared(NACForm, given))


def recognised(official: Original) -> NACForm:
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


def checked(path: str, form: NACForm) -> NACForm:
    """Return a form of --config.

    Raises: SaccadeError if it sets something that has no counterpart here.
    """
    unsupported = {
        "eliminate_diagonal": form.eliminate_diagonal or form.eliminate_diagonal_last,
        "use_gumbel_along_functions": form.use_gumbel or form.use_gumbel_last,
        f"{_MASKED} for only one of propagators and read-out": form.masked != form.masked_read_out,
    }
    for name in [name for name, said in unsupported.items() if said]:
        raise SaccadeError(
            f"{path}: --config sets {name}, which is not supported. Expected the values of a "
            "configuration that the authors ship."
        )
    flags = (form.apart, form.same_states, form.read_at_end)
    if flags != (True, True, False) and not (flags == (False, False, True) and form.persistent):
        raise SaccadeError(
            f"{path}: --config has disable_input_mediator_communication, "
            "use_input_states_as_mediator_states and enable_input_output_communication "
            f"{', '.join(map(str, flags))}. Expected True, True, False (the read-in's modules are "
            "the processor's) or False, False, True with persistent communication (they stay)."
        )
    return form


BACKBONE = "input_tokenizer.backbone."
GRID = "input_tokenizer.positional_grid.grid"


def circuit_fields(reading: Reading, form: NACForm, graph: str) -> dict[str, Any]:
    """Return the fields of the circuit's tables, widths and layers.

    Raises: SaccadeError if a width is not a multiple of a head's, or the tables do not fit.
    """
    first = f"{graph}propagators.0."
    plain = f"{first}ffn.ffn.0.lin.weight" in reading.tensors
    weight = "lin.weight" if plain else "native_weight"
    (dim,) = reading.shape(f"{first}ffn.layernorm.weight", 1)
    wide, hidden = (reading.shape(f"{first}ffn.ffn.{index}.{weight}", 2) for index in (0, 2))
    return {
        "dim": dim,
        "propagator_layers": reading.depth(f"{graph}propagators.#."),
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
        **_table_fields(reading, form, graph, plain=plain),
        **_head_widths(reading, form, graph, weight),
        **_kernel_fields(reading, form, graph),
        **last_fields(reading, f"{graph}read_out."),
        "confidence_noise": form.gumbel,
    }


def _table_fields(reading: Reading, form: NACForm, graph: str, *, plain: bool) -> dict[str, Any]:
    """Return the fields of modules, codes and signatures, and of their initial state.

    Raises: SaccadeError if the two tables do not fit.
    """
    readers, code_dim = reading.shape(f"{graph}input_latents.codes_", 2)
    # Plain layers use no codes, so a baseline may leave the processor's out.
    key = "input" if plain else "mediator"
    modules = reading.shape(f"{graph}{key}_latents.codes_")[0]
    if not form.union and modules != readers:
        raise SaccadeError(
            f"{reading.path}: has {readers} read-in and {modules} processor modules. Expected "
            "equal numbers, because the read-in's states become the processor's. Pass --config "
            "with the run's train_config.yml as JSON."
        )
    seeder = f"{graph}latent_seeder.code_to_state_"
    return {
        "modules": modules,
        "readout_modules": reading.shape(f"{graph}output_latents.codes_")[0],
        "code_dim": code_dim,
        "signature_dim": reading.size(f"{graph}mediator_latents.signatures_", 1, default=1),
        "signature_init": "random",
        "initial_state": "linear" if f"{seeder}mu.weight" in reading.tensors else "code",
        "state_noise": f"{seeder}logvar.weight" in reading.tensors,
        "read_in_codes": "shared" if plain and not form.union else "own",
        "read_in_modules": readers if form.union else 0,
    }


def _head_widths(reading: Reading, form: NACForm, graph: str, weight: str) -> dict[str, Any]:
    """Return the heads of the propagators, and of read-in and read-out, which must be equal.

    Raises: SaccadeError if a width is not a multiple of a head's.
    """
    places = {
        "propagators": (f"{graph}propagators.0.latent_attention", form.head_dim),
        "read_in": (f"{graph}read_in.read_in_attention", form.read_in_head_dim or form.head_dim),
        "read_out": (f"{graph}read_out.latent_attention", form.read_out_head_dim or form.head_dim),
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
    places = [f"propagators.{index}" for index in range(reading.depth(f"{graph}propagators.#."))]
    keys = [f"{graph}{place}.latent_attention.kernel.bandwidth" for place in (*places, "read_out")]
    return [key for key in keys if key in reading.tensors]


def _kernel_fields(reading: Reading, form: NACForm, graph: str) -> dict[str, Any]:
    """Return the fields of bandwidth and cutoff, and of their training."""
    values = [reading.tensors[key].detach() for key in bandwidths(reading, graph)]
    known = [] if any(tensor.is_meta for tensor in values) else [*map(float, values)]
    learned = form.epsilon_learned or len(set(known)) > 1
    cut, cut_read_out = form.truncate or 0.0, form.truncate_read_out or 0.0
    cut, dense = max(cut, cut_read_out), not form.masked
    # From the authors' training: form of the targets, loss, matching. The graph is not recorded.
    prior = {"prior_form": "official", "structure_loss": "mse", "matching": "hungarian"}
    return {
        **prior,
        "graph_refresh_steps": 1,
        "connectivity": "dense" if dense else "learned",
        "epsilon": known[0] if known and not dense else 1.0,
        "epsilon_learned": learned and not dense,
        "truncate": cut,
        "truncate_read_out": cut_read_out > 0 or cut == 0,
        "kernel_draw": "sample" if form.stochastic else "none",
        "kernel_clamp": "dtype",
        "tau": form.tau,
        "drop_path": form.drop_path or 0.0,
        "code_noise": form.code_noise or 0.0,
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


def image_fields(reading: Reading, official: Original) -> dict[str, Any]:
    """Return the fields of the tokenizer and the image size.

    Raises: SaccadeError if there is no grid of positions and no size in --config.
    """
    merges = f"{BACKBONE}downsample_layers."
    stages = range(reading.depth(f"{merges}#."))
    widths = [reading.shape(f"{merges}{stage}.{min(stage, 1)}.weight")[0] for stage in stages]
    channels = reading.shape(f"{merges}0.0.weight", 4)[1]
    side_px = 4 * 2 ** (len(stages) - 1)
    if GRID in reading.tensors:
        behind, rows, columns = reading.shape(GRID, 3)
        size = rows * side_px, columns * side_px
    else:
        behind, size = 0, _told_size(official)
    return {
        "tokenizer": "convnext",
        "convnext_widths": widths,
        "convnext_blocks": [reading.depth(f"{BACKBONE}stages.{stage}.#.") for stage in stages],
        "positions": "concat" if behind else "none",
        "token_width": widths[-1] + behind,
        "height_px": size[0],
        "width_px": size[1],
        "channels": channels,
        "mean": IMAGENET_MEAN if channels == 3 else (sum(IMAGENET_MEAN) / 3,),
        "std": IMAGENET_STD if channels == 3 else (sum(IMAGENET_STD) / 3,),
    }


def _told_size(official: Original) -> tuple[int, int]:
    json = declared(NACJson, flattened(official.config))
    side = json.input_size or json.data_size
    if not isinstance(side, int) or side < 1:
        raise SaccadeError(
            f"{official.path}: has no grid of positions, so the image size is not in the file; "
            f'found {side!r}. Pass it with --config: {{"input_size": 224, ...}}.'
        )
    return side, side
