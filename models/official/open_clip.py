# SPDX-License-Identifier: Apache-2.0
"""OpenCLIP checkpoints without slots: class token, average, attention, bottleneck, codebook."""

from dataclasses import replace

from saccade.core.errors import SaccadeError
from saccade.models.official.authors_images import authors_images
from saccade.models.official.clip import (
    Shapes,
    clip_config,
    model_json,
    pooling_fields,
    towers,
)
from saccade.models.official.conversion import Converted, Official, Reading
from saccade.models.official.report import sources_of
from saccade.models.official.vit import convert_vit
from saccade.models.official.vit_keys import hint
from saccade.models.sparo.config import SparoConfig
from saccade.models.sparo.text_tokens import checked_merges

_SIZES = ("input_resolution", "context_length", "vocab_size")
_MASKS = ("attn_mask", "text.attn_mask")
_TIMM_TOWER = "visual.trunk."  # before the names of an image tower that is timm's
_TEXT = ("text.", "logit_scale", "logit_bias")
_NO_TEXT = "the text tower, which saccade does not read beside an image tower of timm"


def convert(official: Official) -> Converted:
    """Read a CLIP; its model JSON has what tensors do not tell: quick_gelu, average pooling.

    Of a model whose image tower is timm's, as in SigLIP, only that tower is read.

    Raises: SaccadeError if the file has slots, or the JSON is missing or contradicts the file.
    Source: OpenCLIP v2.20, and the SPARO fork's baselines.
    """
    if "visual.sparo.q_emb" in official.tensors:
        raise SaccadeError(
            f"{official.path}: has SPARO's read-out (visual.sparo.*), which needs SOURCE "
            "'sparo-clip'. Run: saccade convert sparo-clip ..."
        )
    if any(key.startswith(_TIMM_TOWER) for key in official.tensors):
        return _timm_tower(official)
    json = model_json(official.path, official.config)
    shapes = Shapes(official.path, official.tensors)
    if official.config is None or not (json["vision_cfg"] or "quick_gelu" in json):
        raise SaccadeError(
            f"{official.path}: the tensors of a CLIP do not tell whether it was trained with "
            "quick_gelu, or whether it averages its tokens. Pass its OpenCLIP model JSON as "
            '--config, at least {"quick_gelu": true} (OpenAI\'s models) or {"quick_gelu": false}.'
        )
    config = clip_config(shapes, json, pooling_fields(official.path, official.tensors, json))
    return converted(official, config, shapes.text, notes=())


def converted(
    official: Official,
    config: SparoConfig,
    text: str,
    notes: tuple[str, ...],
    source: str = "open-clip",
) -> Converted:
    """Return the tensors of a CLIP of this configuration under our names.

    Raises: SaccadeError if the given vocabulary is too small.
    """
    if official.vocabulary:
        merges = checked_merges(official.vocabulary, config.vocabulary)
        config = replace(config, tokenizer="custom", merges=merges)
    reading = Reading(official.path, official.tensors)
    reading.take(towers(config, text))
    put_buffers(reading, config)
    for key in official.tensors:
        if why := _reason(key):
            reading.ignored[key] = why
    images = authors_images(source, config)
    return reading.converted(official, "sparo", config, images, notes + text_notes(config))


def _timm_tower(official: Official) -> Converted:
    """Read the image tower of a model, which is timm's.

    Raises: SaccadeError if it is not a ViT.
    """
    content = dict(official.config or {})
    model = content.get("model_cfg", content)
    name = str(hint(model, "vision_cfg", "timm_model_name", default=""))
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
    own = replace(official, tensors=tower, config=content | {"architecture": name})
    made = convert_vit(own, "vit", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    left_out = {key: _NO_TEXT for key in official.tensors if key.startswith(_TEXT)}
    return replace(
        made,
        names={
            ours: ", ".join(_TIMM_TOWER + key for key in sources_of(theirs))
            for ours, theirs in made.names.items()
        },
        ignored={_TIMM_TOWER + key: why for key, why in made.ignored.items()} | left_out,
    )


def text_notes(config: SparoConfig) -> tuple[str, ...]:
    """Return notes that a user must know about this model's texts."""
    if config.tokenizer != "custom" or config.merges:
        return ()
    return (
        f"{config.vocabulary} tokens are not CLIP's vocabulary, and no --vocabulary gave the "
        "merges: texts have to come as token ids",
    )


def _reason(key: str) -> str:
    if key in _SIZES:
        return "a size that the tensors tell themselves"
    return "the causal mask, which the text tower makes" if key in _MASKS else ""


def put_buffers(reading: Reading, config: SparoConfig) -> None:
    """Put the buffers that only our state dict has: the slots in their own order."""
    import torch

    if config.pooling == "sparo":
        reading.put("slot_order", torch.arange(config.slots))
