# SPDX-License-Identifier: Apache-2.0
"""SPARO: an image and a text tower whose codes consist of separately attended slots."""

from saccade.models.entry import FamilyEntry

ENTRY = FamilyEntry(
    model="saccade.models.sparo.model:Sparo",
    folded="saccade.models.sparo.fold:FoldedSparo",
    training="saccade.models.sparo.training:task",
    trunk="saccade.models.sparo.trunk:TRUNK",
    presets="saccade.models.sparo.config:PRESETS",
    source="saccade.models.sparo.config:SOURCE",
    tasks=("zero-shot", "retrieval", "hard-negatives", "knn", "probe"),
    answers=("embedding",),
    beside=("text",),
    architectures=("vit", "clip", "dinov2", "siglip"),
    embedding_saved=True,
    picture="saccade.models.sparo.picture:slots_of_code",
    focus="saccade.models.attention_maps:mean_map",
)
