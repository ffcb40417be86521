# SPDX-License-Identifier: Apache-2.0
"""Whose checkpoints are read, and what may be said beside each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A code whose checkpoints are read: where its `convert` is, and what to say of it."""

    module: str
    reads: str  # whose checkpoints of what
    takes: tuple[str, ...] = ("labels",)  # of the options that not every source knows
    checkpoint_key: str | None = None  # read where the file has it and the user names none


OPTIONAL = ("labels", "vocabulary", "attention", "lam", "backbone")
_TRUNK = ("labels", "backbone")

SOURCES = {
    "sparo-clip": Source(
        "sparo_clip", "SPARO's fork of OpenCLIP: slots in both towers", ("labels", "vocabulary")
    ),
    "open-clip": Source("open_clip", "OpenCLIP and SPARO's baselines", ("labels", "vocabulary")),
    "sparo-dino": Source(
        "sparo_dino",
        "DINO with SPARO (keys inferred, no official file seen)",
        checkpoint_key="teacher",
    ),
    "sot": Source("sot", "SoT: its three sizes, every token embedding and head"),
    "tvmax-vqa": Source(
        "tvmax_vqa",
        "TVMAX: the MCAN network that answers questions",
        ("labels", "vocabulary", "attention", "lam"),
    ),
    "invariant-slot-attention": Source(
        "invariant_slot_attention", "Invariant Slot Attention, written in Flax", ()
    ),
    "vit": Source("vit", "ViT with timm's names, or with SoT's head on top", _TRUNK),
    "deit": Source("deit", "DeiT, or with SoT's head on top", _TRUNK),
    "swin": Source("swin", "Swin, or with SoT's head on top", _TRUNK),
}
