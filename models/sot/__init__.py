# SPDX-License-Identifier: Apache-2.0
"""Second-order transformers: a trunk, and a head that reads class token and word tokens."""

from saccade.models.entry import FamilyEntry

ENTRY = FamilyEntry(
    model="saccade.models.sot.model:SoT",
    folded="saccade.models.sot.fold:FoldedSoT",
    training="saccade.models.sot.training:task",
    trunk="saccade.models.sot.config:TRUNK",
    presets="saccade.models.sot.config:PRESETS",
    source="saccade.models.sot.config:SOURCE",
    tasks=("top1", "knn", "probe"),
    answers=("probabilities",),
    architectures=("vit", "deit", "swin", "resnet", "siglip"),
    picture="saccade.models.sot.picture:class_token",
    focus="saccade.models.attention_maps:mean_map",
)
