# SPDX-License-Identifier: Apache-2.0
"""Texts of an answer, and repositories of releases in which they were strings."""

import importlib
import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from places import PACKAGE

pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")

import tiny_artefacts as tiny

from saccade.core.errors import SaccadeError
from saccade.serving.client.answers import captions
from saccade.serving.client.wire import output, texts
from saccade.serving.repository.config_text import config_text, parse_config
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.target import Target
from saccade.serving.repository.requirements import requirements_of
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.exposure import check_repository, notices
from saccade.serving.server.print_command import print_command

ROUTER = PACKAGE / "model_repository" / "router"
sys.path.insert(0, str(ROUTER))
try:
    text_rows = importlib.import_module("texts").text_rows
finally:
    sys.path.remove(str(ROUTER))

SAID = ["a dog", "", "ein Hündchen, 狗"]
EXPOSED = ServeOptions(host="0.0.0.0", accept_risk=True)


def answered(**outputs):
    """An answer as the server's client gives it."""
    return SimpleNamespace(as_numpy=outputs.get)


@pytest.mark.parametrize("said", [SAID, ["", ""], ["one"]])
def test_texts_come_back_from_rows_of_bytes(said):
    rows = text_rows(said)
    assert rows.dtype == np.uint8 and rows.shape[0] == len(said) and rows.size
    assert texts(answered(caption=rows), "caption") == said


def test_strings_of_older_repositories_are_read_too():
    strings = np.array([[text.encode()] for text in SAID], dtype=object)
    old, new = answered(variant=strings), answered(variant=text_rows(SAID))
    assert texts(old, "variant") == texts(new, "variant") == SAID
    np.testing.assert_array_equal(output(new, "variant"), strings)
    images = np.zeros((2, 2), np.uint8)
    np.testing.assert_array_equal(output(answered(image=images), "image"), images)


def test_captions_are_read_with_their_attention():
    maps = np.zeros((3, 2, 1, 1), np.float32)
    maps[0, :2] = maps[2, :1] = 1
    read = captions(answered(caption=text_rows(SAID), attention=maps, variant=text_rows(["v"] * 3)))
    assert [(each.text, len(each.attention)) for each in read] == list(
        zip(SAID, (2, 0, 1), strict=True)
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A repository of today, and one whose router answers strings, as of older releases."""
    place = tmp_path_factory.mktemp("texts")
    deploy(tiny.artefacts(place / "artefacts"), RepositoryOptions(place / "today"))
    deploy(place / "artefacts", RepositoryOptions(place / "older"))
    path = place / "older" / tiny.MODEL / "config.pbtxt"
    config = parse_config(path.read_text())
    for tensor in config.output:
        if tensor.name in ("variant", "variant_sha256"):
            tensor.data_type, tensor.dims[:] = config.input[0].data_type, [1]
    path.write_text(config_text(config))
    tiny.rehash(place / "older")
    return place


def test_an_older_repository_is_served_here_with_a_warning(written):
    older = requirements_of(written / "older")
    assert older.strings == ("variant", "variant_sha256")
    check_repository(written / "older", older, ServeOptions())
    level, text = next(notices(written / "older", older, ServeOptions()))
    assert level == logging.WARNING and "Run `saccade repository` again" in text
    today = requirements_of(written / "today")
    assert today.strings == ()
    assert [level for level, _ in notices(written / "today", today, ServeOptions())] == [
        logging.INFO
    ]


def test_an_older_repository_is_not_shown_to_others(written, needs_server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SaccadeError, match=r"--host 0\.0\.0\.0: .* variant, variant_sha256"):
        print_command(written / "older", EXPOSED)
    assert "--grpc-address=0.0.0.0" in print_command(written / "today", EXPOSED)


def test_preflight_knows_which_servers_it_ends(written):
    def reasons(name, line):
        findings = tiny.examine(written / name, Target(line=line, bundled=False))
        return [
            text for finding in findings if finding.check == "router" for text in finding.reasons
        ]  # fmt: skip

    (reason,) = reasons("older", "24.10")
    assert "One request for their classes crashes a server" in reason
    assert reasons("older", "25.08") == reasons("today", "24.10") == []


def test_http_is_warned_of(written):
    requirements = requirements_of(written / "today")
    warnings = list(notices(written / "today", requirements, ServeOptions(http=True)))
    assert [level for level, _ in warnings] == [logging.WARNING, logging.INFO]
    assert "HTTP is on" in warnings[0][1] and "MemoryMax" in warnings[1][1]
