# SPDX-License-Identifier: Apache-2.0
"""2/3 and 1/6 from an export's option to the router's answer, in old folders too."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_folders import family_folder
from router_code import router_module

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import SUFFIX
from saccade.exporter.export import ExportOptions, export
from saccade.exporter.gate.reference import Reference
from saccade.models.budget import Budget
from saccade.models.checkpoint import load
from saccade.serving.bench.sweep.choice import ChooseOptions, choose
from saccade.serving.client.wire import choice
from saccade.serving.commands.cli import run
from saccade.serving.repository.deploy import RepositoryOptions, deploy

pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is missing: pip install '.[cpu]'")

FULL, TWO_THIRDS, SIXTH = (f"sparo-{label}-fp32" for label in ("b1000", "b0667", "b0167"))
STORED = {"b1000": 1.0, "b0667": 2 / 3, "b0167": 1 / 6}
ROUNDED = {"b1000": 1.0, "b0667": 0.666667, "b0167": 0.166667}  # as it was stored once


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An export with budgets of 1, 2/3 and 1/6, and as an earlier release has written it."""
    place = tmp_path_factory.mktemp("thirds")
    for name in ("exact", "rounded"):
        shutil.copytree(family_folder("sparo"), place / name)
    for path in (place / "rounded").glob("*" + SUFFIX):
        content = json.loads(path.read_text())
        content["variant"]["budget"] = ROUNDED[content["variant"]["setting"]]
        path.write_text(json.dumps(content))
    for name in ("exact", "rounded"):
        deploy(place / name, RepositoryOptions(place / f"{name}-repository"))
    return {name: place / name for name in ("exact", "rounded")}


def routed(folder: Path) -> Callable[[dict[str, Any]], str | None]:
    """The router's own code on the file that was written for it."""
    place = folder.with_name(f"{folder.name}-repository") / "sparo" / "1"
    rules = router_module("choose")
    routes = router_module("routes").read_routes(place / "routes.json")

    def answer(parameters: dict[str, Any]) -> str | None:
        try:
            return str(rules.choose(routes, parameters).name)
        except rules.RequestRefused:
            return None

    return answer


@pytest.mark.parametrize("name, budgets", [("exact", STORED), ("rounded", ROUNDED)])
def test_manifest_and_routes_hold_the_budget(folders, name, budgets):
    manifests = ArtefactFolder(folders[name]).manifests
    assert {manifest.variant.setting: manifest.variant.budget for manifest in manifests} == budgets
    assert [manifest.variant.kept for manifest in manifests] == [4, 4, 3, 3, 1, 1]  # in two towers
    repository = folders[name].with_name(f"{name}-repository")
    content = json.loads((repository / "sparo" / "1" / "routes.json").read_text())
    assert {variant["setting"]: variant["budget"] for variant in content["variants"]} == budgets
    reference = Reference(load(folders[name] / "sparo.safetensors"))
    for manifest in manifests:  # `verify` counts what the manifest counts
        assert reference.budget(manifest.variant).kept == manifest.variant.kept


def test_a_manifest_that_was_counted_in_floats_is_verified_as_it_was_made(
    folders, tiny_nac, tmp_path
):
    checkpoint = tiny_nac(tmp_path / "nac.safetensors", modules=45, propagator_layers=1)
    reference = Reference(checkpoint)
    written = ArtefactFolder(folders["exact"]).manifests[0].variant
    for kept, modules in ((31, 31), (32, 32), (30, 32)):  # 0.7 of 45 are 31.499999999999996
        entry = replace(written, setting="b0700", budget=Budget("0.7"), kept=kept, total=45)
        budget = reference.budget(entry)
        assert budget.kept == reference.variant(budget).config.modules == modules


SAID = [
    (2 / 3, TWO_THIRDS), ("2/3", TWO_THIRDS), (Fraction(2, 3), TWO_THIRDS),
    ("0.6666666666666666", TWO_THIRDS), ("0.666667", TWO_THIRDS), (0.666667, TWO_THIRDS),
    (np.float32(2 / 3), TWO_THIRDS), (0.67, TWO_THIRDS), ("b0667", TWO_THIRDS), (0.9, TWO_THIRDS),
    (0.66666, SIXTH), (0.5, SIXTH), (1 / 6, SIXTH), ("1/6", SIXTH), ("0.166667", SIXTH),
    (0.166666, None), ("1/7", None), (1, FULL), ("0.99999", TWO_THIRDS),
]  # fmt: skip


@pytest.mark.parametrize("said, expected", SAID)
@pytest.mark.parametrize("name", ["exact", "rounded"])
def test_router_client_and_choose_take_the_same_variant(folders, name, said, expected):
    answer = routed(folders[name])
    assert answer(dict(choice(said))) == expected  # what the client sends
    if not isinstance(said, Fraction | np.floating):  # what a protocol has no type for
        assert answer({"budget": said}) == expected
    assert choose(folders[name], ChooseOptions(budget=str(said))).chosen == expected


def test_choose_says_where_the_choice_changes(folders, capsys):
    for folder in folders.values():
        answer = choose(folder, ChooseOptions(budget="2/3"))
        assert answer.value == 2 / 3 and "of 2 variants" in answer.why
        (below, above) = answer.changes
        assert (below["when"], below["variant"]) == ("below", SIXTH)
        assert f"{below['value']:g}" == "0.666667"
        assert above == {"when": "at least", "value": 1.0, "variant": FULL}
        # What is printed can be typed.
        assert run(["choose", str(folder), "--budget", "1/6"]) == 0
        assert "--budget below 0.166667: no variant." in capsys.readouterr().out
        assert run(["choose", str(folder), "--budget", "1/7"]) == 1
        assert "--budget at least 0.166667: " + SIXTH in capsys.readouterr().out


def test_the_command_line_reads_fractions(tmp_path, folders):
    checkpoint = folders["exact"] / "sparo.safetensors"
    with pytest.raises(SaccadeError, match=r"both keep 3 of 4 slots"):
        export(checkpoint, ExportOptions(tmp_path / "out", budget=("2/3", 0.65)))
    words = ["export", str(checkpoint), "--out", str(tmp_path / "out"), "--budget", "1,2/3,4/3"]
    assert run(words) == 2
    assert list(tmp_path.iterdir()) == []
