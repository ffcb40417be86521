# SPDX-License-Identifier: Apache-2.0
"""The examples in the helps are run, except for those in a list with the reason."""

import functools
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from folder_store import stored
from places import ROOT
from quick_gate import quick_gate
from tiny import CONFIG

from saccade.models.checkpoint import save
from saccade.models.preprocessing import Preprocessing
from saccade.serving.commands import cli

pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
pytest.importorskip("onnxruntime", reason="not installed: pip install '.[cpu]'")
pytest.importorskip("matplotlib", reason="not installed: pip install '.[bench]'")

SERVER = "needs a server; the tests of pages type such commands"
FIGURES = "needs what was measured through a server"
NETWORK = "asks a hub"
LONG = "trains, traces or builds for minutes"
HUB = "needs a folder or a checkpoint of another project"
SIDE = 24  # of digits-sum
# By the first words of an example: why it is not run here.
NOT_RUN = {
    "train": LONG,
    "convert": HUB,
    "upload": NETWORK,
    "download": NETWORK,
    "select": LONG,
    "evaluate shipped:digits-sum": LONG,
    "export shipped:digits-sum": LONG,
    "group": HUB,
    "build": LONG,
    "bench": SERVER,
    "sweep": LONG,
    "choose build/digits-sum --max-latency-ms": FIGURES,
    "plan": FIGURES,
    "serve build/repository\n": SERVER,
    "bulk build/sparo": "needs a table and a SPARO",
    "classify": SERVER,
    "embed": SERVER,
    "segment": SERVER,
    "answer": SERVER,
    "caption": SERVER,
    "edit": SERVER,
    "replay": SERVER,
    "show": SERVER,
    "explore": SERVER,
    "inspect epoch_32.pt": HUB,
    "demo": LONG,
    "ops --build": LONG,
    "doctor --url": SERVER,
}
# Random weights answer, but no better than by chance: here a check that ran says no.
MAY_FAIL = ("choose", "calibrate")


def typed_examples() -> list[str]:
    """The examples of all commands, without what the shell does with their answers."""
    lines = [line for one in cli.COMMANDS.values() for line in one.examples.splitlines()]
    return [line.partition(" > ")[0] for line in lines if not line.startswith("#")]


def reason(example: str) -> str | None:
    return next(
        (why for words, why in NOT_RUN.items() if f"{example}\n".startswith(f"saccade {words}")),
        None,
    )


def digits_sum(place: Path) -> None:
    """An untrained NAC for the canvases of digits-sum, as `digits-sum` and as a checkpoint."""
    from saccade.exporter.export import ExportOptions, export
    from saccade.models.nac.model import NAC, NACConfig

    config = NACConfig(**{**CONFIG, "height_px": SIDE, "width_px": SIDE, "patch_px": 12})
    rng = np.random.default_rng(0)
    checkpoint = save(
        place / "my.safetensors",
        family="nac",
        config=config.to_dict(),
        weights=NAC(config).eval().state_dict(),
        preprocessing=Preprocessing(SIDE, SIDE, 1, config.mean, config.std),
        labels=tuple(map(str, range(config.classes))),
        calibration={
            "image": rng.integers(0, 256, (256, SIDE, SIDE, 1), dtype=np.uint8),
            "labels": rng.integers(0, config.classes, 256),
        },
        card={"data": "digits-sum", "seed": 0},
    )
    with quick_gate():
        export(checkpoint, ExportOptions(place / "digits-sum", budget=(1, 0.25)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples read."""
    place, made = tmp_path_factory.mktemp("examples"), stored("examples", digits_sum)
    shutil.copytree(made / "digits-sum", place / "build" / "digits-sum")
    shutil.copy(made / "my.safetensors", place)
    image = ROOT / "docs" / "examples" / "sum.png"
    for name in ("cat.png", "dog.png", "photos/cat.png"):
        (place / name).parent.mkdir(exist_ok=True)
        shutil.copy(image, place / name)
    return place


EXAMPLES = [example for example in typed_examples() if reason(example) is None]


@functools.cache
def run_all(place: Path) -> dict[str, object]:
    """Run the examples in the order of the commands: some read what others wrote."""
    codes: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch, quick_gate():
        patch.chdir(place)
        measured = "bench build/digits-sum --no-server --seconds 3 --rounds 2 --out build/measured"
        assert cli.run(measured.split()) == 0  # what some examples read
        for example in EXAMPLES:
            words = shlex.split(example)[1:]
            again = "--out" in words and (place / words[words.index("--out") + 1]).exists()
            codes[example] = cli.run([*words, *(["--force"] if again else [])])
    return codes


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: str, folder: Path) -> None:
    code = run_all(folder)[example]
    allowed = (0, 1) if example.split()[1] in MAY_FAIL else (0,)
    assert code in allowed


def test_reasons_are_of_examples() -> None:
    """A line of the list that no example begins with is left over from an older help."""
    shown = [f"{example}\n" for example in typed_examples()]
    assert all(any(e.startswith(f"saccade {words}") for e in shown) for words in NOT_RUN)
