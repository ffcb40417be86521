# SPDX-License-Identifier: Apache-2.0
"""The entry of every family: what it names is there, and a forgotten one is refused in words."""

import ast
import sys
from contextlib import nullcontext
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from places import PACKAGE

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.variant import known_roles, variant_name
from saccade.exporter.evaluation.tasks import task_asked, tasks_of
from saccade.models import families
from saccade.models.entry import EvaluationTask, FamilyEntry, imported
from saccade.models.families import FAMILIES, entries, entry_of, folded
from saccade.serving.client import client, operations

CALLS = ("segment", "edit", "answer", "caption")
ROUTER = {path.name for path in (PACKAGE / "model_repository" / "router").glob("*.py")}


def references(entry: FamilyEntry) -> list[str]:
    """Every `module:name` of an entry."""
    tasks = [
        reference for task in entry.own_tasks.values() for reference in (task.score, task.inputs)
    ]
    values = [getattr(entry, field.name) for field in fields(entry)]
    return [*tasks, *(value for value in values if isinstance(value, str) and ":" in value)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_an_entry_names_is_there(family):
    entry = entry_of(family)
    for reference in references(entry):
        assert imported(reference) is not None, reference
    for task in tasks_of(family).values():
        assert callable(imported(task.score)) and callable(imported(task.inputs))
    assert entry.tasks and entry.answers and set(entry.calls) <= set(CALLS)
    roles = {*entry.required, *entry.inner, *entry.beside, *entry.filled}
    assert roles <= set(known_roles())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_runs_in_the_server_imports_nothing_of_saccade(family):
    entry, package = entry_of(family), import_module(FAMILIES[family])
    if entry.router:
        assert "family.py" in entry.router and not ROUTER & set(entry.router)
    for source in entry.router.values():
        code = ast.parse((Path(package.__file__).parent / source).read_text())
        imports = [node for node in ast.walk(code) if isinstance(node, ast.Import | ast.ImportFrom)]
        # What is imported for its types alone is not there either.
        assert not [each for each in imports if "saccade" in ast.unparse(each)], source


def test_every_call_is_answered_by_a_family():
    assert {call for _, entry in entries() for call in entry.calls} == set(CALLS)
    for call in CALLS:
        assert hasattr(client.Client, call) and (call == "edit" or hasattr(operations, call))


def test_an_unknown_family_is_refused_by_all_who_ask():
    import torch

    for ask in (entry_of, tasks_of, families.family_class):
        with pytest.raises(SaccadeError, match="model family 'cnn' is unknown"):
            ask("cnn")
    with pytest.raises(SaccadeError, match="Linear: no family has this model"):
        folded(torch.nn.Linear(1, 1))


def test_an_entry_that_names_what_there_is_not_is_refused(monkeypatch):
    odd = EvaluationTask("nowhere:score", "nowhere:inputs")
    wrong = FamilyEntry(
        *["a:b"] * 5, tasks=("top2",), answers=(), own_tasks={"top3": odd}, roles=("paint",)
    )
    module = ModuleType("wrong_family")
    module.ENTRY = wrong
    monkeypatch.setitem(sys.modules, "wrong_family", module)
    monkeypatch.setitem(FAMILIES, "wrong", "wrong_family")
    with pytest.raises(
        SaccadeError, match=r"a task of family 'wrong' is 'top2', expected .*top1.*top3"
    ):
        task_asked("wrong", None, "it")
    assert variant_name("m", "paint", "b1000", "fp32") == "m-paint-b1000-fp32"
    monkeypatch.delattr(module, "ENTRY")
    with pytest.raises(SaccadeError, match="role is 'paint', expected one of image"):
        monkeypatch.delitem(FAMILIES, "wrong")
        variant_name("m", "paint", "b1000", "fp32")
    monkeypatch.setitem(FAMILIES, "wrong", "wrong_family")
    with pytest.raises(SaccadeError, match="wrong_family: has no ENTRY"):
        entry_of("wrong")


NOTHING = {"cnn": "model family 'cnn' is unknown", "bare": "there is nothing to show"}


@pytest.mark.parametrize("family", NOTHING)
def test_show_refuses_a_model_that_it_cannot_draw(family, monkeypatch, tmp_path):
    from PIL import Image

    from saccade.serving.client.call_options import ShowOptions
    from saccade.serving.commands import calls

    module = ModuleType("bare_family")
    module.ENTRY = FamilyEntry(*["a:b"] * 5, tasks=("top1",), answers=())
    monkeypatch.setitem(sys.modules, "bare_family", module)
    monkeypatch.setitem(FAMILIES, "bare", "bare_family")
    view = SimpleNamespace(family=family, model="m")
    connected = nullcontext(SimpleNamespace(view=lambda: view))
    monkeypatch.setattr(calls, "Client", lambda *_, **__: connected)
    Image.new("L", (2, 2)).save(tmp_path / "image.png")
    with pytest.raises(SaccadeError, match=NOTHING[family]):
        calls.show(tmp_path / "image.png", ShowOptions("m", out=tmp_path / "shown.png"))
