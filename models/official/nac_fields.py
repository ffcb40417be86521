# SPDX-License-Identifier: Apache-2.0
"""The configuration of the NAC authors' models, from the shapes of their tensors."""

import re
from typing import Any

from saccade.errors import SaccadeError
from saccade.models.official.conversion import Official
from saccade.models.official.nac_forms import Form
from saccade.models.official.vit_keys import Reading, hint
from saccade.models.sot.config import IMAGENET_MEAN, IMAGENET_STD

BACKBONE = "input_tokenizer.backbone."
GRID = "input_tokenizer.positional_grid.grid"


def circuit_fields(reading: Reading, form: Form, graph: str) -> dict[str, Any]:
    """Tables, widths and layers of the circuit.

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


def table_fields(reading: Reading, form: Form, graph: str, *, plain: bool) -> dict[str, Any]:
    """Modules, codes and signatures, and the state that they start from.

    Raises: SaccadeError if the two tables do not fit.
    """
    readers, code_dim = reading.shape(f"{graph}input_latents.codes_")
    # Plain layers use no codes, so that a baseline may leave the processor's out.
    key = "input" if plain else "mediator"
    modules = reading.shape(f"{graph}{key}_latents.codes_")[0]
    if not form.union and modules != readers:
        raise SaccadeError(
            f"{reading.path}: has {readers} read-in and {modules} processor modules, expected as "
            "many of both where the read-in's states become the processor's. Pass --config, the "
            "JSON of the run's train_config.yml."
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


def head_widths(reading: Reading, form: Form, graph: str, weight: str) -> dict[str, Any]:
    """Heads of propagators, and of read-in and read-out, which have the same here.

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
                f"{reading.path}: {name} is {width} wide, which heads of {head_dim} do not fill. "
                "Pass --config, the JSON of the run's train_config.yml, with head_dim."
            )
        heads[name] = (width // head_dim, head_dim)
    if heads["read_in"] != heads["read_out"]:
        raise SaccadeError(
            f"{reading.path}: read-in and read-out have {heads['read_in']} and "
            f"{heads['read_out']} heads and widths, expected the same. No NAC here has both."
        )
    (count, width), (read_count, read_width) = heads["propagators"], heads["read_in"]
    read = {"read_heads": read_count, "read_head_dim": read_width}
    return {"heads": count, "head_dim": width, **read}


def bandwidths(reading: Reading, graph: str) -> list[str]:
    """The keys of the kernels' bandwidths: of every propagator, then of the read-out."""
    layers = reading.depth(rf"{re.escape(graph)}propagators\.(\d+)\.")
    places = [f"propagators.{index}" for index in range(layers)]
    keys = [f"{graph}{each}.latent_attention.kernel.bandwidth" for each in (*places, "read_out")]
    return [key for key in keys if key in reading.tensors]


def kernel_fields(reading: Reading, form: Form, graph: str) -> dict[str, Any]:
    """Bandwidth and cut, and what training does with them."""
    values = [reading.tensors[key] for key in bandwidths(reading, graph)]
    known = (
        [] if any(each.is_meta for each in values) else [float(each.detach()) for each in values]
    )
    learned = form.epsilon_learned or len(set(known)) > 1
    cut = max(form.truncate, form.truncate_read_out)
    # Of the authors' training: their targets' form, loss and matching. Which graph is not said.
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
    """How the read-out modules' states become logits."""
    for key, kind in (("native_weight", "modulated"), ("lin.weight", "linear")):
        name = f"{read_out}head.1.{key}"
        if name in reading.tensors:
            norm = f"{read_out}head.0.module.weight" in reading.tensors
            classes = reading.shape(name)[0]
            return {"classes": classes, "confidence": "first", "head": kind, "head_norm": norm}
    pooled = "output_tokenizer.to_logits.weight"
    return {"classes": reading.shape(pooled)[0]} if pooled in reading.tensors else {}


def image_fields(reading: Reading, official: Official) -> dict[str, Any]:
    """The tokenizer and the size of the image.

    Raises: SaccadeError if there is no grid of positions and --config does not say the size.
    """
    stages = reading.depth(rf"{re.escape(BACKBONE)}downsample_layers\.(\d+)\.")
    places = [f"{BACKBONE}downsample_layers.{index}." for index in range(stages)]
    widths = [
        reading.shape(f"{each}{0 if index == 0 else 1}.weight")[0]
        for index, each in enumerate(places)
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
            f"{official.path}: has no grid of positions, so the image's size is not in the file; "
            f'found {side!r}. Pass it with --config: {{"input_size": 224, ...}}.'
        )
    return side, side
