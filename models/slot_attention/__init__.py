# SPDX-License-Identifier: Apache-2.0
"""Slot attention, plain or equivariant: an image is split into slots and painted again."""

from saccade.models.entry import FamilyEntry

ENTRY = FamilyEntry(
    model="saccade.models.slot_attention.model:SlotModel",
    folded="saccade.models.slot_attention.fold:FoldedSlotModel",
    training="saccade.models.slot_attention.training:task",
    presets="saccade.models.slot_attention.config:PRESETS",
    source="saccade.models.slot_attention.config:SOURCE",
    tasks=("ari", "reconstruction"),
    answers=("slots", "masks"),
    settings=("positions", "side_px"),
    filled={"": ("initial_state",)},
    first_row="first_image",
    router={"family.py": "router.py", "initial.py": "initial.py"},
    calls=("segment", "edit"),
    picture="saccade.models.slot_attention.picture:slots_of_scene",
    focus="saccade.models.slot_attention.picture:focus",
)
