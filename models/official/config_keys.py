# SPDX-License-Identifier: Apache-2.0
"""The keys of `--config` by source, so that a misspelled one is not ignored.

A JSON that a user writes for a source has few keys, and all others are refused. A project's own
JSON (timm, OpenCLIP, transformers, the authors' runs) has many keys that are not read: there, only
a key that resembles one that is read, and is missing, is reported.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.spelling import nearest

# Dotted paths of what the converters read. Below a path that is listed, every key is accepted.
_HEAD = (
    "representationConfig.fusion_type",
    "representationConfig.args.num_heads",
    *(
        f"representationConfig.args.normalization.{x}"
        for x in ("type", "svNum", "alpha", "iterNum")
    ),
)
_TIMM_IMAGES = tuple(
    f"pretrained_cfg.{x}"
    for x in ("input_size", "crop_pct", "crop_mode", "mean", "std", "interpolation")
)
_CLIP_IMAGES = tuple(
    f"preprocess_cfg.{x}"
    for x in ("size", "mean", "std", "resize_mode", "interpolation", "fill_color")
)
_POOLER = ("n_queries", "attn_pooler_heads", "global_average_pool", "width", "layers")
_CLIP = (
    *("quick_gelu", "embed_dim", "reduce_depth", "num_codes", "bottleneck_dim", "sparo_type"),
    *("L", "V", "sparo_heads", "share_queries", "share_kv", *_CLIP_IMAGES),
    *(f"vision_cfg.{x}" for x in ("image_size", "patch_size", "head_width", "heads", *_POOLER)),
    *(f"text_cfg.{x}" for x in ("vocab_size", "context_length", "heads", *_POOLER)),
    *("text_cfg.hf_tokenizer_name",),
)
# Arguments of timm's models, which their tensors tell; `num_heads` and `img_size` are read.
_TIMM = (
    *("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "depths"),
    *("num_heads", "mlp_ratio", "qkv_bias", "window_size", "drop_rate", "drop_path_rate"),
    *("architecture", "num_features", "global_pool", "label_names", "model_args"),
    *_HEAD,
    *_TIMM_IMAGES,
)
_GRAPH = (
    *("head_dim", "num_iterations", "num_heads", "num_mediator_latents", "num_output_latents"),
    *("signature_dim", "path_drop_prob", "code_noise_scale", "propagator_kwargs"),
    *("read_in_kwargs", "read_out_kwargs", "mod_fc_kwargs"),
)
_NAC = (
    *(f"latent_graph_kwargs.{x}" for x in _GRAPH),
    *("output_dim", "output_tokenizer_type", "output_tokenizer_kwargs", "latent_dim_head"),
    *("cross_dim_head", "input_size"),
)
_TOWER = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
    *("layer_norm_eps", "image_size", "patch_size", "num_channels", "qkv_bias", "embed_dim"),
    *("depths", "num_heads", "window_size", "mlp_ratio", "use_swiglu_ffn", "projection_dim"),
    *("vocab_size", "eos_token_id", "max_position_embeddings", "vision_use_head"),
    *("projection_size", "embedding_size", "hidden_sizes", "layer_type"),
)
_KEYS: Mapping[str, tuple[str, ...]] = {
    "sot": (
        *("ViTConfig.embed_dim", "ViTConfig.depth", "ViTConfig.num_heads", "in_chans", "img_size"),
        *_HEAD,
    ),
    **dict.fromkeys(("vit", "deit", "swin", "resnet"), _TIMM),
    **dict.fromkeys(("open-clip", "sparo-clip", "sparo-dino"), _CLIP),
    "nac": _NAC,
    "transformers": (
        *("model_type", "architectures", "id2label", "preprocessor_config", *_TOWER),
        *(f"{tower}.{key}" for tower in ("vision_config", "text_config") for key in _TOWER),
    ),
}
# Sources whose JSON a user writes, and keys that only a project's own JSON has.
# `invariant-slot-attention` and `tvmax-vqa` check their keys themselves.
_WRITTEN = ("vit", "deit", "swin", "resnet")
_USUAL = ("num_heads", "img_size", "representationConfig", "pretrained_cfg")
_FOREIGN = ("architecture", "pretrained_cfg", "preprocess_cfg", "representationConfig")
_NESTED = ("model_cfg", "model", "kwargs")  # where the model's part of a project's JSON may be
# A project's JSON has many names that are somewhat alike, such as `hidden_act` and `hidden_size`.
_LEAST_SIMILAR = {True: 0.6, False: 0.8}


def config_notes(
    source: str, given: Mapping[str, Any] | None, beside: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Return a note for each key that is not read but resembles one that is.

    `beside` is the JSON next to the weights, whose keys are known too.
    Raises: SaccadeError for any unknown key in a JSON that only a user writes.
    """
    if source not in _KEYS or not given:
        return ()
    written = source in _WRITTEN and not {*given} & {*_FOREIGN}
    known = {*_KEYS[source], *map(str, beside or ())}
    unknown = tuple(_unknown(_flat(given), known, _LEAST_SIMILAR[written]))
    if written and unknown:
        key, close = unknown[0]
        raise SaccadeError(
            f"--config: found the unknown key {key!r:.60}, expected some of "
            f"{', '.join(_USUAL)}.{f' Did you mean {close}?' if close else ''} Correct the key in "
            "the JSON, or leave it out."
        )
    return tuple(
        f"--config: {key!r:.60} is not read. Did you mean {close}?"
        for key, close in unknown
        if close
    )


def _flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON with the keys of the model's part next to those around it."""
    for name in _NESTED:
        if isinstance(given.get(name), Mapping):
            given = {key: given[key] for key in given if key != name} | dict(given[name])
    return dict(given)


def _unknown(
    given: Mapping[str, Any], known: Iterable[str], least: float, prefix: str = ""
) -> Iterator[tuple[str, str | None]]:
    """Yield each unknown key, and the known one that it resembles and that is missing."""
    inside = [path.partition(".") for path in known]
    names = {name for name, _, _ in inside}
    for key, value in given.items():
        if key not in names:
            close = nearest(str(key), sorted(names - {*given}), least)
            yield f"{prefix}{key}", close and f"{prefix}{close}"
            continue
        deeper = [rest for name, _, rest in inside if name == key and rest]
        if deeper and isinstance(value, Mapping):
            yield from _unknown(value, deeper, least, f"{prefix}{key}.")
