# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of OpenCLIP: class token, average, attention, bottleneck, codebook; and what those
of SPARO's fork of it share with them.

Source: OpenCLIP v2.20, and the SPARO fork's baselines.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count, Natural
from saccade.models.official.authors_images import PreprocessCfg, authors_images
from saccade.models.official.conversion import Conversion, Original, Reading
from saccade.models.official.json_files import at, check_stated, declared, flattened
from saccade.models.official.sources.vit import convert_vit
from saccade.models.official.tables import Row, Rows, as_rows, part, rows_of, scalar, transposed
from saccade.models.sparo.config import SparoConfig
from saccade.models.sparo.text_tokens import checked_merges


@dataclass(frozen=True)
class CLIPJson:
    """What is read of a model's JSON, of OpenCLIP or SPARO's fork of it.

    `Any` is only compared with the tensors.
    """

    quick_gelu: bool | None = None
    embed_dim: Any = at("embed_dim", ours="embed_dim")
    reduce_depth: Natural | None = None
    num_codes: Any = at("num_codes", ours="codes")
    bottleneck_dim: Any = at("bottleneck_dim", ours="bottleneck_dim")
    sparo_type: str | None = None
    slots: Any = at("L", ours="slots")
    slot_dim: Any = at("V", ours="slot_dim")
    sparo_heads: Any = at("sparo_heads", ours="sparo_heads")
    share_queries: bool | None = None
    share_kv: bool | None = None
    image_size: Any = at("vision_cfg.image_size", ours="height_px")
    patch_size: Any = at("vision_cfg.patch_size", ours="patch_px")
    image_width: Any = at("vision_cfg.width", ours="image_width")
    image_layers: Any = at("vision_cfg.layers", ours="image_layers")
    head_width: Count | None = at("vision_cfg.head_width")
    image_heads: Count | None = at("vision_cfg.heads")  # of a DINO
    image_mean: bool = at("vision_cfg.global_average_pool", False)
    image_queries: Any = at("vision_cfg.n_queries", ours="queries")
    image_pooler_heads: Count = at("vision_cfg.attn_pooler_heads", 8)
    timm_model_name: str | None = at("vision_cfg.timm_model_name")
    hf_image_model: str | None = at("vision_cfg.hf_model_name")
    text_width: Any = at("text_cfg.width", ours="text_width")
    text_layers: Any = at("text_cfg.layers", ours="text_layers")
    vocabulary: Any = at("text_cfg.vocab_size", ours="vocabulary")
    context_length: Any = at("text_cfg.context_length", ours="context_length")
    text_heads: Count | None = at("text_cfg.heads")
    text_mean: bool = at("text_cfg.global_average_pool", False)
    text_queries: Any = at("text_cfg.n_queries", ours="text_queries")
    text_pooler_heads: Count = at("text_cfg.attn_pooler_heads", 8)
    hf_tokenizer_name: str | None = at("text_cfg.hf_tokenizer_name")
    hf_text_model: str | None = at("text_cfg.hf_model_name")
    preprocess_cfg: PreprocessCfg = field(default_factory=PreprocessCfg)


JSON = CLIPJson
CLIP_VOCABULARY = 49408
# Widths at which all of the project's models have heads of 64 channels.
_SAFE_WIDTHS = (384, 512, 768, 1024)
_TIMM_TOWER = "visual.trunk."  # before the names of an image tower that is timm's
_BLOCK = {
    "norm_attention.*": "ln_1.*",
    "attention.qkv.*": "attn.in_proj_*",
    "attention.out.*": "attn.out_proj.*",
    "norm_mlp.*": "ln_2.*",
    "widen.*": "mlp.c_fc.*",
    "narrow.*": "mlp.c_proj.*",
}
_QUERY_MAP = {"norm.*": "0.*", "first.*": "1.*", "norm_hidden.*": "3.*", "second.*": "4.*"}


def read_out(ours: str, theirs: str) -> Rows:
    """Return the rows of a read-out; its queries are numbered head by head, like our slots."""
    names = {"key.*": "k.*", "value.*": "v.*", "project.*": "proj.*"}
    query = Row(f"{ours}.read_out.query", f"{theirs}.q_emb", as_rows)
    return (query, *rows_of(f"{ours}.read_out.", f"{theirs}.", names))


def _attention(ours: str, theirs: str) -> Rows:
    """Return the rows of an attentional pooler, whose three projections may be one tensor."""
    names = {"query": "query", "norm_query.*": "ln_q.*", "norm_tokens.*": "ln_k.*"}
    three = f"{theirs}.attn.in_proj_*"
    return (
        *rows_of(f"{ours}.", f"{theirs}.", names | {"out.*": "attn.out_proj.*"}),
        *(Row(f"{ours}.{x}.weight", f"{theirs}.attn.{x}_proj_weight") for x in "qkv"),
        *(Row(f"{ours}.{x}.*", three, part(i, 3)) for i, x in enumerate("qkv")),
    )


def _rows(text: str) -> Rows:
    """Return the rows of every tensor of a CLIP; `text` is the prefix of the text tower's names."""
    return (
        Row("logit_scale", "logit_scale", scalar),
        Row("image.class_token", "visual.class_embedding"),
        Row("image.position", "visual.positional_embedding"),
        Row("image.patches.weight", "visual.conv1.weight"),
        Row("image.norm_input.*", "visual.ln_pre.*"),
        *rows_of("image.blocks.#.", "visual.transformer.resblocks.#.", _BLOCK),
        Row("text.embedding.weight", f"{text}token_embedding.weight"),
        Row("text.position", f"{text}positional_embedding"),
        *rows_of("text.blocks.#.", f"{text}transformer.resblocks.#.", _BLOCK),
        Row("codebook", "space_dict"),
        *rows_of("image_pool.map.", "img_query_model.q_map.", _QUERY_MAP),
        *rows_of("text_pool.map.", "txt_query_model.q_map.", _QUERY_MAP),
        Row("image_pool.norm.*", "visual.ln_post.*"),
        Row("text_pool.norm.*", f"{text}ln_final.*"),
        *read_out("image_pool", "visual.sparo"),
        *read_out("text_pool", "text_sparo"),
        Row("image_pool.project.weight", "visual.proj", transposed),
        Row("text_pool.project.weight", f"{text}text_projection", transposed),
        *_attention("image_pool", "visual.attn_pool"),
        *_attention("text_pool", f"{text}text_attn_pool"),
        Row("image_pool.widen.*", "vision_bottleproj.*"),
        Row("text_pool.widen.*", "text_bottleproj.*"),
    )


def convert(official: Original) -> Conversion:
    """Read a CLIP; its model JSON has what tensors do not tell: quick_gelu, average pooling.

    Of a model whose image tower is timm's, as in SigLIP, only that tower is read.

    Raises: SaccadeError if the file has slots, or the JSON is missing or contradicts the file.
    """
    if "visual.sparo.q_emb" in official.tensors:
        raise SaccadeError(
            f"{official.path}: has SPARO's read-out (visual.sparo.*), which needs SOURCE "
            "'sparo-clip'. Run: saccade convert sparo-clip ..."
        )
    if any(key.startswith(_TIMM_TOWER) for key in official.tensors):
        return _timm_tower(official)
    json, given = model_json(official), flattened(official.config)
    reading = Reading(official.path, official.tensors)
    towers = tower_shapes(reading)
    if not given.get("vision_cfg") and "quick_gelu" not in given:
        raise SaccadeError(
            f"{official.path}: the tensors of a CLIP do not tell whether it was trained with "
            "quick_gelu, or whether it averages its tokens. Pass its OpenCLIP model JSON as "
            '--config, at least {"quick_gelu": true} (OpenAI\'s models) or {"quick_gelu": false}.'
        )
    pooling = _pooling_fields(reading, json)
    check_stated(official.path, json, {"bottleneck_dim": 0} | pooling)
    fields = tower_fields(reading, json, towers) | pooling
    return converted(official, reading, SparoConfig(**fields), "open-clip")


def model_json(official: Original) -> CLIPJson:
    """Return the model's part of an OpenCLIP JSON.

    Raises: SaccadeError if it names towers that are not supported.
    """
    json = declared(CLIPJson, flattened(official.config))
    if foreign := json.hf_image_model or json.timm_model_name or json.hf_text_model:
        raise SaccadeError(
            f"{official.path}: a tower is another project's model {foreign!r:.60}, but only "
            "OpenCLIP's own vision and text transformers are supported. Convert a ViT model."
        )
    return json


def converted(
    official: Original,
    reading: Reading,
    config: SparoConfig,
    source: str,
    notes: tuple[str, ...] = (),
) -> Conversion:
    """Return the tensors of a CLIP of this configuration under our names.

    Raises: SaccadeError if the given vocabulary is too small.
    """
    config = with_vocabulary(official, config)
    sizes = r"input_resolution|context_length|vocab_size"
    reading.ignore(sizes, "a size that the tensors tell themselves")
    reading.ignore(r"(text\.)?attn_mask", "the causal mask, which the text tower makes")
    reading.take(_rows(_text_prefix(reading)))
    if config.pooling == "sparo":
        put_slot_order(reading, config)
    images = authors_images(source, config)
    return reading.converted(official, "sparo", config, images, notes + text_notes(config))


def with_vocabulary(official: Original, config: SparoConfig) -> SparoConfig:
    """Return the configuration with the merges of --vocabulary, if it is given.

    Raises: SaccadeError if they are not those of a vocabulary of this size.
    """
    if not official.vocabulary:
        return config
    merges = checked_merges(official.vocabulary, config.vocabulary)
    return replace(config, tokenizer="custom", merges=merges)


def put_slot_order(reading: Reading, config: SparoConfig) -> None:
    """Put the slots in their own order, a buffer that only our state dict has."""
    import torch

    reading.put("slot_order", torch.arange(config.slots))


def text_notes(config: SparoConfig) -> tuple[str, ...]:
    """Return notes that a user must know about this model's texts."""
    if config.tokenizer != "custom" or config.merges:
        return ()
    return (
        f"{config.vocabulary} tokens are not CLIP's vocabulary, and no --vocabulary gave the "
        "merges: texts have to come as token ids",
    )


def _timm_tower(official: Original) -> Conversion:
    """Read the image tower of a model, which is timm's.

    Raises: SaccadeError if it is not a ViT.
    """
    name = declared(CLIPJson, flattened(official.config)).timm_model_name or ""
    if not name.startswith("vit_"):
        raise SaccadeError(
            f"{official.path}: the image tower has timm's names, and timm_model_name of "
            f"vision_cfg is {name!r:.60}, expected a vit_*, such as vit_base_patch16_siglip_224. "
            "Copy the JSON of the model next to the weights, or convert another model."
        )
    tower = {
        key.removeprefix(_TIMM_TOWER): value
        for key, value in official.tensors.items()
        if key.startswith(_TIMM_TOWER)
    }
    config = {**(official.config or {}), "architecture": name}
    own = replace(official, tensors=tower, config=config)
    made = convert_vit(own, "vit", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    text = "the text tower, which saccade does not read beside an image tower of timm"
    starts = ("text.", "logit_scale", "logit_bias")
    left_out = {key: text for key in official.tensors if key.startswith(starts)}
    return replace(
        made,
        names={
            ours: ", ".join(_TIMM_TOWER + key for key in filter(None, theirs.split(", ")))
            for ours, theirs in made.names.items()
        },
        ignored={_TIMM_TOWER + key: why for key, why in made.ignored.items()} | left_out,
        rows=tuple(row.after(_TIMM_TOWER) for row in made.rows),
    )


def _text_prefix(reading: Reading) -> str:
    return "text." if "text.token_embedding.weight" in reading.tensors else ""


def tower_shapes(reading: Reading) -> dict[str, Any]:
    """Return the fields that the shapes of both towers decide.

    Raises: SaccadeError if they do not fit a vision transformer with a text tower.
    """
    text, resblocks = _text_prefix(reading), "transformer.resblocks."
    width, channels, patch, _ = reading.shape("visual.conv1.weight", 4)
    positions, _ = reading.shape("visual.positional_embedding", 2)
    vocabulary, text_width = reading.shape(f"{text}token_embedding.weight", 2)
    context, _ = reading.shape(f"{text}positional_embedding", 2)
    hidden = f"{resblocks}0.mlp.c_fc.weight"
    side = math.isqrt(positions - 1) * patch
    own = {"embed_dim": reading.size("visual.proj", 1)} if "visual.proj" in reading.tensors else {}
    return own | {
        "height_px": side,
        "width_px": side,
        "channels": channels,
        "patch_px": patch,
        "image_width": width,
        "image_layers": reading.depth(f"visual.{resblocks}#."),
        "image_hidden": reading.size(f"visual.{hidden}", default=4 * width),
        "vocabulary": vocabulary,
        "tokenizer": "clip" if vocabulary == CLIP_VOCABULARY else "custom",
        "context_length": context,
        "text_width": text_width,
        "text_layers": reading.depth(f"{text}{resblocks}#."),
        "text_hidden": reading.size(f"{text}{hidden}", default=4 * text_width),
    }


def tower_fields(reading: Reading, json: CLIPJson, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of both towers; shapes in the JSON must agree with the file.

    Raises: SaccadeError if the JSON contradicts the file, or the heads are unknown.
    """
    cut, width, text_width = json.reduce_depth or 0, fields["image_width"], fields["text_width"]
    layers = {name: fields[name] + cut for name in ("image_layers", "text_layers")}
    # The width of the projection is not embed_dim in every model with attentional poolers.
    measured = {name: size for name, size in fields.items() if name != "embed_dim"}
    check_stated(reading.path, json, measured | layers)
    unknown = {"vision_cfg.head_width": 0 if json.image_width or json.head_width else width}
    unknown["text_cfg.heads"] = text_width if json.text_heads is None else 0
    for name, tower in unknown.items():
        if tower and tower not in _SAFE_WIDTHS:
            raise SaccadeError(
                f"{reading.path}: a tower has width {tower}, and the number of its heads is not in "
                f"the tensors. Pass {name} in the JSON of --config."
            )
    fields |= {"tokenizer": "custom"} if json.hf_tokenizer_name else {}
    return {
        **fields,
        **layers,
        "reduce_depth": cut,
        "image_heads": max(1, width // (json.head_width or 64)),
        "text_heads": json.text_heads or max(1, text_width // 64),
        "activation": "quick_gelu" if json.quick_gelu else "gelu",
    }


def _pooling_fields(reading: Reading, json: CLIPJson) -> dict[str, Any]:
    """Return the fields of pooling without slots.

    Raises: SaccadeError if the JSON averages a text's tokens.
    """
    fields: dict[str, Any] = {}
    if "space_dict" in reading.tensors:
        codes, dim = reading.shape("space_dict", 2)
        fields = {"pooling": "codebook", "codes": codes, "embed_dim": dim}
    else:
        fields = _state_fields(reading, json)
    if "vision_bottleproj.weight" in reading.tensors:
        fields["embed_dim"], fields["bottleneck_dim"] = reading.shape("vision_bottleproj.weight", 2)
    return fields


def _state_fields(reading: Reading, json: CLIPJson) -> dict[str, Any]:
    """Return the fields of a class token, a mean or attentional poolers, per tower."""
    fields: dict[str, Any] = {"pooling": "gap" if json.image_mean else "cls"}
    if "text_attn_pool.query" in reading.tensors:
        fields |= {
            "text_pooling": "attention",
            "text_queries": reading.size("text_attn_pool.query"),
            "text_pooler_heads": json.text_pooler_heads,
            "text_mean_of_queries": json.text_mean,
        }
    elif json.text_mean:
        raise SaccadeError(
            f"{reading.path}: text_cfg has global_average_pool without an attentional pooler (no "
            "text_attn_pool.query), which OpenCLIP does not define. Pass the JSON of this model."
        )
    if "visual.attn_pool.query" in reading.tensors:
        fields = (
            {"text_pooling": "eos"}
            | fields
            | {
                "pooling": "attention",
                "queries": reading.size("visual.attn_pool.query"),
                "pooler_heads": json.image_pooler_heads,
                "mean_of_queries": json.image_mean,
            }
        )
    return fields
