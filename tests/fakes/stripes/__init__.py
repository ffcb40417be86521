# SPDX-License-Identifier: Apache-2.0
"""A family of the tests: which way the stripes of a picture run. It has all that a family can."""

from saccade.models.entry import EvaluationTask, FamilyEntry

ENTRY = FamilyEntry(
    model="fakes.stripes.model:Stripes",
    folded="fakes.stripes.model:FoldedStripes",
    training="fakes.stripes.training:task",
    presets="fakes.stripes.config:PRESETS",
    source="fakes.stripes.config:SOURCE",
    tasks=("direction", "top1"),
    own_tasks={
        "direction": EvaluationTask(
            "fakes.stripes.evaluation:direction", "fakes.stripes.evaluation:load_inputs"
        )
    },
    answers=("probabilities",),
    validation="right directions",
    filled={"": ("sign",)},
    router={"family.py": "router.py"},
    picture="fakes.stripes.picture:weighed",
)
