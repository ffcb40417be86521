# SPDX-License-Identifier: Apache-2.0
"""A repository that was changed after it was written is not believed."""

import shutil

import pytest

from saccade.core.errors import SaccadeError
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.options import RepositoryOptions

FULL = "nac-b1000-fp32"


def a_file_instead(out):
    shutil.rmtree(out)
    out.write_bytes(b"")


def another_version(out):
    path = out / "saccade.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: (out / FULL / "1" / "model.onnx").write_bytes(b"other"), "was changed"),
        (lambda out: (out / "nac" / "1" / "model.py").write_text("\n"), r"model\.py was changed"),
        (lambda out: (out / "nac" / "1" / "choose.py").unlink(), "is missing"),
        (lambda out: (out / "nac" / "1" / "more.py").touch(), "was not written by saccade"),
        (another_version, "does not describe a model repository"),
        (lambda out: (out / "saccade.json").unlink(), r"it has no saccade\.json\."),
        (shutil.rmtree, r"repository: no such folder\. Write one with: .* FOLDER --out"),
        (a_file_instead, "it is not a folder"),
        (lambda out: (out / "saccade.json").write_text("{}"), r"no 'schema'\)"),
    ],
)
def test_a_repository_is_believed_only_as_it_was_written(tiny_folder, out, spoil, words):
    assert deploy(tiny_folder, RepositoryOptions(out)) == read_repository(out)
    spoil(out)
    with pytest.raises(SaccadeError, match=words) as refused:
        read_repository(out)
    assert "saccade repository" in str(refused.value)
