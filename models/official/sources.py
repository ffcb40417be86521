# SPDX-License-Identifier: Apache-2.0
"""Whose checkpoints are read, and what may be said beside each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A code whose checkpoints are read: where its `convert` is, and what to say of it."""

    module: str
    takes: tuple[str, ...] = ("labels",)  # of the options that not every source knows
    checkpoint_key: str | None = None  # read where the file has it and the user names none
    hub_config: str | None = None  # the JSON that lies beside the weights in a hub's folder


OPTIONAL = ("labels", "vocabulary", "attention", "lam", "backbone", "deterministic")
_TRUNK = ("labels", "backbone")
_TIMM, _OPEN_CLIP = "config.json", "open_clip_config.json"

SOURCES = {
    "nac": Source("nac", ("labels", "deterministic"), checkpoint_key="model"),
    "sparo-clip": Source("sparo_clip", ("labels", "vocabulary"), hub_config=_OPEN_CLIP),
    "open-clip": Source("open_clip", ("labels", "vocabulary"), hub_config=_OPEN_CLIP),
    "sparo-dino": Source("sparo_dino", checkpoint_key="teacher"),
    "sot": Source("sot"),
    "tvmax-vqa": Source("tvmax_vqa", ("labels", "vocabulary", "attention", "lam")),
    "invariant-slot-attention": Source("invariant_slot_attention", ()),
    "vit": Source("vit", _TRUNK, hub_config=_TIMM),
    "deit": Source("deit", _TRUNK, hub_config=_TIMM),
    "swin": Source("swin", _TRUNK, hub_config=_TIMM),
}
