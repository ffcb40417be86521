# SPDX-License-Identifier: Apache-2.0
"""A repository that was changed after it was written is not believed."""

import shutil

import pytest

from saccade.core.errors import SaccadeError
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.options import RepositoryOptions

FULL = "nac-b1000-fp32"


def spoil_model(out):
    (out / FULL / "1" / "model.onnx").write_bytes(b"other")


def spoil_router(out):
    (out / "nac" / "1" / "choose.py").unlink()


def spoil_by_adding(out):
    (out / "nac" / "1" / "sitecustomize.py").write_text("print('hello')")


def spoil_by_a_file(out):
    shutil.rmtree(out)
    out.write_bytes(b"")


def spoil_version(out):
    path = out / "saccade.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_model, "was changed"),
        (spoil_router, "is missing"),
        (spoil_by_adding, "was not written by saccade"),
        (spoil_version, "does not describe a model repository"),
        (lambda out: (out / "saccade.json").unlink(), r"it has no saccade\.json\."),
        (shutil.rmtree, r"repository: no such folder\. Write one with: .* FOLDER --out"),
        (spoil_by_a_file, "it is not a folder"),
        (lambda out: (out / "saccade.json").write_text("{}"), r"no 'schema'\)"),
    ],
)
def test_a_repository_is_believed_only_as_it_was_written(tiny_folder, tmp_path, spoil, words):
    out = tmp_path / "repository"
    assert deploy(tiny_folder, RepositoryOptions(out)) == read_repository(out)
    spoil(out)
    with pytest.raises(SaccadeError, match=words):
        read_repository(out)
