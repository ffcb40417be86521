# SPDX-License-Identifier: Apache-2.0
"""The driver of `saccade convert`: reports every key, asks for what is missing, writes or not."""

import json
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from saccade.core.errors import SaccadeError
from saccade.models.checkpoint import load
from saccade.models.nac.model import NAC, NACConfig
from saccade.models.official import convert as driver
from saccade.models.official.conversion import Conversion, ConversionFailed, Original
from saccade.models.official.convert import (
    OPTIONAL,
    SOURCES,
    ConverterSource,
    ConvertOptions,
    convert,
)
from saccade.models.preprocessing import Preprocessing
from saccade.serving.commands.command import Command, CommonOptions
from saccade.serving.commands.models import convert as convert_command

CONFIG = NACConfig(modules=6, dim=16, heads=2, code_dim=8, signature_dim=4, ffn_dim=16, classes=3)
TAKES = ("labels", "attention", "lam", "backbone")
TIED = ("theirs.head.weight", "theirs.tied_head.weight")


def read(official: Original) -> Conversion:
    """A made-up code that keeps a NAC's tensors under other names, and one of them twice."""
    if TIED[0] not in official.tensors:
        raise SaccadeError(f"{official.path}: has no {TIED[0]}: not a file of this source.")
    config = NACConfig.from_dict(CONFIG.to_dict() | dict(official.config or {}))
    wanted = NAC(config).state_dict()
    names = {key: f"theirs.{key}" for key in wanted if key != "module_order"}
    return Conversion(
        family="nac",
        config=config,
        weights={
            key: official.tensors[name] for key, name in names.items() if name in official.tensors
        }
        | {"module_order": torch.arange(config.modules)},
        names=names,
        preprocessing=Preprocessing(8, 8, 1, config.mean, config.std),
        labels=official.labels or (),
        ignored={TIED[1]: "a copy of the head"},
        notes=("read by a test",),
        exact=replace(config, epsilon=0.5),
    )


@pytest.fixture(autouse=True)
def fake_source(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fake.source")
    module.convert = read  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake.source", module)
    monkeypatch.setitem(SOURCES, "fake", ConverterSource("fake.source", TAKES, "teacher"))


@dataclass
class Theirs:
    """The other code's checkpoint, which is converted with three labels."""

    place: Path

    @property
    def options(self) -> ConvertOptions:
        (self.place / "labels.txt").write_text("cat\ndog\nowl\n")
        return ConvertOptions(self.out, labels=self.place / "labels.txt")

    @property
    def out(self) -> Path:
        return self.place / "ours.safetensors"

    def file(self, **changes: torch.Tensor | None) -> Path:
        """Save it; `changes` replace tensors, None takes them away."""
        tensors = {f"theirs.{key}": value for key, value in NAC(CONFIG).state_dict().items()}
        del tensors["theirs.module_order"]
        tensors[TIED[1]] = tensors[TIED[0]]
        tensors |= {f"theirs.{key.replace('__', '.')}": value for key, value in changes.items()}
        tensors = {key: value for key, value in tensors.items() if value is not None}
        torch.save({"teacher": tensors, "student": {}, "epoch": 1}, self.place / "theirs.pth")
        return self.place / "theirs.pth"

    def convert(self, source: str = "fake", file: Path | None = None, **options: Any) -> Any:
        return convert(source, file or self.file(), replace(self.options, **options))


@pytest.fixture
def theirs(tmp_path: Path) -> Theirs:
    return Theirs(tmp_path)


def test_a_file_becomes_a_checkpoint(theirs: Theirs) -> None:
    report = theirs.convert()
    checkpoint = load(theirs.out)
    assert checkpoint.sha256 == report.out_sha256
    assert checkpoint.labels == ("cat", "dog", "owl")
    expected = NAC(CONFIG).eval()
    x = torch.randint(0, 256, (5, 8, 8, 1), dtype=torch.uint8)
    assert torch.equal(checkpoint.build()(x), expected(x))
    assert checkpoint.calibration["image"].shape == (256, 8, 8, 1)
    assert checkpoint.calibration["image"].std() > 10  # scenes, not blanks
    assert "256 generated scenes" in checkpoint.card["calibration"]
    assert checkpoint.card["source"] == "fake"
    assert checkpoint.card["numerics"] == "authors"
    assert str(theirs.out.parent) not in json.dumps(checkpoint.card)
    assert json.loads(json.dumps(report.to_dict()))["rows"] == []
    text = report.to_text()
    assert "a copy of the head" in text
    assert "read by a test" in text
    assert f"{report.parameters:,} parameters" in text


def test_every_key_that_does_not_fit_is_reported_and_nothing_written(theirs: Theirs) -> None:
    path = theirs.file(
        read_out_codes=None,
        head__bias=None,
        extra=torch.zeros(2),
        generator__codes=torch.ones(1, 8),
    )
    with pytest.raises(ConversionFailed) as caught:
        theirs.convert(file=path)
    rows = [(r.problem, r.ours, r.theirs, r.found, r.expected) for r in caught.value.report.rows]
    assert rows == [
        ("missing", "head.bias", "theirs.head.bias", "", "(3,)"),
        ("missing", "read_out_codes", "theirs.read_out_codes", "", "(4, 8)"),
        ("unexpected", "", "theirs.extra", "(2,)", ""),
        ("wrong shape", "generator.codes", "theirs.generator.codes", "(1, 8)", "(6, 8)"),
    ]
    assert all(row[2] in str(caught.value) for row in rows)
    assert json.loads(json.dumps(caught.value.report.to_dict()))["rows"][3]["expected"] == "(6, 8)"
    assert not theirs.out.exists()


def test_a_report_of_what_does_not_fit_is_there_for_machines(
    theirs: Theirs, tmp_path: Path
) -> None:
    options = ConvertOptions(tmp_path / "out.safetensors")
    outcome = Command(convert_command, "").callable()(
        "fake", options, theirs.file(head__bias=None), common=CommonOptions(json=True)
    )
    assert (getattr(outcome.result, "exit_code", 0), outcome.as_json) == (2, True)
    assert [row["ours"] for row in outcome.result.to_dict()["rows"]] == ["head.bias"]


def test_a_configuration_that_does_not_fit_its_weights(theirs: Theirs, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"modules": 7}')
    with pytest.raises(ConversionFailed, match=r"codes\): found \(6, 8\), expected \(7, 8\)"):
        theirs.convert(config=tmp_path / "config.json")
    (tmp_path / "config.json").write_text('{"modles": 7}')
    with pytest.raises(SaccadeError, match="unknown field 'modles'"):
        theirs.convert(config=tmp_path / "config.json")
    assert not theirs.out.exists()


def test_exact_numerics_say_what_they_change(theirs: Theirs) -> None:
    report = theirs.convert(numerics="exact")
    checkpoint = load(theirs.out)
    assert checkpoint.config["epsilon"] == 0.5
    images = torch.from_numpy(checkpoint.calibration["image"][:16])
    authors, exact = (
        NAC(replace(CONFIG, epsilon=epsilon)).double().eval() for epsilon in (0.25, 0.5)
    )
    exact.load_state_dict(authors.state_dict())
    change = (authors(images) - exact(images)).abs().max().item()
    assert report.exact["output"] == "logits"
    assert report.exact["largest_change"] == pytest.approx(change, rel=1e-9)
    assert change > 0
    assert checkpoint.card["exact"] == report.exact
    assert "exact numerics: logits changes by at most" in report.to_text()


def test_the_input_as_the_user_says(theirs: Theirs, tmp_path: Path) -> None:
    said = tmp_path / "input.json"
    said.write_text('{"mean": [0.25], "interpolation": "bicubic"}')
    theirs.convert(preprocessing=said)
    checkpoint = load(theirs.out)
    assert checkpoint.preprocessing is not None
    assert checkpoint.preprocessing.interpolation == "bicubic"
    assert checkpoint.preprocessing.mean == tuple(checkpoint.config["mean"]) == (0.25,)
    said.write_text('{"height_px": 9}')
    with pytest.raises(SaccadeError, match="height_px is 9, but the weights are for 8"):
        theirs.convert(preprocessing=said, force=True)


def test_calibration_by_the_users_images(theirs: Theirs, tmp_path: Path) -> None:
    for label, level in (("dog", 200), ("cat", 20)):
        (tmp_path / "mine" / label).mkdir(parents=True)
        for index in range(185):
            image = np.full((8, 8), level, dtype=np.uint8)
            Image.fromarray(image).save(tmp_path / "mine" / label / f"{index}.png")
    theirs.convert(calibrate_on=str(tmp_path / "mine"))
    checkpoint = load(theirs.out)
    assert "256 training images with labels of mine" in checkpoint.card["calibration"]
    dogs = checkpoint.calibration["image"][:, 0, 0, 0] == 200
    assert np.array_equal(checkpoint.calibration["labels"], dogs.astype(np.int64))
    with pytest.raises(SaccadeError, match="the model expects"):
        theirs.convert(calibrate_on="digits-sum", force=True)


def test_what_does_not_fit_is_refused_before_it_is_read(
    theirs: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.core.resources.available_memory_bytes", lambda: 2**20)
    reason = r"ours\.safetensors: the conversion needs about .* MiB"
    with pytest.raises(SaccadeError, match=reason):
        theirs.convert()
    tensors = torch.load(theirs.file())["teacher"]
    save_file({name: value.clone() for name, value in tensors.items()}, theirs.out.with_suffix(""))
    monkeypatch.setattr(driver, "read_tensors", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(SaccadeError, match=reason):
        theirs.convert(file=theirs.out.with_suffix(""))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown source": ({"source": "timm"}, "source is 'timm'.*sparo-clip, open-clip"),
    "another ending": ({"out": Path("x.pt")}, "ends in .safetensors"),
    "labels missing": ({"labels": None}, "3 classes, found 0 labels.*--labels"),
    "no such labels": ({"labels": Path("none.txt")}, "none.txt: cannot be read"),
    "too few labels": ({"labels": "cat\n"}, "3 classes, found 1 labels"),
    "a config that is not an object": ({"config": "[]"}, "--config.*expected a JSON object"),
    "a config that is no JSON": ({"config": "{"}, "--config.*not JSON"),
    "an unknown field of the input": ({"preprocessing": '{"hieght": 1}'}, "hieght"),
    "no such part": ({"checkpoint_key": "ema"}, "no 'ema' at its top"),
    "an empty part": ({"checkpoint_key": "student"}, "contains no tensors"),
    "a negative lam": ({"lam": -1.0, "attention": "tvmax"}, "--lam is -1"),
    "lam without tvmax": ({"lam": 0.1}, "--lam is 0.1 with --attention left out"),
    "what the source does not know": ({"vocabulary": Path("words")}, "--vocabulary is given"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str, theirs: Theirs, tmp_path: Path) -> None:
    changes, reason = REFUSED[case]
    changes = dict(changes)
    source = changes.pop("source", "fake")
    for name in ("labels", "config", "preprocessing"):
        if isinstance(changes.get(name), str):
            (tmp_path / name).write_text(changes[name])
            changes[name] = tmp_path / name
    with pytest.raises(SaccadeError, match=reason):
        theirs.convert(source, **changes)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_trunk_from_a_second_file(theirs: Theirs, tmp_path: Path) -> None:
    trunk = torch.load(theirs.file())["teacher"]
    head = {key: trunk.pop(key) for key in list(trunk) if "head" in key}
    # A classifier of the trunk's own is not read, whatever its shape.
    torch.save({"model": trunk | {"head.weight": torch.zeros(7, 7)}}, tmp_path / "trunk.pth")
    torch.save(head, tmp_path / "head.pth")
    report = theirs.convert(file=tmp_path / "head.pth", backbone=tmp_path / "trunk.pth")
    assert "trunk from trunk.pth" in report.to_text()
    x = torch.zeros(2, 8, 8, 1)
    assert torch.equal(load(theirs.out).build()(x), NAC(CONFIG).eval()(x))


def test_every_source_says_what_it_takes() -> None:
    for source in SOURCES.values():
        assert set(source.takes) <= set(OPTIONAL)
        module, _, name = source.module.partition(":")
        assert module == "fake.source" or hasattr(
            import_module(f"saccade.models.official.sources.{module}"), name or "convert"
        )


def test_a_file_of_another_source(theirs: Theirs, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(SaccadeError, match="not a file of this source"):
        theirs.convert(file=tmp_path / "other.pth")


def test_what_stands_at_out_is_kept(theirs: Theirs) -> None:
    theirs.out.write_text("mine")
    with pytest.raises(SaccadeError, match="--force"):
        theirs.convert()
    assert theirs.out.read_text() == "mine"
    theirs.convert(force=True)
    assert load(theirs.out).family == "nac"


def test_names_are_read_in_order(tmp_path: Path) -> None:
    wanted = ("no", "yes")
    for name, text in {
        "a.txt": "no\nyes\n",
        "a.json": '["no", "yes"]',
        "b.json": '{"yes": 1, "no": 0}',
        "c.json": '{"1": "yes", "0": "no"}',
    }.items():
        (tmp_path / name).write_text(text)
        assert driver.names_from(tmp_path / name, "--labels") == wanted
    (tmp_path / "d.json").write_text('{"yes": 2, "no": 0}')
    with pytest.raises(SaccadeError, match="numbers them from 0"):
        driver.names_from(tmp_path / "d.json", "--labels")
