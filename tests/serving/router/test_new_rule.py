# SPDX-License-Identifier: Apache-2.0
"""A rule of the router's is one entry: the router, `saccade choose` and the client then have it."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from saccade.core.errors import SaccadeError
from saccade.serving.bench.sweep.choice import ChooseOptions, choose
from saccade.serving.client.wire import choice, names_variant
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions

ROUTER: Any = import_module("saccade.model_repository.router.choose")


@dataclass(frozen=True)
class SceneQuestions(ChooseOptions):
    max_multiply_adds: float | None = None


@pytest.fixture(autouse=True)
def rule(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ROUTER.Rule(
        figure="multiply_adds",
        at_least=False,
        best=lambda route: (route.multiply_adds,),
        best_words="the largest",
        words="at most {value:g} multiply-adds",
        range=ROUTER.ParameterRange(lambda value: value > 0, "a number above 0"),
    )
    monkeypatch.setitem(ROUTER.RULES, "max_multiply_adds", entry)


@pytest.fixture(scope="module")
def routes(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As the router reads them, the largest first."""
    place = tmp_path_factory.mktemp("rule") / "repository"
    deploy(tiny_folder, RepositoryOptions(place))
    known: Any = import_module("saccade.model_repository.router.routes")
    return known.read_routes(place / "nac" / "1" / "routes.json")


def test_the_router_follows_it(routes: Any) -> None:
    sizes = {variant.name: variant.multiply_adds for variant in routes.variants}
    assert len(set(sizes.values())) > 2
    for name, size in sizes.items():
        assert ROUTER.choose(routes, {"max_multiply_adds": str(size)}).name == name
    smallest = min(sizes.values())
    with pytest.raises(ROUTER.RequestRefused, match=f"no variant has at most {smallest - 1:g} mul"):
        ROUTER.choose(routes, {"max_multiply_adds": smallest - 1})
    with pytest.raises(ROUTER.RequestRefused, match=r"expected one of .*max_multiply_adds"):
        ROUTER.choose(routes, {"least": 1})


def test_choose_shows_what_it_decides(tiny_folder: Path, routes: Any) -> None:
    largest, second = sorted(routes.variants, key=lambda route: -route.multiply_adds)[:2]
    decided = choose(tiny_folder, SceneQuestions(max_multiply_adds=largest.multiply_adds - 1))
    assert (decided.chosen, decided.parameter) == (second.name, "max_multiply_adds")
    assert decided.why.startswith("the largest of ")
    assert {"when": "at least", "value": largest.multiply_adds, "variant": largest.name} in (
        decided.changes
    )
    with pytest.raises(SaccadeError, match=r"--max-multiply-adds is -1, expected a number above 0"):
        choose(tiny_folder, SceneQuestions(max_multiply_adds=-1))
    with pytest.raises(SaccadeError, match=r"Pass exactly one of .*--max-multiply-adds"):
        choose(tiny_folder, SceneQuestions())


def test_the_client_sends_it() -> None:
    assert choice(max_multiply_adds=5) == {"max_multiply_adds": "5.0"}
    assert names_variant({"max_multiply_adds": "5.0"}) and not names_variant({"policy": "auto"})
    with pytest.raises(SaccadeError, match="max_multiply_adds is -1, expected a number above 0"):
        choice(max_multiply_adds=-1)
    with pytest.raises(SaccadeError, match="--budget, --max-multiply-adds together"):
        choice(budget=0.5, max_multiply_adds=5)
