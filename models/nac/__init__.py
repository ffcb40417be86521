# SPDX-License-Identifier: Apache-2.0
"""Neural Attentive Circuits: attentive modules with learned functions and learned links."""

from saccade.models.entry import FamilyEntry

ENTRY = FamilyEntry(
    model="saccade.models.nac.model:NAC",
    folded="saccade.models.nac.fold:FoldedNAC",
    training="saccade.models.nac.training:task",
    trunk="saccade.models.nac.config:TRUNK",
    presets="saccade.models.nac.config:PRESETS",
    source="saccade.models.nac.config:SOURCE",
    tasks=("top1", "knn", "probe"),
    answers=("probabilities",),
    settings=("depth", "arguments", "counts_weight"),
    validation="top-1 by budget",
    picture="saccade.models.nac.picture:circuit",
    focus="saccade.models.nac.picture:focus",
)
