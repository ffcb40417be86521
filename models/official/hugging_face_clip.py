# SPDX-License-Identifier: Apache-2.0
"""CLIP with the names of transformers: both towers, or the image tower alone.

Source: modeling_clip.py and configuration_clip.py of transformers 4.57 and 5.23.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from saccade.models.official.clip import CLIP_VOCABULARY, layer, same
from saccade.models.official.conversion import Converted, Official, Reading, Row
from saccade.models.official.hugging_face import Values, architecture_of, joined
from saccade.models.official.hugging_face_images import processor_images
from saccade.models.official.open_clip import text_notes
from saccade.models.preprocessing import Preprocessing
from saccade.models.sparo.config import SparoConfig
from saccade.models.sparo.text_tokens import checked_merges

_BOTH, _PROJECTED, _STATES = "CLIPModel", "CLIPVisionModelWithProjection", "CLIPVisionModel"
_TOWER: dict[str, Any] = {
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "num_hidden_layers": 12,
    "projection_dim": 512,
}
_VISION = _TOWER | {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
}
_TEXT = _TOWER | {
    "vocab_size": CLIP_VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "eos_token_id": 49407,
}
_LAYERS = {
    "norm_attention": "layer_norm1",
    "attention.out": "self_attn.out_proj",
    "norm_mlp": "layer_norm2",
    "widen": "mlp.fc1",
    "narrow": "mlp.fc2",
}
# In config.json before transformers 4.24, the end token was given as 2, and the largest id of a
# text was taken.
_LARGEST_ID = 2


def convert(official: Official) -> Converted:
    """Read a CLIP: the class token of an image and the end token of a text, both projected.

    Raises: SaccadeError if an option of its configuration is not supported.
    """
    name = architecture_of(official, (_BOTH, _PROJECTED, _STATES))
    config = dict(official.config or {})
    vision = _tower(official, config, "vision_config", _VISION)
    images = processor_images(official, vision.count("num_channels"))
    size = images.preprocessing.height_px, images.preprocessing.width_px
    if size != vision.sides("image_size"):
        raise vision.refused("image_size", f"{list(size)}, the input of preprocessor_config.json")
    fields = _image_fields(vision, images.preprocessing)
    fields["embed_dim"] = vision.count("hidden_size")
    if name != _STATES:
        whole = Values(f"{official.path}: config.json", config, {"projection_dim": 512})
        fields["embed_dim"] = whole.count("projection_dim")
    if name == _BOTH:
        fields |= _text_fields(official, _tower(official, config, "text_config", _TEXT), vision)
    ours = SparoConfig(**fields, pooling="cls", text=name == _BOTH)
    if official.vocabulary:
        merges = checked_merges(official.vocabulary, ours.vocabulary)
        ours = replace(ours, tokenizer="custom", merges=merges)
    reading = Reading(official.path, official.tensors)
    # transformers 5 saves CLIPVisionModel without the prefix.
    prefix = "" if "embeddings.class_embedding" in official.tensors else "vision_model."
    reading.take(_rows(ours, prefix, projected=name != _STATES))
    notes = text_notes(ours) if ours.text else ()
    if name == _STATES:
        import torch

        own = reading.shape(f"{prefix}post_layernorm.weight")[0]
        reading.put("image_pool.project.weight", torch.eye(own))
        notes = ("no projection: the embedding is the class token, brought to length 1",)
    reading.ignore(r".*\.position_ids", "counts from 0")
    return reading.converted(official, "sparo", ours, images, notes)


def _tower(
    official: Official, config: Mapping[str, Any], name: str, usual: Mapping[str, Any]
) -> Values:
    """Return the values of one tower; an image tower saved alone has them at the top level."""
    given = config.get(name)
    if not isinstance(given, Mapping):
        given = config if config.get("model_type") == "clip_vision_model" else {}
    older = config.get(f"{name}_dict")  # wins in transformers, too
    given = older if isinstance(older, Mapping) else given
    where = f"{official.path}: {name} of config.json"
    values = Values(where, given, usual)
    values.require("hidden_act", "quick_gelu", "gelu")
    return values


def _image_fields(vision: Values, preprocessing: Preprocessing) -> dict[str, Any]:
    return {
        "height_px": preprocessing.height_px,
        "width_px": preprocessing.width_px,
        "channels": preprocessing.channels,
        "mean": preprocessing.mean,
        "std": preprocessing.std,
        "patch_px": vision.side("patch_size"),
        "image_width": vision.count("hidden_size"),
        "image_layers": vision.count("num_hidden_layers"),
        "image_heads": vision.count("num_attention_heads"),
        "image_hidden": vision.count("intermediate_size"),
        "eps": vision.number("layer_norm_eps"),
        "activation": vision["hidden_act"],
    }


def _text_fields(official: Official, text: Values, vision: Values) -> dict[str, Any]:
    text.require("hidden_act", vision["hidden_act"])
    text.require("layer_norm_eps", vision["layer_norm_eps"])
    vocabulary = text.count("vocab_size")
    end = text.count("eos_token_id")
    return {
        "vocabulary": vocabulary,
        "tokenizer": "clip" if vocabulary == CLIP_VOCABULARY else "custom",
        "context_length": text.count("max_position_embeddings"),
        "text_width": text.count("hidden_size"),
        "text_layers": text.count("num_hidden_layers"),
        "text_heads": text.count("num_attention_heads"),
        "text_hidden": text.count("intermediate_size"),
        # The largest id of a text is its end, unless the end is not the last id of the vocabulary.
        "end_token": 0 if end in (_LARGEST_ID, vocabulary - 1) else end,
    }


def _rows(config: SparoConfig, theirs: str, *, projected: bool) -> Iterator[Row]:
    yield "image.class_token", f"{theirs}embeddings.class_embedding", lambda x: x.flatten()
    yield "image.position", f"{theirs}embeddings.position_embedding.weight", same
    yield "image.patches.weight", f"{theirs}embeddings.patch_embedding.weight", same
    yield from layer("image.norm_input", f"{theirs}pre_layrnorm")
    yield from block_rows("image", theirs, config.image_layers)
    yield from layer("image_pool.norm", f"{theirs}post_layernorm")
    if projected:
        yield "image_pool.project.weight", "visual_projection.weight", same
    if not config.text:
        return
    yield "logit_scale", "logit_scale", lambda x: x.reshape(())
    yield "text.embedding.weight", "text_model.embeddings.token_embedding.weight", same
    yield "text.position", "text_model.embeddings.position_embedding.weight", same
    yield from block_rows("text", "text_model.", config.text_layers)
    yield from layer("text_pool.norm", "text_model.final_layer_norm")
    yield "text_pool.project.weight", "text_projection.weight", same


def block_rows(ours: str, theirs: str, layers: int) -> Iterator[Row]:
    """Yield the rows of a tower's blocks, which SigLIP names as CLIP does."""
    for index in range(layers):
        mine, other = f"{ours}.blocks.{index}", f"{theirs}encoder.layers.{index}"
        names = ("q_proj", "k_proj", "v_proj")
        yield from joined(f"{mine}.attention.qkv", f"{other}.self_attn", names)
        for name, hers in _LAYERS.items():
            yield from layer(f"{mine}.{name}", f"{other}.{hers}")
