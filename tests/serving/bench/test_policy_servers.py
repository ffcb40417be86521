# SPDX-License-Identifier: Apache-2.0
"""The servers that a benchmark starts for policies, and what it measures through them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from policy_tables import LABELS, LARGE, SMALL, chain, entry
from support.serving.frontiers import ROUNDS, frontier_entry
from tiny_artefacts import FULL, HALF, artefacts

pytest.importorskip("scipy", reason="scipy is missing: pip install '.[bench]'")

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import Ratio
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.serving.bench import served
from saccade.serving.bench.load import LoadResult, Stream, StreamResult
from saccade.serving.bench.measurement import grpc_of, windows_of
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.policies import (
    PolicyWork,
    PolicyWorks,
    ServedPolicies,
    class_answers,
    served_policies_of,
    with_served,
)
from saccade.serving.bench.stopping import Deadline
from saccade.serving.bench.work import Work
from saccade.serving.client.texts import Labelling


def test_through_the_router_it_is_compared_at_the_most_clients():
    found = entry()
    points = {f"router_concurrency_{n}": {ROUNDS: [100.0 * n, 110.0 * n]} for n in (1, 4, 16)}
    full = {"router_concurrency_16": {ROUNDS: [800.0, 880.0]}}
    measured = with_served(found, points, full)
    assert measured.grpc == points and measured.times_full_served is not None
    assert measured.times_full_served.times == pytest.approx(2.0)
    assert with_served(found, None, full) == found


def variant(name: str, precision: str = "fp32", budget: float = 1.0) -> Any:
    chosen = SimpleNamespace(precision=precision, budget=budget)
    return SimpleNamespace(name=name, main=SimpleNamespace(variant=chosen))


SEVERAL: dict[str, tuple[tuple[Any, ...], Labelling | None, bool]] = {
    "one precision": ((variant(FULL), variant(HALF, budget=0.5)), None, False),
    "labels": ((variant(FULL), variant(HALF, budget=0.5)), Labelling(("a", "b"), ("{}",)), True),
    "two precisions": ((variant(FULL), variant(HALF, "int8", 0.5)), None, True),
    "a faster variant of the same budget": ((variant(FULL), variant(HALF)), None, True),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_the_full_model_is_measured_beside_policies_that_its_own_requests_are_not(case):
    variants, labelling, alone = SEVERAL[case]
    works = PolicyWorks((served_chain(),), class_answers({}, LABELS, "d", "s", labelling))
    followed = served_policies_of(works, variants)
    assert followed.works == works.works and followed.labelling == labelling
    assert [policy.name for policy in followed.followed.routes] == ["auto"]
    assert followed.full_alone == alone
    assert served_policies_of(PolicyWorks(), variants).full_alone is False


def served_chain(full: str = FULL) -> PolicyWork:
    work = chain([])
    content: Any = SimpleNamespace(**{**vars(work.content), "full": full})
    return replace(work, content=content)


def test_policies_of_several_full_models_are_not_served(capsys):
    works = PolicyWorks((served_chain(), served_chain(HALF)))
    assert served_policies_of(works, [variant(FULL)]) == ServedPolicies()
    assert f"compared with {HALF} and {FULL}, and a router" in capsys.readouterr().err


class FakeServer:
    """A server under load that remembers what it was asked to measure."""

    def __init__(self, folder: Any, policies: Any) -> None:
        self.url, self.version = "here", "triton 0"
        self.variants = {one.name for one in folder.variants}
        self.policies = [one.name for one in policies.followed.routes]
        self.measured: set[str] = set()
        self.asked: dict[str, tuple[bytes, ...]] = {}

    def measure(self, streams: Any, windows: Any, **_: Any) -> None:
        self.measured = {title for title, *_ in streams}
        self.asked = {title: stream.requests for (title, *_), stream in streams.items()}
        rate = {FULL: 100, HALF: 900, "full model": 200, "policy auto": 600}
        for place, stream in streams.items():
            seen = {stream.name: StreamResult((1.0,) * rate[place[0]])}
            windows.setdefault(place, []).append(LoadResult(1.0, seen, 0.1, {}, {}))


def test_precisions_have_a_server_each_and_their_policies_another(tmp_path, monkeypatch):
    """The full model is fp32 and the small one int8: no server of one precision has both."""
    there = ArtefactFolder(artefacts(tmp_path / "tiny", checkpoint=False))
    whole = there.only(
        [typed_as(one, "int8") if one.name == HALF else one for one in there.variants]
    )
    started_servers: list[FakeServer] = []

    @contextmanager
    def started(folder: Any, *, policies: Any, **_: Any) -> Iterator[FakeServer]:
        started_servers.append(FakeServer(folder, policies))
        yield started_servers[-1]

    def streams_of(url: str, works: Any, clients: Any) -> dict[Any, Stream]:
        return {(one.variant, "", f"router_concurrency_{n}"): Stream(one.variant, "", n, ())
                for one in works for n in clients}  # fmt: skip

    asked: list[bytes] = []

    def ask(url: str, message: bytes) -> Any:
        asked.append(message)
        return {"variant": [HALF.encode()], "logits": 1.02 * SMALL[:1]}  # as int8 may differ

    monkeypatch.setattr(served, "server_under_load", started)
    monkeypatch.setattr(served, "streams", streams_of)
    monkeypatch.setattr(served, "ask", ask)
    policies = PolicyWorks((served_chain(),), class_answers({}, LABELS, "d", "s"))
    works = {one.name: [work_of(one)] for one in whole.variants}
    workload: Any = SimpleNamespace(
        folder=whole,
        works=works,
        all_works=[work for own in works.values() for work in own],
        ops=None,
        served=served_policies_of(policies, whole.variants),
        deadline=Deadline(60),
    )
    entries = tuple(
        frontier_entry(one.name, one.sha256, precision=precision_of(one)) for one in whole.variants
    )
    options = BenchOptions(Path("out"), rounds=2, concurrency=(1, 4))
    _, windows = served.through_servers(workload, entries, options, lambda *_: None)
    assert [server.variants for server in started_servers] == [{FULL}, {HALF}, {FULL, HALF}]
    assert [server.policies for server in started_servers] == [[], [], ["auto"]]
    assert [server.measured for server in started_servers] == [
        {FULL},
        {HALF},
        {"full model", "policy auto"},
    ]
    # A budget would choose the faster of two precisions.
    assert all(b"max_risk" in message for message in started_servers[-1].asked["full model"])
    own, full = (grpc_of(windows_of(windows, name)) for name in ("policy auto", "full model"))
    assert full is not None and set(full) == {f"router_concurrency_{n}" for n in (1, 4)}
    assert with_served(entry(), own, full).times_full_served == Ratio(3.0, (3.0, 3.0))
    assert all(b"policy" in message and b"auto" in message for message in asked)


def precision_of(variant: Any) -> str:
    return str(variant.main.variant.precision)


def typed_as(variant: VariantFiles, precision: str) -> VariantFiles:
    """The variant, as if exported at another precision."""
    entry = replace(variant.main.variant, precision=precision)
    return replace(variant, components={entry.role: replace(variant.main, variant=entry)})


def work_of(variant: VariantFiles) -> Work:
    """The requests to a variant of the tables of logits."""
    table = {FULL: LARGE, HALF: SMALL}[variant.name]
    return Work(
        variant.name, "", variant.main.variant.setting, precision_of(variant),
        lambda inputs: {"logits": table[inputs["row"]]}, {"row": np.arange(5)},
        ("probabilities",), variant.name, "tiny",
    )  # fmt: skip
