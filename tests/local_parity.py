# SPDX-License-Identifier: Apache-2.0
"""A client of a server and an artefact in this process, asked alike: equal answers, bit by bit."""

import shutil
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saccade.core.errors import SaccadeError
from saccade.serving.client.operations import Change
from saccade.serving.local import artefact

# What a client asks of each family, about files and at budgets of its own; the same of both.
CALLS = {
    "sot": [
        lambda on, files: on.classify(files, top=3),
        lambda on, files: on.classify(files, budget="class", top=99),
        lambda on, files: on.classify(files, policy="auto"),
        lambda on, files: on.classify(files, max_risk=0, strict=True),
    ],
    "sparo": [
        lambda on, files: on.classify(files),
        lambda on, files: on.classify(files, policy="auto"),
        lambda on, files: on.classify(
            files, labels=("red circle", "square"), templates=("a photo of {}", "{}"), budget=2 / 3
        ),
        lambda on, files: on.embed_text(["a red circle"], 1.0),
    ],
    "slot-attention": [
        lambda on, files: on.segment(files, seed=3, slots=4),
        lambda on, files: on.edit(files[0], Change(slot=1, move=(0.2, 0.1))),
    ],
    "vqa": [lambda on, files: on.answer(files, ["shape is left ?"] * len(files))],
    "captioner": [lambda on, files: on.caption(files, beam=2, max_length=4)],
}
WRONG = [
    lambda on, files: on.infer({"image": files}, budget=1e-6),
    lambda on, files: on.infer({"image": [*files, b"nonsense"]}),
    lambda on, files: on.infer({"image": ["nosuch.png"]}),
    lambda on, files: on.infer({"image": files}, parameters={"lunch": "now"}),
    lambda on, files: on.classify(files, policy="lunch"),
    lambda on, files: on.infer({"picture": files}),
]


def plain(value: Any) -> Any:
    """A value whose arrays can be compared with ==, bit by bit."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict | list | tuple):
        return [plain(one) for one in (value.items() if isinstance(value, dict) else value)]
    return plain(vars(value)) if is_dataclass(value) else value


def check_alike(local: Any, client: Any, family: str, files: list[Any]) -> None:
    """Ask both the same, and compare what they answer or how they refuse."""
    assert plain(local.view()) == plain(client.view())
    for call in CALLS[family]:
        assert plain(call(local, files)) == plain(call(client, files))
    for call in WRONG:
        assert refusal_of(call, local, files) == refusal_of(call, client, files)


def refusal_of(call: Any, on: Any, files: list[Any]) -> tuple[type, str]:
    """The error of a wrong call, without the place that it starts with."""
    with pytest.raises(SaccadeError) as refused:
        call(on, files)
    return type(refused.value), str(refused.value).rpartition(f": {on.model} ")[2]


def as_deployed(monkeypatch: pytest.MonkeyPatch, router: Path, *, alike: bool = True) -> None:
    """Open artefacts with the routes of a router's folder, whose thresholds a test has changed.

    `alike`: the folder was deployed without options that `load_artefact` does not have.
    """
    write = artefact.write_router

    def write_and_copy(place: Path, plan: Any) -> None:
        write(place, plan)
        config = (place / "config.pbtxt").read_text()
        assert alike is (config == (router / "config.pbtxt").read_text())
        shutil.copy(router / "config.pbtxt", place)
        shutil.copy(router / "1" / "routes.json", place / "1" / "routes.json")

    monkeypatch.setattr(artefact, "write_router", write_and_copy)
