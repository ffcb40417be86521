# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that come with the package are what their cards say."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.checkpoint import load
from saccade.models.families import FAMILIES
from saccade.models.shipped import shipped_checkpoint

FOLDER = shipped_checkpoint("digits-sum").parent
FILES = sorted(FOLDER.glob("*.safetensors"))
# On few samples, well below what the card has and well above chance.
AT_LEAST = {
    "captioner-shapes": 1.5, "digits-sum": 0.8, "listops": 0.35, "signs-large": 0.85,
    "signs-middle": 0.85, "signs-small": 0.65, "slots-tetrominoes": 0.6, "sot-shapes": 0.6,
    "sparo-shapes": 0.8, "vqa-shapes": 0.4,
}  # fmt: skip


def test_families_that_have_one() -> None:
    assert {load(path).family for path in FILES} == set(FAMILIES)
    assert {path.stem for path in FILES} == set(AT_LEAST)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_is_the_one_on_its_card_and_small(path: Path) -> None:
    card = path.with_suffix(".md").read_text()
    (digest,) = re.findall(r"\| file SHA-256 \| `(\w+)` \|", card)
    assert digest == sha256_of(path)
    assert load(path).card["command"] in card
    assert path.stat().st_size <= 3 * 2**20


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_knows_what_its_card_claims(path: Path) -> None:
    (results,) = evaluate(path, EvaluateOptions(limit=40)).results
    assert results.data == load(path).card["data"]
    assert results.scores[0].value >= AT_LEAST[path.stem]


def test_one_by_its_name() -> None:
    assert load("shipped:digits-sum").path == FOLDER / "digits-sum.safetensors"
    # As the command line takes it.
    assert load(Path("shipped:digits-sum")).path == FOLDER / "digits-sum.safetensors"


@pytest.mark.parametrize("name", ["digits", "../shipped/digits-sum", "", "digits-sum.safetensors"])
def test_a_name_that_is_not_there(name: str) -> None:
    with pytest.raises(SaccadeError, match=r"Choose one of: .*digits-sum"):
        load(f"shipped:{name}")
