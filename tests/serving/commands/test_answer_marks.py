# SPDX-License-Identifier: Apache-2.0
"""What the command line says about how an answer was chosen."""

from dataclasses import replace

from saccade.serving.client.answers import Classification
from saccade.serving.client.readiness import small_picture


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
