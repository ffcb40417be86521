# SPDX-License-Identifier: Apache-2.0
"""Retrieval and hard negatives on the user's files, by models that know the truth or are blind."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import paired_sets
import pytest

from saccade.core.errors import SaccadeError
from saccade.exporter.evaluation import classification, matching
from saccade.exporter.evaluation.evaluated_model import EvaluatedFunction, EvaluatedModel
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.data.datasets import load_data
from saccade.models.data.image_texts import load_contrasts, load_pairs
from saccade.models.data.scene_texts import CAPTION_TOKENS, CAPTION_WORDS
from saccade.models.interface import Arrays, TensorSpec
from saccade.models.preprocessing import Preprocessing
from saccade.models.scores import classification as scores
from saccade.models.scores import retrieval
from saccade.models.scores.results import EvaluationResult
from saccade.models.word_tokens import WordVocabulary

SEEN = Preprocessing(16, 16, 3, (0.0,) * 3, (1.0,) * 3)
OPTIONS = EvaluateOptions()
WORDS = WordVocabulary(CAPTION_WORDS)
METADATA = {
    "tokenizer": "words",
    "words": list(CAPTION_WORDS),
    "merges": [],
    "context_length": CAPTION_TOKENS,
    "vocabulary": len(WORDS),
    "logit_scale": 1.0,
}


def model(of_image: Callable[[bytes], np.ndarray]) -> EvaluatedModel:
    """Sentences have random codes; `of_image` returns an image's."""

    def images(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"embedding": np.stack([of_image(image.tobytes()) for image in inputs["image"]])}

    def texts(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"embedding": np.stack([code(row.tobytes()) for row in inputs["tokens"]])}

    spec = (TensorSpec("image", "b 16 16 3", "uint8"),)
    parts = {"image": EvaluatedFunction(spec, images), "text": EvaluatedFunction(spec, texts)}
    return EvaluatedModel("it", "sparo", "0" * 64, METADATA, (), SEEN, parts)


def code(key: bytes) -> np.ndarray:
    vector = np.random.default_rng(list(key)).standard_normal(64)
    return vector / np.linalg.norm(vector)


def of_text(text: str) -> np.ndarray:
    return code(WORDS.encode(text, CAPTION_TOKENS).tobytes())


def values(result: EvaluationResult) -> dict[str, float]:
    return {score.name: score.value for score in result.scores}


def test_retrieval_on_the_users_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = paired_sets.csv_file(tmp_path, paired_sets.told(20))
    pairs = load_pairs(data, "all", OPTIONS.asked, SEEN)
    own = {image.tobytes(): pairs.texts(place) for place, image in enumerate(pairs.images)}
    # An image's code is the sum of those of its sentences: each is among the first three.
    knowing = model(lambda image: sum(of_text(text) for text in own[image]))
    given = replace(OPTIONS, data=data, split="all")
    result = matching.retrieval(knowing, given)
    assert set(values(result).values()) == {1.0} and len(result.scores) == 6
    assert (result.scores[0].n, result.scores[3].n) == (20, 50)
    assert (result.split, result.data, result.skipped) == ("all", "pairs.csv", 0)
    blind = matching.retrieval(model(code), given)
    assert values(blind)["text R@1"] < 0.3 <= values(blind)["image R@10"]
    monkeypatch.setattr(retrieval, "_BLOCK_VALUES", 60)
    assert values(matching.retrieval(model(code), given)) == values(blind)
    part = matching.retrieval(knowing, replace(OPTIONS, data=data, limit=3))
    assert (part.split, part.scores[0].n) == ("test", 3)
    assert part.data_sha256 != result.data_sha256


def test_hard_negatives_of_files_by_kind(tmp_path: Path) -> None:
    folder = paired_sets.negatives(tmp_path)
    told = load_contrasts(folder, None, OPTIONS.asked, SEEN, None)
    true = {
        told.images[owner].tobytes(): text
        for owner, text in zip(told.owner, told.captions, strict=True)
    }
    given = replace(OPTIONS, data=folder)
    result = matching.hard_negatives(model(lambda image: of_text(true[image])), given)
    assert values(result) == dict.fromkeys(
        ("hard-negative accuracy", "add_obj", "replace_att"), 1.0
    )
    assert [score.n for score in result.scores] == [12, 4, 8] and result.split == "all"
    wrong = matching.hard_negatives(model(lambda image: -of_text(true[image])), given)
    assert values(wrong)["hard-negative accuracy"] == 0.0


def test_what_retrieval_cannot_use_is_refused(tmp_path: Path) -> None:
    data = paired_sets.csv_file(tmp_path, paired_sets.told(5))
    with pytest.raises(SaccadeError, match="expected one of false sentences"):
        matching.hard_negatives(model(code), replace(OPTIONS, data=data))
    with pytest.raises(SaccadeError, match=r"neither a name nor a path. Pass a .csv"):
        matching.retrieval(model(code), replace(OPTIONS, data="digits"))
    with pytest.raises(SaccadeError, match=r"sentences \(caption\) without labels"):
        matching.zero_shot(model(code), replace(OPTIONS, data=data))
    templates = tmp_path / "templates.txt"
    templates.write_text("a photo\n")
    with pytest.raises(SaccadeError, match="template 'a photo' has 0 places for the label"):
        matching.zero_shot(model(code), replace(OPTIONS, templates=templates))


def test_templates_are_ensembled_as_in_clip(tmp_path: Path) -> None:
    """The unit codes of a class in each template are averaged, and the mean gets length 1."""
    templates = tmp_path / "templates.txt"
    templates.write_text("a {}\na small {}\n")
    data = load_data("shapes", "test", preprocessing=SEEN).first(40)
    means = [of_text(f"a {name}") + of_text(f"a small {name}") for name in data.class_names]
    right = {
        image.tobytes(): means[label] for image, label in zip(data.images, data.labels, strict=True)
    }
    given = replace(OPTIONS, limit=40, data="shapes", templates=templates)
    assert values(matching.zero_shot(model(right.__getitem__), given))["zero-shot top-1"] == 1.0


def test_the_probe_chooses_its_penalty_on_validation_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, float]] = []

    class Probe:
        """Right on codes of length 1 if the penalty is near 10."""

        def __init__(self, penalty: float) -> None:
            self.penalty = penalty

        def predict(self, codes: np.ndarray) -> np.ndarray:
            assert np.allclose(np.linalg.norm(codes, axis=1), 1)
            far = abs(np.log10(self.penalty) - 1.3)
            return np.where(np.arange(len(codes)) < len(codes) * (1 - far / 10), 1, 0)

    def fitted(codes: np.ndarray, labels: np.ndarray, penalty: float) -> Probe:
        seen.append((len(codes), penalty))
        return Probe(penalty)

    monkeypatch.setattr(scores, "_fitted", fitted)
    rng = np.random.default_rng(0)
    codes = [rng.standard_normal((count, 3)) for count in (30, 4000, 20)]
    labels = np.arange(30) % 2, np.ones(4000, int)
    _, penalty = scores.probe_predict(codes[0], labels[0], codes[1], labels[1], codes[2])
    assert penalty == pytest.approx(10**1.25) and seen[-1] == (4030, penalty)
    first = [round(np.log10(one)) for _, one in seen[:7]]
    assert first == [-6, -4, -2, 0, 2, 4, 6] and len(seen) <= 7 + 8 + 1
    assert {count for count, _ in seen[:-1]} == {30}


def test_the_probe_scores_other_samples_than_it_learns_from() -> None:

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        codes = inputs["image"].reshape(len(inputs["image"]), -1) / 255.0
        return {"embedding": codes, "probe_features": 10 * codes}

    spec = (TensorSpec("image", "b 8 8 1", "uint8"),)
    gray = Preprocessing(8, 8, 1, (0.0,), (1.0,))
    parts = {"": EvaluatedFunction(spec, run)}
    # The vocabulary of a text tower is a number.
    seeing = EvaluatedModel("it", "sparo", "0" * 64, METADATA, (), gray, parts)
    given = replace(OPTIONS, data="digits", limit=120)
    result = classification.probe(seeing, given)
    assert 0.6 < result.scores[0].value < 1 and result.split == "test"
    assert "chosen on the validation samples" in result.protocol
    validation = classification.probe(seeing, replace(given, split="validation"))
    assert validation.split == "validation"
    assert "chosen on a tenth of the training samples" in validation.protocol
    with pytest.raises(SaccadeError, match="--split all: this task learns from the training"):
        classification.probe(seeing, replace(given, split="all"))
    adamw = classification.probe(seeing, replace(given, probe="adamw"))
    assert adamw.scores[0].value > 0.6 and adamw.protocol.startswith("AdamW for 10 epochs, weight")
    dino = classification.probe(seeing, replace(given, probe="dino"))
    assert dino.scores[0].value > 0.6 and dino.protocol.startswith("SGD for 100 epochs on 64 feat")
    blind = replace(
        seeing,
        components={"": EvaluatedFunction(spec, lambda inputs: {"embedding": inputs["image"]})},
    )
    with pytest.raises(SaccadeError, match="--probe dino: found no output probe_features of it"):
        classification.probe(blind, replace(given, probe="dino"))
