# SPDX-License-Identifier: Apache-2.0
"""Recipe files: every option as a key, flags win, what was written is read back, wrong keys."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from saccade.core.errors import MissingPackage, SaccadeError
from saccade.models.training import train as training
from saccade.models.training.options import TrainOptions
from saccade.models.training.recipe_file import read_recipe, recipe_example, recipe_text
from saccade.serving.commands import cli, models
from saccade.serving.commands.models import recipe_defaults

FULL = TrainOptions(
    Path("a b.safetensors"), data='my "data"', labels=Path("l.txt"), data_root=Path("root"),
    skip_bad=2, background=(0, 255), recipe="shipped",
    set={"dim": 64, "mean": [0.5, 1], "graph_prior": "none"}, steps=3, batch=4,
    learning_rate=1e-05, shots=5, weight_decay=0.1, augment=("crop=0.35", "flip"), mixup=0.8,
    cutmix=1.0, label_smoothing=0.1, drop_path=0.05, layer_decay=0.75, precision="bf16", side_px=64,
    init=Path("shipped:digits-sum"),
    trunk=Path("t"), freeze=("trunk", "head.a"), seed=7,
    threads=2, device="cuda", processes=2, accumulate=2, checkpoint_activations=True,
    log_to=("wandb",), resume=True, force=True,
)  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, TrainOptions]]:
    """Families and options that reach training, which is not done."""
    calls: list[tuple[str, TrainOptions]] = []

    def train(family: str, options: TrainOptions) -> None:
        calls.append((family, options))
        raise SaccadeError("enough")

    monkeypatch.setattr(training, "train", train)
    return calls


@pytest.mark.parametrize("write", [recipe_text, recipe_example])
def test_what_is_written_is_read_back(write: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    arguments = ("nac", FULL, {}) if write is recipe_text else ("nac", FULL)
    path.write_text(write(*arguments))
    family, values = read_recipe(path)
    read = TrainOptions(**values)
    once = {} if write is recipe_example else {"resume": False, "force": False}
    assert (family, read) == ("nac", replace(FULL, **once))
    # No option is forgotten in this test.
    default = TrainOptions(Path())
    assert not [f.name for f in fields(FULL) if getattr(FULL, f.name) == getattr(default, f.name)]
    # TOML has no null, so the words of the command line take its place.
    path.write_text(recipe_text("nac", replace(FULL, set={"a": None, "b": [1]}), {"steps": 9}))
    values = read_recipe(path)[1]
    assert (values["set"], values["steps"]) == ({"a": None, "b": [1]}, 9)


def test_the_example_has_every_option_with_its_help() -> None:
    text = recipe_example("sot", TrainOptions(Path("x.safetensors")))
    assert all(f"{f.name} = " in text or f"[{f.name}]" in text for f in fields(TrainOptions))
    assert "# number of optimizer steps; default: the recipe's\n# steps = ..." in text
    assert 'family = "sot"' in text and 'recipe = "quick"' in text


def test_flags_win_over_the_file_and_set_is_merged(tmp_path: Path, asked: Any, capsys: Any) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        "family: nac\nlearning-rate: 1e-3\nsteps: 9\nforce: true\nset: {dim: 8, heads: 2}\n"
        "freeze: [trunk]\nout: from_file.safetensors\n"
    )
    given = ["train", "--recipe_file", str(path), "--steps", "4", "--set", "dim=16", "--resume"]
    assert cli.run(given) == 2 and "enough" in capsys.readouterr().err
    ((family, options),) = asked
    assert (family, options.steps, options.learning_rate) == ("nac", 4, 1e-3)
    assert options.set == {"dim": 16, "heads": 2}
    assert options.freeze == ("trunk",) and options.force and options.resume
    assert options.out == Path("from_file.safetensors")
    cli.run(["train", "nac", f"--recipe-file={path}", "--out", "b.safetensors", "--freeze", "a,b"])
    assert (asked[1][1].out, asked[1][1].freeze) == (Path("b.safetensors"), ("a", "b"))
    assert asked[1][1].steps == 9 and not asked[1][1].resume


def test_a_printed_recipe_is_accepted(tmp_path: Path, asked: Any, capsys: Any) -> None:
    assert cli.run(["train", "sot", "--print-recipe", "--set", "dim=16", "--shots", "2"]) == 0
    printed = capsys.readouterr()
    assert not asked and not printed.err
    (tmp_path / "r.toml").write_text(printed.out)
    cli.run(["train", "--recipe-file", str(tmp_path / "r.toml")])
    ((family, options),) = asked
    expected = TrainOptions(Path("build/sot.safetensors"), set={"dim": 16}, shots=2)
    assert (family, options) == ("sot", expected)


WRONG = {
    "another key": (
        "r.toml",
        "lerning_rate = 1",
        "option is 'lerning_rate'.*Did you mean learning_rate",
    ),
    "a text": ("r.toml", 'steps = "many"', "steps: found 'many', expected a whole number"),
    "a fraction": ("r.toml", "steps = 1.5", "steps: found 1.5, expected a whole number"),
    "no choice": ("r.toml", 'recipe = "quik"', "recipe: found 'quik', expected one of quick, sh"),
    "a date": ("r.toml", "set = {a = 2020-01-01}", "set: found .* texts, numbers, true or false"),
    "no list": ("r.toml", 'freeze = "trunk"', "freeze: found 'trunk', expected a list"),
    "twice": ("r.toml", "skip_bad = 1\nskip-bad = 1", "gives skip_bad twice"),
    "another family": ("r.toml", 'family = "nacs"', "family is 'nacs'.*Did you mean nac"),
    "no TOML": ("r.toml", "steps = ", "cannot be read as TOML"),
    "deep": ("r.toml", "set = {a = " + "[" * 5000 + "]" * 5000 + "}", "cannot be read as TOML"),
    "no YAML": ("r.yaml", "a: [", "cannot be read as YAML"),
    "a list": ("r.yml", "- a", "found list, expected options by name"),
    "an alias": ("r.yaml", "freeze: &a [b]\nset: {c: *a}", "an alias in line 2"),
    "YAML twice": ("r.yaml", "set: {a: 1, a: 2}", "a key twice in the mapping of line 1"),
    "a tag": ("r.yaml", "data: !!python/name:os.system", "cannot be read as YAML"),
    "another ending": ("r.json", "{}", r"ends in \.toml, \.yaml or \.yml"),
    "no text": ("r.toml", b"\xff", "cannot be read as TOML"),
    "too large": ("r.toml", "#" * (2**16 + 1), "expected at most 65536"),
    "a key of keys": ("r.toml", "a" + ".a" * 32_000 + " = 1", "a line with more than 500 dots"),
    "YAML minutes": ("r.yaml", "steps: 1" + ":59" * 20_000, "steps: found '1:59:59.*whole number"),
    "YAML seconds": ("r.yaml", "learning_rate: 1" + ":59" * 20_000 + ".5", "found '1:59.* finite"),
    "digits": ("r.toml", "steps = 0x" + "f" * 60_000, r"TOML \(Exceeds the limit"),
    "YAML digits": ("r.yaml", "steps: 0b" + "1" * 60_000, r"YAML \(Exceeds the limit"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refuses(case: str, tmp_path: Path) -> None:
    name, text, words = WRONG[case]
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SaccadeError, match=words) as refused:
        read_recipe(path)
    assert str(refused.value).startswith(str(path)) and len(str(refused.value)) < 800


def test_a_missing_file_and_family_are_named(tmp_path: Path, asked: Any, capsys: Any) -> None:
    cli.run(["train", "nac", "--recipe-file", str(tmp_path / "r.toml")])
    assert "no such file. Write one with: saccade train FAMILY --print-r" in capsys.readouterr().err
    (tmp_path / "r.toml").write_text('family = "nac"\n')
    cli.run(["train", "--recipe-file", str(tmp_path / "r.toml")])
    assert "saccade train needs --out PATH" in capsys.readouterr().err
    cli.run(["train", "sot", "--recipe-file", str(tmp_path / "r.toml"), "--out", "x.safetensors"])
    assert "family is nac, but the command line has sot" in capsys.readouterr().err
    assert not asked and recipe_defaults(["train", "nac", "--recipe-file", "--out"]) == {}


def test_yaml_without_its_parser_names_the_extra(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "r.yaml").write_text("steps: 1\n")
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(MissingPackage, match=r"\S+\[yaml\]"):
        read_recipe(tmp_path / "r.yaml")
    assert models.recipe_defaults(["train", "nac", "--steps", "1"]) == {}
