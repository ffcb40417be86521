# SPDX-License-Identifier: Apache-2.0
"""The builds that docs/engines.md shows, run in order on a small model in place of the shipped."""

import re
import shlex
from pathlib import Path

import pytest
from rtx_builds import needs_rtx
from tiny_artefacts import HALF, artefacts

from saccade.export.engines.engine_manifest import EngineManifest
from saccade.serving import cli

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "engines.md"


def shown() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text(), re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("saccade build ")]


@needs_rtx
def test_the_builds_do_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = artefacts(tmp_path / "build" / "digits", checkpoint=False)
    for path in folder.glob(f"{HALF}.*"):
        path.unlink()
    monkeypatch.chdir(tmp_path)
    for line in shown():
        assert cli.run(shlex.split(line)[1:]) == 0, line
    made = {path.name for path in (folder / "engines").iterdir()}
    assert made == {"tensorrt-rtx-8.9", "tensorrt-rtx-8.9+12.0"}


def test_every_key_of_a_manifest_is_explained() -> None:
    table = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", DOCUMENT.read_text(), re.M)
    explained = {name for names in table for name in re.findall(r"`(\w+)`", names)}
    assert set(EngineManifest.__dataclass_fields__) <= explained
