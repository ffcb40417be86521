# SPDX-License-Identifier: Apache-2.0
"""Files and folders of images on the command line, and how an answer was chosen."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.serving.client.answers import Classification
from saccade.serving.client.client import Client, load_embeddings
from saccade.serving.client.connection import check_url
from saccade.serving.client.readiness import small_picture
from saccade.serving.commands import image_files as listing
from saccade.serving.commands.cli import run
from saccade.serving.commands.image_files import image_files


@pytest.fixture
def pictures(tmp_path, digit):
    """A folder with good images at two depths, a hidden one, a cut one, a text, and a table."""
    place = tmp_path / "pictures"
    (place / "deep" / ".hidden").mkdir(parents=True)
    good = place / "z.PNG", place / "deep" / "a.png", place / "deep" / ".hidden" / "b.png"
    for path in good:
        Image.fromarray(digit[:, :, 0]).save(path, "PNG")
    (place / "deep" / "cut.png").write_bytes(good[0].read_bytes()[:60])
    (place / "text.jpg").write_text("hello")
    (place / "table.csv").write_text("not listed")
    return place


def test_folders_are_listed_at_any_depth_sorted_and_up_to_a_cap(pictures, tmp_path, monkeypatch):
    names = [str(path.relative_to(pictures)) for path in image_files([pictures])]
    assert names == ["deep/a.png", "deep/cut.png", "text.jpg", "z.PNG"]
    table = pictures / "table.csv"  # named by itself it is asked about, whatever its suffix
    assert image_files([table, pictures / "deep"])[:2] == (table, pictures / "deep" / "a.png")
    monkeypatch.setattr(listing, "MOST_FILES", 3)
    with pytest.raises(SaccadeError, match=r"found 4 images .* at most 3 .*`saccade bulk"):
        image_files([pictures])
    (tmp_path / "none").mkdir()
    for given, words in (((tmp_path / "none",), "no image in this folder"), ((), "No image given")):
        with pytest.raises(SaccadeError, match=words):
            image_files(given)


def test_a_bad_image_is_named_and_the_others_are_answered(server, pictures, tmp_path, capsys):
    where = ("--model", server.model, "--url", server.url)
    good = pictures / "z.PNG"
    missing = tmp_path / "missing.png"
    assert run(["classify", str(good), str(missing), str(pictures), str(good), *where]) == 1
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        str(path) for path in (good, pictures / "deep" / "a.png", good, good)
    ]
    bad = captured.err.splitlines()
    assert [line.split(": ")[1] for line in bad] == [
        str(path) for path in (missing, pictures / "deep" / "cut.png", pictures / "text.jpg")
    ]
    assert "No such file" in bad[0] and "PNG image of 60 bytes" in bad[1]
    assert "refuses the request" not in captured.err

    assert run(["embed", str(pictures), "--out", str(tmp_path / "e.npz"), "--json", *where]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["images"], len(data["refused"])) == (2, 2)
    assert load_embeddings(tmp_path / "e.npz")[1] == (str(pictures / "deep" / "a.png"), str(good))

    cut = str(pictures / "deep" / "cut.png")
    assert run(["classify", cut, "--json", *where]) == 2  # nothing to answer
    captured = capsys.readouterr()
    assert captured.err.startswith(f"saccade: {cut}: PNG image of 60 bytes") and not captured.out


def test_a_wrong_question_is_not_the_images_fault(server, pictures, capsys):
    where = ("--model", server.model, "--url", server.url)
    assert run(["classify", str(pictures), "--min-score", "0.5", *where]) == 2
    assert "needs measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url, words",
    [
        ("http://127.0.0.1:8000", "HTTP uses another port"),
        ("grpc://127.0.0.1:8001", "Leave out the scheme"),
        ("127.0.0.1", "Pass host and port"),
        ("127.0.0.1:99999", "Pass host and port"),
        ("127.0.0.1:port", "Pass host and port"),
        (":8001", "Pass host and port"),
        ("127.0.0.1:8001/v2", "Pass host and port"),
    ],
)
def test_an_address_that_is_none(url, words):
    with pytest.raises(SaccadeError, match=words) as refused:
        Client(url, "nac")
    assert f"found {url!r}" in str(refused.value) and "HOST:PORT" in str(refused.value)


@pytest.mark.parametrize("url", ["[::1]:8001", "grpcs://a:1", "ipv4:10.0.0.1:1,10.0.0.2:1"])
def test_an_address_that_is_one(url):
    assert url.endswith(check_url(url))


def test_places_of_the_wrong_kind_are_refused_before_anybody_is_asked(tmp_path, digit, capsys):
    image, folder = tmp_path / "image.png", tmp_path / "folder"
    folder.mkdir()
    Image.fromarray(digit[:, :, 0]).save(image)
    where = ("--model", "m", "--url", "127.0.0.1:9")
    cases = (
        (["segment", str(image), "--out", str(image)], "found a file, expected a folder"),
        (["show", str(folder), "--out", str(tmp_path / "o.png")], "image (found a folder"),
        (["show", str(tmp_path / "no"), "--out", str(tmp_path / "o.png")], "(No such file or dir"),
    )
    for arguments, words in cases:
        assert run([*arguments, *where]) == 2
        assert words in capsys.readouterr().err


def test_a_host_that_is_not_known_is_not_to_be_tried_later(digit):
    with Client("nothing.invalid:8001", "nac") as client:
        with pytest.raises(ServerFailed, match="no such host") as failed:
            client.classify(np.stack([digit]))
    assert "Try again" not in str(failed.value)


def test_an_answer_that_is_not_certified_is_marked(monkeypatch, tmp_path, capsys):
    from saccade.serving.commands import calls, cli

    (tmp_path / "a.png").write_bytes(small_picture())
    said = Classification((("seven", 0.5),), "nac-b0500-fp32", steps=1, certified=False)
    monkeypatch.setattr(calls.Client, "run", lambda *_: [said])
    assert cli.run(["classify", str(tmp_path / "a.png"), "--model", "nac", "--policy", "a"]) == 0
    assert "(nac-b0500-fp32, step 1, not certified)" in capsys.readouterr().out
    said = replace(said, degraded=True)
    assert cli.run(["classify", str(tmp_path / "a.png"), "--model", "nac"]) == 0
    assert "(nac-b0500-fp32, step 1, not certified, degraded)" in capsys.readouterr().out


def test_marks_are_in_json_only_where_they_are_known():
    plain = Classification((("seven", 0.5),), "nac-b1000-fp32")
    assert set(plain.to_dict()) == {"labels", "variant"}
    followed = replace(plain, steps=2, certified=True)
    assert set(followed.to_dict()) == {"labels", "variant", "steps", "certified"}
    assert replace(followed, degraded=False).to_dict()["degraded"] is False
