# SPDX-License-Identifier: Apache-2.0
"""Scores: a model that knows the truth gets all of them, a blind one what chance gives."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import labelled_sets
import numpy as np
import pytest
from PIL import Image

from saccade.core.errors import SaccadeError
from saccade.exporter.evaluation import (
    answering,
    captioning,
    classification,
    matching,
    segmentation,
)
from saccade.exporter.evaluation.evaluate import Evaluation, evaluate, render
from saccade.exporter.evaluation.evaluated_model import (
    EvaluatedFunction,
    EvaluatedModel,
    subjects_of_checkpoint,
)
from saccade.exporter.evaluation.scenes import asked_scenes, described_scenes
from saccade.exporter.evaluation.tasks import (
    TASKS,
    EvaluateOptions,
    task_asked,
    task_names,
    tasks_of,
)
from saccade.models.captioner.caption_search import SearchedCaption
from saccade.models.checkpoint import load
from saccade.models.data.digits import CLASS_NAMES
from saccade.models.data.listops import VOCABULARY, listops
from saccade.models.data.samples import images as image_file
from saccade.models.data.scene_texts import (
    ANSWERS,
    CAPTION_TOKENS,
    CAPTION_WORDS,
    QUESTION_TOKENS,
    QUESTION_WORDS,
)
from saccade.models.data.tetrominoes import tetrominoes
from saccade.models.families import FAMILIES
from saccade.models.interface import Arrays, TensorSpec
from saccade.models.preprocessing import Preprocessing
from saccade.models.scores.results import EvaluationResult
from saccade.models.word_tokens import WordVocabulary

SEEN = Preprocessing(20, 20, 3, (0.0,) * 3, (1.0,) * 3)
FEW = EvaluateOptions(limit=30)


def knowing(family: str, **parts: Any) -> EvaluatedModel:
    """A model whose components are these functions."""
    spec = (TensorSpec("image", "b 20 20 3", "uint8"),)
    functions = {role: EvaluatedFunction(spec, run) for role, run in parts.items()}
    return EvaluatedModel("it", family, "0" * 64, {}, (), SEEN, functions)


def scores(result: Any) -> dict[str, float]:
    return {score.name: score.value for score in result.scores}


def test_listops_by_the_truth():
    drawn = listops("test", 30)
    answers = {
        row.tobytes(): label for row, label in zip(drawn.characters, drawn.labels, strict=True)
    }

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        labels = [answers[row.tobytes()] for row in inputs["characters"]]
        return {"logits": np.eye(10)[labels]}

    model = replace(
        knowing("nac"),
        labels=CLASS_NAMES,
        runtime_metadata={"max_tokens": 100, "vocabulary": list(VOCABULARY)},
        components={"": EvaluatedFunction((TensorSpec("characters", "b 100", "int64"),), run)},
    )
    assert scores(classification.top1(model, FEW)) == {"top-1": 1.0, "top-5": 1.0}
    with pytest.raises(
        SaccadeError, match="'shapes': found no such path, but the model reads char"
    ):
        classification.top1(model, replace(FEW, data="shapes"))


def test_images_and_texts_by_the_truth():
    """Codes that say which sentence an image has: the same sentence, the same code."""
    described = described_scenes(SEEN, FEW)
    words = WordVocabulary(CAPTION_WORDS)
    sentence = {
        image.tobytes(): words.encode(text, CAPTION_TOKENS).tobytes()
        for image, text in zip(described.images, described.captions, strict=True)
    }

    def code(key: bytes) -> np.ndarray:
        vector = np.random.default_rng(list(key)).standard_normal(64)
        return vector / np.linalg.norm(vector)

    def of_images(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"embedding": np.stack([code(sentence[i.tobytes()]) for i in inputs["image"]])}

    def of_texts(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"embedding": np.stack([code(row.tobytes()) for row in inputs["tokens"]])}

    metadata = {"tokenizer": "words", "words": list(CAPTION_WORDS), "merges": [],
             "context_length": CAPTION_TOKENS, "vocabulary": len(words)}  # fmt: skip
    model = replace(knowing("sparo", image=of_images, text=of_texts), runtime_metadata=metadata)
    assert set(scores(matching.retrieval(model, FEW)).values()) == {1.0}
    assert scores(matching.hard_negatives(model, FEW))["hard-negative accuracy"] == 1.0

    def blind(inputs: Arrays) -> dict[str, np.ndarray]:
        return {"embedding": np.stack([code(image.tobytes()) for image in inputs["image"]])}

    lost = replace(knowing("sparo", image=blind, text=of_texts), runtime_metadata=metadata)
    assert scores(matching.retrieval(lost, FEW))["text R@1"] < 0.2
    assert 0.3 < scores(matching.hard_negatives(lost, FEW))["hard-negative accuracy"] < 0.7


def test_slots_by_the_truth():
    drawn = tetrominoes("test", 30, side_px=20)
    masks = {image.tobytes(): mask for image, mask in zip(drawn.images, drawn.masks, strict=True)}

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        assert inputs["initial_state"].shape[1:] == (4, 6)
        true = np.stack([masks[image.tobytes()] for image in inputs["image"]])
        return {
            "masks": np.eye(4)[true].transpose(0, 3, 1, 2),
            "reconstruction": inputs["image"] / 255,
        }

    rule = {"kind": "gaussian", "mean": [0.0] * 4, "std": [1.0] * 4, "positions": "uniform",
            "scale_mean": None, "scale_std": None}  # fmt: skip
    model = replace(
        knowing("slot-attention"),
        runtime_metadata={"initial_state": rule, "slots": 4},
        components={"": EvaluatedFunction((*knowing("x", a=run).components["a"].inputs,
                             TensorSpec("initial_state", "b k 6", "float32")), run)},
    )  # fmt: skip
    assert scores(segmentation.ari(model, FEW)) == {"FG-ARI": 1.0, "ARI": 1.0, "MSE": 0.0}
    drawn = tetrominoes("test", 30, side_px=20, positions="left")
    masks = {image.tobytes(): mask for image, mask in zip(drawn.images, drawn.masks, strict=True)}
    left = segmentation.ari(model, replace(FEW, positions="left"))
    assert left.data == "tetrominoes (left)" and scores(left)["FG-ARI"] == 1.0


def test_answers_by_the_truth():
    asked = asked_scenes(SEEN, FEW)
    words = WordVocabulary(QUESTION_WORDS)
    truth = {
        asked.images[owner].tobytes() + words.encode(one.text, QUESTION_TOKENS).tobytes():
        ANSWERS.index(one.answer)
        for owner, one in zip(asked.owner, asked.questions, strict=True)
    }  # fmt: skip

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        pairs = zip(inputs["image"], inputs["question"], strict=True)
        right = [truth[image.tobytes() + question.tobytes()] for image, question in pairs]
        half = np.zeros((len(right), 2, 2))
        half[:, 0] = 0.5
        return {"logits": np.eye(len(ANSWERS))[right], "attention": half}

    metadata = {
        "words": list(QUESTION_WORDS),
        "question_length": QUESTION_TOKENS,
        "vocabulary": "words",
    }
    model = replace(knowing("vqa", **{"": run}), runtime_metadata=metadata, labels=ANSWERS)
    by_name = scores(answering.vqa(model, FEW))
    assert by_name.pop("zero attention") == 0.5
    assert set(by_name.values()) == {1.0}
    with pytest.raises(SaccadeError, match="does not know the answer"):
        answering.vqa(replace(model, labels=ANSWERS[:3]), FEW)


def test_questions_without_a_known_answer_are_part_of_the_traffic(tmp_path):
    """A certificate on the others alone would not hold for all."""
    lines = ["image,question,answer"]
    for name, answer in (("a", "no"), ("b", "teapot"), ("c", "yes")):
        Image.new("RGB", (20, 20)).save(tmp_path / f"{name}.png")
        lines += [f"{name}.png,is it red?,{answer}", f"{name}.png,is it big?,yes"]
    (tmp_path / "asked.csv").write_text("\n".join(lines))
    metadata = {"words": ["is", "it", "red", "big"], "question_length": 6, "vocabulary": "words"}
    run = lambda inputs: {"logits": np.zeros((len(inputs["image"]), 2))}  # noqa: E731
    model = replace(knowing("vqa", **{"": run}), runtime_metadata=metadata, labels=("yes", "no"))
    options = EvaluateOptions(data=str(tmp_path / "asked.csv"))
    decisions = answering.decide(model, options, "all").decisions()
    assert sorted(decisions.labels) == [-1, 0, 1]
    assert decisions.logits.shape == (3, 2)


def test_captions_by_the_truth(monkeypatch):
    words = WordVocabulary(CAPTION_WORDS)
    said: list[str] = []

    def captions(model: EvaluatedModel, images: np.ndarray) -> list[SearchedCaption]:
        maps = np.zeros((2, 2, 2))
        maps[0, 0, 0] = maps[1, 1, 1] = 1
        ids = [words.encode(text, CAPTION_TOKENS) for text in said]
        return [SearchedCaption(tuple(row[1 : row.argmin() - 1]), 0.0, True, maps) for row in ids]

    def references(objects: Any, rng: np.random.Generator) -> list[str]:
        said.append(
            "a red circle and a blue square" if len(said) % 2 else "a cross above a red square"
        )
        return [said[-1]]

    monkeypatch.setattr(captioning, "_captions", captions)
    monkeypatch.setattr(captioning, "references", references)
    metadata = {"words": list(CAPTION_WORDS), "beam": 3}
    whole = captioning.caption(replace(knowing("captioner"), runtime_metadata=metadata), FEW)
    by_name = scores(whole)
    assert whole.protocol == "beam 3, 1 reference a scene" and 0 <= by_name["true"] < 0.5
    assert "(beam 3, 1 reference a scene)" in str(render([whole]).title)
    assert by_name["CIDEr-D"] == pytest.approx(10) and by_name["REP"] == 0
    assert by_name["ROUGE-L"] == pytest.approx(1) and by_name["zero attention"] == 0.75
    assert by_name["JS"] == pytest.approx(np.log(2))


@pytest.mark.parametrize(("beam", "said"), [(1, "square"), (2, "circle"), (3, "")])
def test_captions_are_those_of_a_request_without_a_beam(beam, said, monkeypatch):
    """A language of two words: the likelier first one leads nowhere, and saying nothing is best."""
    end, square, circle = 2, 4, 5
    following = {1: {square: 0.5, circle: 0.27, end: 0.23}, square: {end: 0.4}, circle: {end: 0.8}}
    rows = np.full((6, 6), 1e-9)
    for token, chances in following.items():
        rows[token, list(chances)] = list(chances.values())

    def encode(inputs: Arrays) -> dict[str, np.ndarray]:
        return {name: np.zeros((len(inputs["image"]), 1)) for name in ("h", "c")}

    def step(inputs: Arrays) -> dict[str, np.ndarray]:
        token, state = inputs["token"], {"next_h": inputs["h"], "next_c": inputs["c"]}
        logs = np.log(rows[token])
        return state | {"log_probabilities": logs, "attention": np.ones((len(token), 1, 1))}

    specs = {name: TensorSpec(name, "b 1", "float32") for name in ("h", "c")}
    components = {
        "encode": EvaluatedFunction((TensorSpec("image", "b 20 20 3", "uint8"),), encode),
        "step": EvaluatedFunction((*specs.values(), TensorSpec("token", "b", "int64")), step),
    }
    metadata = {
        "words": ["square", "circle"],
        "start": 1,
        "end": end,
        "max_length": 4,
        "beam": beam,
    }
    model = replace(knowing("captioner"), runtime_metadata=metadata, components=components)
    monkeypatch.setattr(captioning, "references", lambda *_: ["circle"])
    by_name = scores(captioning.caption(model, FEW))
    assert by_name["ROUGE-L"] == (said == "circle")
    assert ("JS" in by_name) is False, "no caption has two words"
    assert ("zero attention" in by_name) == bool(said)


def test_checkpoint_and_files_score_alike(tiny_checkpoint: Path, tiny_folder: Path, monkeypatch):
    monkeypatch.setattr(
        classification, "of_model", lambda model, data: data
    )  # its labels have no words
    options = EvaluateOptions(data="digits", budget=(1, 0.5, 0.25, 0.125), limit=100)
    ours, theirs = evaluate(tiny_checkpoint, options), evaluate(tiny_folder, options)
    assert [scores(result) for result in ours.results] == [
        scores(result) for result in theirs.results
    ]
    assert json.dumps(ours.to_dict()) and len(render(ours.results).rows) == 8


def labelled(names: tuple[str, ...], labels: list[int]) -> classification.LabeledInputs:
    return classification.LabeledInputs({}, np.array(labels), names, name="mine", digest=lambda: "")


def test_classes_in_another_order_or_missing_are_those_of_the_model():
    model = replace(knowing("nac"), labels=("a", "b", "c"))
    own = classification.of_model(model, labelled(("c", "a"), [0, 0, 1]))
    assert own.labels.tolist() == [2, 2, 0] and own.class_names == ("a", "b", "c")
    unused = classification.of_model(model, labelled(("b", "x"), [0, 0]))
    assert unused.labels.tolist() == [1, 1], "no sample is of class x"
    assert classification.of_model(model, labelled(("0", "1"), [0, 1])).labels.tolist() == [0, 1]


def test_splits_of_ones_own_samples(tiny_checkpoint: Path, tmp_path: Path, monkeypatch):
    path = Path(labelled_sets.class_folders(tmp_path / "mine", labelled_sets.digits()))
    (path / "train" / "0" / "000.png").write_bytes(b"GIF89a")

    (model,) = subjects_of_checkpoint(load(tiny_checkpoint))

    def scored(task: Any = classification.top1, **options: Any) -> EvaluationResult:
        return task(model, EvaluateOptions(str(path), **options))

    assert scored().split == "test" and scored(split="val").split == "validation"
    whole = scored(split="all", skip_bad=1)
    assert (whole.split, whole.skipped, whole.scores[0].n) == ("all", 1, 17)
    title = render([whole]).title
    assert "split all" in str(title)
    monkeypatch.setattr(image_file, "KEPT_BYTES", 0)
    assert scored(split="all", skip_bad=1).to_dict() == whole.to_dict()
    with pytest.raises(SaccadeError, match=r"train/0/000\.png: not a JPEG, PNG or WebP"):
        scored(split="train")
    with pytest.raises(SaccadeError, match="--split all: this task learns from the training sam"):
        scored(classification.knn, split="all")
    with pytest.raises(SaccadeError, match="--skip-bad: found -1"):
        scored(skip_bad=-1)


def test_what_does_not_fit_is_refused(tiny_checkpoint: Path):
    with pytest.raises(SaccadeError, match=r"--task of .*'ari'.*top1, knn, probe"):
        evaluate(tiny_checkpoint, EvaluateOptions(task="ari"))
    with pytest.raises(SaccadeError, match="--positions left: only the task ari supports"):
        evaluate(tiny_checkpoint, EvaluateOptions(positions="left"))
    with pytest.raises(SaccadeError, match="--probe adamw: only the task probe supports"):
        evaluate(tiny_checkpoint, EvaluateOptions(probe="adamw"))
    model = replace(knowing("nac"), labels=("a", "b"))
    numbered = labelled(("0", "1"), [0, 1])
    own = classification.of_model(model, numbered)
    assert own.labels.tolist() == [0, 1] and own.class_names == ("a", "b")
    with pytest.raises(
        SaccadeError, match=r"found 2 classes \(a, c\), expected the 2.*'c' is none"
    ):
        classification.of_model(model, labelled(("a", "c"), [0, 1]))
    with pytest.raises(SaccadeError, match="--limit: found 1"):
        EvaluateOptions(limit=1)


def test_every_family_has_a_task():
    assert Evaluation(Path("x"), ()).to_dict() == {"path": "x", "found": []}
    asked = {name for family in FAMILIES for name in tasks_of(family)}
    assert asked == set(TASKS) == set(task_names())
    # Without a text component what needs one cannot be asked, and another task is the family's own.
    assert list(tasks_of("sparo", {"image"})) == ["knn", "probe"]
    assert task_asked("sparo", None, "it", {"image"})[0] == "knn"
