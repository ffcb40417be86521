# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: help, answers, exit codes, and the words for wrong input."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from quick_gate import quick_gate

from saccade.exporter.runtimes.runtime import RUNTIMES, engine_names
from saccade.serving.commands import cli
from saccade.serving.commands.command import Answer, Command
from saccade.serving.repository.runtimes.registry import served_names


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("repository", f"--runtime {{{','.join(served_names())}}}"),
        ("bench", f"--runtime {{{','.join(RUNTIMES)}}}"),
        ("build", f"--engine {{{','.join(engine_names())}}}"),
    ],
)
def test_help_shows_the_names_to_choose_from(saccade, command, shown):
    _, out, err = saccade(command, "--help")
    assert shown in out and not err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("exprt",), ("exprt",)),
        (("train", "resnet", "--out", "x"), ("resnet", "nac")),
        (("train", "nac", "--out", "x.safetensors", "--set", "width=3"), ("width", "dim")),
        (("train", "nac", "--data", "nothing", "--out", "x.safetensors"), ("nothing", "digits")),
        (("export", "missing.safetensors", "--out", "x"), ("missing.safetensors",)),
        (("verify", "missing"), ("missing",)),
        (("repository", "missing", "--out", "x"), ("missing",)),
        (("serve", "missing"), ("missing",)),
        (("classify", "--model", "nac"), ("No image",)),
        (("classify", "missing.png", "--model", "nac"), ("missing.png",)),
    ],
)
def test_wrong_input_is_explained(saccade, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = saccade(*arguments)
    assert code == 2
    assert "Traceback" not in out + err
    assert all(word in out + err for word in words)
    assert list(tmp_path.iterdir()) == []


def test_what_a_place_is_instead_is_said(saccade, tmp_path):
    repository, sweep, report = tmp_path / "repo", tmp_path / "sweep", tmp_path / "report"
    for folder, name in ((repository, "saccade"), (sweep, "sweep"), (report, "report")):
        folder.mkdir()
        (folder / f"{name}.json").write_text("{}")
    torch_file = tmp_path / "vit_b32.pt"
    torch_file.write_bytes(b"PK\x03\x04" + bytes(100))
    cases = (
        (("verify", repository), f"is a model repository, .*saccade preflight {repository}"),
        (("verify", sweep), f"is a sweep, expected an artefact folder. Pass {sweep / 'artefacts'}"),
        (("verify", report), "is a report"),
        (("plan", repository, "--rps", "1", "--slo-ms", "1"), "is a model repository"),
        (
            ("choose", torch_file, "--budget", "1"),
            "found a file of weights, expected an artefact folder",
        ),
        # What it is comes before its name, which has a letter that no model's name may have.
        (("export", torch_file, "--out", tmp_path / "o"), "zip archive.*saccade convert SOURCE"),
    )
    for arguments, words in cases:
        code, _, err = saccade(*arguments)
        assert code == 2 and re.search(words, err), err
        assert "cannot name a model" not in err


@pytest.mark.parametrize("budget", ["0", "-0.5", "1.5", "0.001", "nan", "half", "0.5,0.5"])
def test_impossible_budgets_leave_nothing(saccade, tiny_checkpoint, tmp_path, budget):
    out = tmp_path / "out"
    code, _, err = saccade(
        "export", "ops", tiny_checkpoint, "--out", out, "--name", "n", "--budget", budget
    )
    assert code == 2
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_unknown_precision(saccade, tiny_checkpoint, tmp_path):
    code, _, err = saccade("export", tiny_checkpoint, "--out", tmp_path / "o", "--precision", "fp8")
    assert code == 2
    assert "fp8" in err


def test_export_refuses_an_existing_folder_and_replaces_it_with_force(
    saccade, tiny_checkpoint, tmp_path, traced_before
):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("kept")
    call = ("export", tiny_checkpoint, "--out", out, "--name", "n", "--budget", "0.5")
    code, _, err = saccade(*call)
    assert code == 2
    assert "--force" in err
    assert (out / "precious").read_text() == "kept"
    with quick_gate():
        code, answer, _ = saccade(*call, "--force", "--json")
    assert code == 0
    assert json.loads(answer)
    assert (out / "n-b0500-fp32.onnx").exists()
    assert not (out / "precious").exists()


def test_verify_reports_and_fails_on_a_changed_artefact(saccade, tiny_folder, tmp_path):
    with quick_gate():
        code, answer, _ = saccade("verify", tiny_folder, "--json")
    assert code == 0
    assert json.loads(answer)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in tiny_folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    victim = sorted(copy.glob("*.onnx"))[0]
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 255
    victim.write_bytes(data)
    code, out, _ = saccade("verify", copy)
    assert code == 1
    assert victim.name in out


def test_interrupt_leaves_nothing(tmp_path):
    # In a process of its own, which the signal may end in any way. After the first step: nothing of
    # it depends on how fast the machine is.
    program = """
import signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
from saccade.__main__ import main
register_optimizer_step_post_hook(lambda *_: signal.raise_signal(signal.SIGINT))
sys.exit(main())
"""
    words = ("--data", "digits", "--steps", "99999", "--set", "modules=8", "dim=16")
    command = (sys.executable, "-X", "faulthandler", "-c", program, "train", "nac", *words)
    run = subprocess.run(
        [*command, "--out", tmp_path / "x.safetensors"], capture_output=True, text=True
    )
    assert run.returncode == 130, run.stderr
    assert run.stderr.endswith("saccade: interrupted.\n")
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_our_bug_keeps_its_trace(saccade, monkeypatch):
    def broken() -> Answer:
        """Fail."""
        raise ZeroDivisionError("ours")

    monkeypatch.setitem(cli.COMMANDS, "doctor", Command(broken, ""))
    code, _, err = saccade("doctor")
    assert code == 70
    assert "ZeroDivisionError" in err


def test_answer_is_json_alone(saccade):
    code, out, _ = saccade("doctor", "--json")
    assert code in (0, 1)
    json.loads(out)


def test_embed_refuses_before_calling(saccade, tmp_path):
    out = tmp_path / "embeddings.npz"
    np.savez(out, vectors=np.zeros((1, 2)))
    before = out.read_bytes()
    code, _, err = saccade("embed", "x.png", "--model", "nac", "--out", out)
    assert code == 2
    assert "--force" in err
    assert out.read_bytes() == before
