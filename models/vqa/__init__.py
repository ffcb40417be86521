# SPDX-License-Identifier: Apache-2.0
"""A network that answers questions about images, and shows where it looked."""

from saccade.models.entry import FamilyEntry

ENTRY = FamilyEntry(
    model="saccade.models.vqa.model:VQA",
    folded="saccade.models.vqa.fold:FoldedVQA",
    training="saccade.models.vqa.training:task",
    presets="saccade.models.vqa.config:PRESETS",
    source="saccade.models.vqa.config:SOURCE",
    tasks=("vqa",),
    answers=("probabilities",),
    settings=("most_words", "word_count", "most_answers", "answer_count"),
    trunk="saccade.models.vqa.config:TRUNK",
    router={"family.py": "router.py"},
    calls=("answer",),
    picture="saccade.models.vqa.picture:answered",
    focus="saccade.models.vqa.picture:focus",
)
