# SPDX-License-Identifier: Apache-2.0
"""An LSTM that captions an image, looking at it before and after each update of its state."""

from saccade.models.entry import FamilyEntry

ENTRY = FamilyEntry(
    model="saccade.models.captioner.model:Captioner",
    folded="saccade.models.captioner.fold:FoldedCaptioner",
    training="saccade.models.captioner.training:task",
    presets="saccade.models.captioner.config:PRESETS",
    source="saccade.models.captioner.config:SOURCE",
    tasks=("caption",),
    answers=("caption",),
    settings=("most_words", "word_count"),
    trunk="saccade.models.captioner.config:TRUNK",
    required=("encode", "step"),
    inner=("step",),
    router={"family.py": "router.py", "caption_search.py": "caption_search.py"},
    router_outputs="saccade.models.captioner.request:router_outputs",
    whole="saccade.models.captioner.request:captioned",
    calls=("caption",),
    picture="saccade.models.captioner.picture:captioned",
)
