# SPDX-License-Identifier: Apache-2.0
"""Images with questions and answers: VQA's JSON files, CSV, JSON lines; one row per image."""

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.models.data.samples.listed_images import ListedImages, image_folder, json_fields
from saccade.models.data.samples.source import (
    ID,
    SENTENCE,
    SENTENCES,
    Cell,
    DataDescription,
    field_values,
    refusal,
)
from saccade.models.scores.answers import KINDS, kind_of, normalized

_FORMS = re.compile(r"OpenEnded_|MultipleChoice_|questions|annotations")
_QUESTIONS_JSON = "VQA's questions, such as v2_OpenEnded_mscoco_train2014_questions.json"
_ANNOTATIONS_JSON = "VQA's annotations, such as v2_mscoco_train2014_annotations.json"
_ANSWERED = "question_id and answers. Pass v2_mscoco_train2014_annotations.json instead of captions"
# Names of image files by subset and number: COCO's of 2014, of 2017, and VQA's abstract scenes.
_NAMES = ("COCO_{0}_{1:012d}.jpg", "{1:012d}.jpg", "abstract_v002_{0}_{1:012d}.png")


def _answers(value: Any) -> tuple[str, ...] | None:
    """Return answers, of which each may be an object that has the text in `answer`."""
    if isinstance(value, list):
        value = [one.get("answer") if isinstance(one, dict) else one for one in value]
    texts: tuple[str, ...] | None = SENTENCES.read(value)
    return texts


ANSWERS = Cell("an answer, as text", _answers)


class QuestionSource(ListedImages):
    """Images with questions; question i is `texts[i]`, about the image of row `owner[i]`.

    Shapes: owner [q] int64; kinds and types of the questions, see `kind` and `type_of`.
    """

    usual = re.compile(r"(questions|annotations).*\.json$")
    expected = (
        "questions with answers: VQA's questions JSON with its annotations JSON beside it, a .csv "
        "or .jsonl with columns of images, questions and answers, or a folder with these"
    )
    wanted: ClassVar = {"questions": SENTENCE, "answers": ANSWERS}
    owner: np.ndarray

    def __init__(self, path: Path, given: DataDescription) -> None:
        super().__init__(path, given)
        self.texts: list[str] = []
        self._owner = array("q")
        self._known: dict[str, int] = {}  # answers as they are written, and types of questions
        self._answers, self._starts = array("i"), array("q", [0])
        self._kind, self._type = array("b"), array("i")
        self._unanswered: list[str] = []  # files of questions without annotations

    def answers(self, question: int) -> list[str]:
        """Return the answers that people gave to a question, normalized."""
        codes = self._answers[self._starts[question] : self._starts[question + 1]]
        return [self._names[code] for code in codes]

    def kind(self, question: int) -> str:
        """Return the kind of its answer, one of `scores.answers.KINDS`."""
        return KINDS[self._kind[question]]

    def type_of(self, question: int) -> str:
        """Return its first words, such as `how many`; empty if the data does not say."""
        return self._names[self._type[question]]

    def add_files(self, files: Sequence[tuple[Path, int]]) -> None:
        """Add tables, or JSON files of questions with their annotations.

        Raises: SaccadeError if an entry cannot be used, or annotations are missing.
        """
        if files[0][0].suffix.lower() == ".json":
            _add_pairs(self, files)
        else:
            super().add_files(files)

    def add(self, row: int, texts: Sequence[Any], values: Mapping[str, Any], file: Path) -> None:
        """Add the question and the answers of a row."""
        text, answers = texts
        self._add(row, text, answers, values.get("answer_type"), values.get("question_type"))

    def add_json(self, file: Path, split: int) -> None:
        """Do not call: VQA's files are read in pairs."""
        raise AssertionError("`add_pair` reads JSON")

    def add_pair(self, questions: Path, annotations: Path, split: int) -> None:
        """Add the questions of one JSON file, with the answers of another one.

        Raises: SaccadeError if an entry cannot be used, or one file lacks what the other has.
        """
        asked, namings = _questions(questions)
        folder, naming = image_folder(questions, namings, self._given, "questions")
        root = self.add_root(folder)
        place = {key: index for index, (key, _, _) in enumerate(asked)}
        answered = np.zeros(len(asked), dtype=bool)
        for count, value in enumerate(_list(annotations, "annotations", _ANNOTATIONS_JSON), 1):
            where = f"{annotations}: annotation {count:,}"
            entry = value if isinstance(value, dict) else {}
            said = "answers" if "answers" in entry else "multiple_choice_answer"
            cells = {"question_id": ID, said: ANSWERS}
            key, answers = field_values(value, refusal(where), _ANSWERED, **cells)
            if (index := place.get(key)) is None:
                raise SaccadeError(
                    f"{where}: found question_id {key}, which {questions.name} does not have among "
                    f"its {len(asked):,} questions. Pass the two files of one set."
                )
            answered[index] = True
            _, image_id, text = asked[index]
            row = self.image(root, namings[naming][index], split, f"image {image_id}")
            self._add(row, text, answers, entry.get("answer_type"), entry.get("question_type"))
        if not answered.all():
            index = int(np.flatnonzero(~answered)[0])
            raise SaccadeError(
                f"{questions}: question {index + 1:,} (question_id {asked[index][0]}): found no "
                f"answer in {annotations.name}, expected one for each of the {len(asked):,} "
                f"questions ({int((~answered).sum()):,} have none). Pass the two files of one set."
            )

    def leave_out(self, questions: Path) -> None:
        """Note a file of questions that has no annotations, as that of VQA's test set."""
        self._unanswered.append(questions.name)

    def finish(self) -> None:
        """Set owners, labels and splits after all files are added.

        Raises: SaccadeError if there is no question.
        """
        super().finish()
        if not self.texts:
            raise SaccadeError(f"{self.path}: found no questions, expected {self.expected}.")
        self._names = list(self._known)
        self.owner = np.array(self._owner, dtype=np.int64)
        if self._unanswered:
            shown = ", ".join(self._unanswered)
            self.notes = (f"{self.path}: left out questions without annotations: {shown}",)

    def _add(self, row: int, text: str, answers: Sequence[str], kind: Any, first: Any) -> None:
        self.texts.append(text)
        self._owner.append(row)
        said = [normalized(answer) for answer in answers]
        self._answers.extend(self._code(answer) for answer in said)
        self._starts.append(len(self._answers))
        self._kind.append(KINDS.index(kind if kind in KINDS else kind_of(said)))
        self._type.append(self._code(first if isinstance(first, str) else ""))

    def _code(self, text: str) -> int:
        return self._known.setdefault(text, len(self._known))


def open_questions(name: str, given: DataDescription) -> QuestionSource:
    """List the images and questions of a file, a folder, or a pattern of files.

    VQA's annotations are found beside the questions by their name.

    Raises: SaccadeError if there is none, or they cannot be used.
    """
    return QuestionSource.opened(name, given)


def _add_pairs(source: QuestionSource, files: Sequence[tuple[Path, int]]) -> None:
    asked = [(file, split) for file, split in files if "questions" in file.name]
    answered = {file for file, _ in files if "annotations" in file.name}
    if not asked:
        raise SaccadeError(
            f"{source.path}: found {files[0][0].name}, expected also the questions, in a file with "
            "'questions' in its name. Put both files into one folder and pass the folder."
        )
    if len(asked) == len(answered) == 1:
        source.add_pair(asked[0][0], answered.pop(), asked[0][1])
        return
    pairs = [(file, _beside(file, answered), split) for file, split in asked]
    for file, annotations, split in pairs:
        if annotations is not None:
            source.add_pair(file, annotations, split)
        elif any(found for _, found, _ in pairs):
            source.leave_out(file)
    if not any(found for _, found, _ in pairs):
        raise SaccadeError(
            f"{asked[0][0]}: found questions without annotations, expected "
            f"{_annotated(asked[0][0])} beside it. Put both files into one folder, or name both "
            "with a pattern such as '{questions,annotations}.json'."
        )


def _annotated(questions: Path) -> str:
    """Return the name of the annotations that belong to a file of questions."""
    return _FORMS.sub("", questions.name.replace("questions", "\0")).replace("\0", "annotations")


def _beside(questions: Path, answered: set[Path]) -> Path | None:
    wanted = _annotated(questions)
    same = [file for file in answered if file.name == wanted]
    beside = questions.with_name(wanted)
    return next(iter(same), beside if not answered and beside.is_file() else None)


def _questions(file: Path) -> tuple[list[tuple[int | str, int | str, str]], list[list[str]]]:
    """Return the id, image id and text of each question, and the usual names of the images."""
    asked: list[tuple[int | str, int | str, str]] = []
    subset, seen = "", set()
    for field, value in json_fields(file, _QUESTIONS_JSON):
        seen.add(field)
        if field == "data_subtype" and isinstance(value, str):
            subset = value.replace("test-dev", "test")
        elif field == "questions":
            refused = refusal(f"{file}: question {len(asked) + 1:,}")
            cells = {"question_id": ID, "image_id": ID, "question": SENTENCE}
            key, image, text = field_values(value, refused, ", ".join(cells), **cells)
            asked.append((key, image, text))
    if not asked:
        raise _other_kind(file, seen, _QUESTIONS_JSON)
    namings = [[_file_name(form, subset, image) for _, image, _ in asked] for form in _NAMES]
    return asked, namings


def _file_name(form: str, subset: str, image: int | str) -> str:
    """Return the name of an image's file; an id that is text is the name."""
    return image if isinstance(image, str) else form.format(subset, image)


def _list(file: Path, wanted: str, expected: str) -> Iterator[Any]:
    seen: set[str] = set()
    for field, value in json_fields(file, expected):
        seen.add(field)
        if field == wanted:
            yield value
    if wanted not in seen:
        raise _other_kind(file, seen, expected)


def _other_kind(file: Path, seen: set[str], expected: str) -> SaccadeError:
    shown = ", ".join(sorted(seen)[:8]) or "none"
    return SaccadeError(f"{file}: found the fields {shown}, expected {expected}.")
