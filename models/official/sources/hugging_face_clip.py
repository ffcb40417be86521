# SPDX-License-Identifier: Apache-2.0
"""CLIP (both towers, or the image tower alone) and the image tower of SigLIP and SigLIP 2 with the
names of transformers.

Models of SigLIP 2 for images of one size are the same network (model_type siglip).

Source: modeling_clip.py, modeling_siglip.py and their configurations of transformers 4.57 and 5.23;
        Zhai et al. 2023, Sigmoid Loss for Language Image Pre-Training.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from saccade.core.schema import Count
from saccade.models.official.conversion import Conversion, Original, Reading
from saccade.models.official.json_files import declared, refused
from saccade.models.official.sources.clip import CLIP_VOCABULARY, text_notes, with_vocabulary
from saccade.models.official.sources.hugging_face import (
    Epsilon,
    TransformerJson,
    architecture_of,
    images_of,
    labels_of,
)
from saccade.models.official.sources.timm import embedding
from saccade.models.official.tables import (
    Row,
    Rows,
    as_rows,
    as_vector,
    joined,
    part,
    rows_of,
    scalar,
)
from saccade.models.sot.config import SoTConfig
from saccade.models.sparo.config import Pooling, SparoConfig

_BOTH, _PROJECTED, _STATES = ("CLIPModel", "CLIPVisionModelWithProjection", "CLIPVisionModel")
# In config.json before transformers 4.24, the end token was given as 2, and the largest id of a
# text was taken.
_LARGEST_ID = 2
_LAYERS = {
    "norm_attention.*": "layer_norm1.*",
    "attention.out.*": "self_attn.out_proj.*",
    "norm_mlp.*": "layer_norm2.*",
    "widen.*": "mlp.fc1.*",
    "narrow.*": "mlp.fc2.*",
}
_POSITION_IDS = (r".*\.position_ids", "counts from 0")


@dataclass(frozen=True)
class VisionJson(TransformerJson):
    """The configuration of CLIP's image tower."""

    hidden_act: Literal["quick_gelu", "gelu"] = "quick_gelu"
    layer_norm_eps: Epsilon = 1e-5
    patch_size: tuple[Count, Count] = (32, 32)


@dataclass(frozen=True)
class TextJson:
    """The configuration of CLIP's text tower."""

    hidden_act: Literal["quick_gelu", "gelu"] = "quick_gelu"
    layer_norm_eps: Epsilon = 1e-5
    num_hidden_layers: Count = 12
    hidden_size: Count = 512
    intermediate_size: Count = 2048
    num_attention_heads: Count = 8
    vocab_size: Count = CLIP_VOCABULARY
    max_position_embeddings: Count = 77
    eos_token_id: Count = 49407


@dataclass(frozen=True)
class ProjectionJson:
    """The configuration around both towers."""

    projection_dim: Count = 512


def convert(official: Original) -> Conversion:
    """Read a CLIP: the class token of an image and the end token of a text, both projected.

    Raises: SaccadeError if an option of its configuration is not supported.
    """
    name = architecture_of(official, (_BOTH, _PROJECTED, _STATES))
    vision = declared(VisionJson, *_tower(official, "vision_config"))
    images, fields = images_of(official, vision)
    whole = declared(ProjectionJson, official.config, f"{official.path}: config.json")
    fields |= {
        "image_width": vision.hidden_size,
        "image_layers": vision.num_hidden_layers,
        "image_heads": vision.num_attention_heads,
        "image_hidden": vision.intermediate_size,
        "eps": vision.layer_norm_eps,
        "activation": vision.hidden_act,
        "embed_dim": vision.hidden_size if name == _STATES else whole.projection_dim,
    }
    if name == _BOTH:
        fields |= _text_fields(official, vision)
    config = SparoConfig(**fields, pooling="cls", text=name == _BOTH)
    config = with_vocabulary(official, config)
    reading = Reading(official.path, official.tensors)
    reading.ignore(*_POSITION_IDS)
    # transformers 5 saves CLIPVisionModel without the prefix.
    prefix = "" if "embeddings.class_embedding" in official.tensors else "vision_model."
    reading.take(_rows(prefix))
    notes = text_notes(config) if config.text else ()
    if name == _STATES:
        import torch

        own = reading.shape(f"{prefix}post_layernorm.weight")[0]
        reading.put("image_pool.project.weight", torch.eye(own))
        notes = ("no projection: the embedding is the class token, brought to length 1",)
    return reading.converted(official, "sparo", config, images, notes)


def _tower(official: Original, name: str) -> tuple[Mapping[str, Any], str]:
    """Return the JSON of one tower, and its place; an image tower alone has it at the top level."""
    config = official.config or {}
    # The older `vision_config_dict` wins in transformers, too.
    for given in (config.get(f"{name}_dict"), config.get(name)):
        if isinstance(given, Mapping):
            return given, f"{official.path}: {name} of config.json"
    alone = config.get("model_type") != "clip" and name == "vision_config"
    return config if alone else {}, f"{official.path}: config.json"


def _text_fields(official: Original, vision: VisionJson) -> dict[str, Any]:
    text, where = _tower(official, "text_config")
    json = declared(TextJson, text, where)
    for name in ("hidden_act", "layer_norm_eps"):
        own, wanted = getattr(json, name), getattr(vision, name)
        if own != wanted:
            raise refused(f"{where}: {name}", own, f"{wanted!r}, as in the image tower")
    end, vocabulary = json.eos_token_id, json.vocab_size
    return {
        "vocabulary": vocabulary,
        "tokenizer": "clip" if vocabulary == CLIP_VOCABULARY else "custom",
        "context_length": json.max_position_embeddings,
        "text_width": json.hidden_size,
        "text_layers": json.num_hidden_layers,
        "text_heads": json.num_attention_heads,
        "text_hidden": json.intermediate_size,
        # The largest id of a text is its end, unless the end is not the last id of the vocabulary.
        "end_token": 0 if end in (_LARGEST_ID, vocabulary - 1) else end,
    }


def _block_rows(ours: str, theirs: str) -> Rows:
    """Return the rows of a tower's blocks, which SigLIP names as CLIP does."""
    mine, block = f"{ours}.blocks.#.", f"{theirs}encoder.layers.#."
    queries = tuple(f"{block}self_attn.{name}_proj.*" for name in "qkv")
    return (Row(f"{mine}attention.qkv.*", queries, joined), *rows_of(mine, block, _LAYERS))


def _rows(theirs: str) -> Rows:
    return (
        Row("image.class_token", f"{theirs}embeddings.class_embedding", as_vector),
        Row("image.position", f"{theirs}embeddings.position_embedding.weight"),
        Row("image.patches.weight", f"{theirs}embeddings.patch_embedding.weight"),
        Row("image.norm_input.*", f"{theirs}pre_layrnorm.*"),
        *_block_rows("image", theirs),
        Row("image_pool.norm.*", f"{theirs}post_layernorm.*"),
        Row("image_pool.project.weight", "visual_projection.weight"),
        Row("logit_scale", "logit_scale", scalar),
        Row("text.embedding.weight", "text_model.embeddings.token_embedding.weight"),
        Row("text.position", "text_model.embeddings.position_embedding.weight"),
        *_block_rows("text", "text_model."),
        Row("text_pool.norm.*", "text_model.final_layer_norm.*"),
        Row("text_pool.project.weight", "text_projection.weight"),
    )


_ALONE = "SiglipVisionModel"
_CLASSES = "SiglipForImageClassification"
_UNUSED = {
    r"text_model\..+|logit_(scale|bias)": "the text tower, whose SentencePiece vocabulary saccade "
    "does not read",
    _POSITION_IDS[0]: _POSITION_IDS[1],
}


@dataclass(frozen=True)
class SigLIPJson(TransformerJson):
    """The configuration of SigLIP's image tower."""

    hidden_act: Literal["gelu_pytorch_tanh", "gelu"] = "gelu_pytorch_tanh"
    vision_use_head: bool = True


def convert_siglip(official: Original) -> Conversion:
    """Read a classifier as family 'sot', the image tower of others as images only of 'sparo'.

    Raises: SaccadeError if an option of its configuration is not supported.
    """
    name = architecture_of(official, ("SiglipModel", _ALONE, _CLASSES))
    json = declared(SigLIPJson, *_tower(official, "vision_config"))
    images, fields = images_of(official, json)
    side = fields["patch_px"]
    reading = Reading(official.path, official.tensors)
    # transformers 5 saves SiglipVisionModel without the prefix.
    prefix = "" if "post_layernorm.weight" in official.tensors else "vision_model."
    config = SoTConfig(
        **fields,
        **json.sizes,
        remainder=bool(fields["height_px"] % side or fields["width_px"] % side),
        patches_only=True,
        activation="gelu" if json.hidden_act == "gelu" else "gelu_tanh",
        qkv_bias=True,
        pooling="gap",
        fusion="visual",
        classes=reading.shape("classifier.weight")[0] if name == _CLASSES else 1,
    )
    for pattern, reason in _UNUSED.items():
        reading.ignore(pattern, reason)
    rows = _siglip_rows(prefix)
    if name == _CLASSES:
        reading.ignore(r".*\bhead\..+", "the attention pooling, which the classifier does not read")
        reading.take((*rows, Row("head.word_fc.*", "classifier.*")))
        official = replace(official, labels=labels_of(official, config.classes))
        return reading.converted(official, "sot", config, images)
    pooling: Pooling = "map" if json.vision_use_head else "mean"
    rows += _pool_rows(f"{prefix}head.") if json.vision_use_head else ()
    return embedding(official, reading, config.shape, rows, images, pooling)


def _siglip_rows(theirs: str) -> Rows:
    return (
        Row("trunk.position", f"{theirs}embeddings.position_embedding.weight"),
        Row("trunk.embed.project.*", f"{theirs}embeddings.patch_embedding.*"),
        *_block_rows("trunk", theirs),
        Row("trunk.norm.*", f"{theirs}post_layernorm.*"),
    )


def _pool_rows(theirs: str) -> Rows:
    names = {"out.*": "attention.out_proj.*", "norm_mlp.*": "layernorm.*"}
    names |= {"widen.*": "mlp.fc1.*", "narrow.*": "mlp.fc2.*"}
    three = f"{theirs}attention.in_proj_*"
    return (
        Row("image_pool.query", f"{theirs}probe", as_rows),
        *(Row(f"image_pool.{name}.*", three, part(i, 3)) for i, name in enumerate("qkv")),
        *rows_of("image_pool.", theirs, names),
    )
