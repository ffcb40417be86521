# SPDX-License-Identifier: Apache-2.0
"""Texts of an answer, and what a server warns of when it starts."""

import importlib
import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from places import PACKAGE

from saccade.serving.client.answers import captions
from saccade.serving.client.wire import texts
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import notices

ROUTER = PACKAGE / "model_repository" / "router"
sys.path.insert(0, str(ROUTER))
try:
    text_rows = importlib.import_module("plain_family").text_rows
finally:
    sys.path.remove(str(ROUTER))

SAID = ["a dog", "", "ein Hündchen, 狗"]


def answered(**outputs):
    """An answer as the server's client gives it."""
    return SimpleNamespace(as_numpy=outputs.get)


@pytest.mark.parametrize("said", [SAID, ["", ""], ["one"]])
def test_texts_come_back_from_rows_of_bytes(said):
    rows = text_rows(said)
    assert rows.dtype == np.uint8 and rows.shape[0] == len(said) and rows.size
    assert texts(answered(caption=rows), "caption") == said


def test_captions_are_read_with_their_attention():
    maps = np.zeros((3, 2, 1, 1), np.float32)
    maps[0, :2] = maps[2, :1] = 1
    read = captions(answered(caption=text_rows(SAID), attention=maps, variant=text_rows(["v"] * 3)))
    assert [(each.text, len(each.attention)) for each in read] == list(
        zip(SAID, (2, 0, 1), strict=True)
    )


def test_http_is_warned_of():
    assert [level for level, _ in notices(ServeOptions())] == [logging.INFO]
    warnings = list(notices(ServeOptions(http=True)))
    assert [level for level, _ in warnings] == [logging.WARNING, logging.INFO]
    assert "HTTP is on" in warnings[0][1] and "MemoryMax" in warnings[1][1]
