# SPDX-License-Identifier: Apache-2.0
"""The inputs that a variant is measured with: of the same data that it is scored on."""

from typing import Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.export.artefact.variant_files import VariantParts
from saccade.export.evaluation.options import EvaluateOptions
from saccade.export.evaluation.scenes import QUESTIONS_A_SCENE, asked_scenes, drawn_scenes
from saccade.models.data.datasets import Dataset, load_data
from saccade.models.data.token_states import token_states
from saccade.models.preprocessing import Preprocessing
from saccade.models.sparo.zero_shot import default_templates, prompts

Inputs = dict[str, dict[str, np.ndarray]]


def inputs_of(variant: VariantParts, data: str, count: int) -> Inputs:
    """The first test samples as the parts take them, by role.

    Shapes: each [n ...] with n at most `count`.
    Raises: SaccadeError if the variant takes what no data here has.
    """
    entry, facts = variant.main.variant, variant.facts
    names = {spec.name for spec in variant.main.inputs}
    if "characters" in names:
        return {entry.role: _expressions(count)}
    preprocessing = variant.preprocessing
    if names == {"tokens", "length"}:
        texts = token_states(data, "test").inputs
        return {entry.role: {name: each[:count] for name, each in texts.items()}}
    if preprocessing is None:
        raise SaccadeError(
            f"{variant.name}: takes {', '.join(sorted(names))}, of which there is no data to "
            "measure with. Measure a model that takes images."
        )
    if entry.family == "vqa":
        return {entry.role: _questions(preprocessing, facts, count)}
    if entry.family == "slot-attention":
        return {entry.role: _slots(preprocessing, facts, data, count)}
    if entry.family == "captioner":
        options = EvaluateOptions(limit=count)
        return {entry.role: {"image": drawn_scenes(preprocessing, options, count).images}}
    found = load_data(data, "test", preprocessing=preprocessing)
    inputs: Inputs = {entry.role: {"image": found.images[:count]}}
    if "text" in variant.parts:
        inputs["text"] = _prompts(facts, found)
    return inputs


def _expressions(count: int) -> dict[str, np.ndarray]:
    from saccade.models.data.listops import listops

    drawn = listops("test", count)
    return {"characters": drawn.characters, "length": drawn.length}


def _prompts(facts: dict[str, Any], data: Dataset) -> dict[str, np.ndarray]:
    from saccade.models.sparo.text_tokens import encode_texts

    written = prompts(data.class_names, default_templates(facts["tokenizer"]))
    return {"tokens": encode_texts(facts, [text for each in written for text in each])}


def _questions(
    preprocessing: Preprocessing, facts: dict[str, Any], count: int
) -> dict[str, np.ndarray]:
    from saccade.models.vqa.questions import question_tokens

    scenes = max(2, count // QUESTIONS_A_SCENE)
    asked = asked_scenes(preprocessing, EvaluateOptions(limit=scenes))
    tokens = np.stack([question_tokens(facts, each.text) for each in asked.questions])
    return {"image": asked.images[asked.owner], "question": tokens}


def _slots(
    preprocessing: Preprocessing, facts: dict[str, Any], data: str, count: int
) -> dict[str, np.ndarray]:
    from saccade.models.data.tetrominoes import tetrominoes
    from saccade.models.slot_attention.initial import initial_states

    if data == "tetrominoes":
        images = tetrominoes("test", count, side_px=preprocessing.height_px).images
    else:
        images = drawn_scenes(preprocessing, EvaluateOptions(limit=count), count).images
    states = initial_states(facts["initial_state"], len(images), int(facts["slots"]))
    return {"image": images, "initial_state": states}
