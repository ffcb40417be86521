# SPDX-License-Identifier: Apache-2.0
"""Helps, the overview, shell completion, and the words for a command line that cannot be read."""

import logging
import re
import shutil
import subprocess
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from saccade import __version__
from saccade.core.verbosity import is_quiet, level, note
from saccade.serving.commands import cli
from saccade.serving.commands.command import Answer, Command


def test_overview_lists_groups_and_fits_80_columns(saccade):
    code, out, err = saccade("--help")
    assert (code, err) == (0, "")
    for name, command in cli.COMMANDS.items():
        assert name in out and f"{command.group}:" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_command_is_a_function_and_a_line(saccade, monkeypatch):
    def own(fast: bool = False) -> Answer:
        """Do it.

        Examples:
            # now
            saccade own --fast
        """
        return Answer({"fast": fast})

    monkeypatch.setitem(cli.COMMANDS, "own", Command(own, "Own"))
    assert saccade("own", "--fast", "--json")[1] == '{\n "fast": true\n}\n'
    helps = [saccade(*words, "--help")[1] for words in ((), ("own",))]
    assert "Own:\n  own         Do it.\n" in helps[0] and "--fast" in helps[1]
    assert helps[1].endswith("examples:\n  # now\n  saccade own --fast\n")


def test_no_command_is_refused_with_the_overview(saccade):
    code, out, err = saccade()
    assert (code, out) == (2, "")
    assert "Export and verify:" in err


def test_version(saccade):
    assert saccade("--version") == (0, f"saccade {__version__}\n", "")


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_ends_with_examples(saccade, command):
    code, out, _ = saccade(command, "--help")
    assert code == 0 and "--json" in out
    tail = out.splitlines()[-5:]
    assert tail[0] == "examples:"
    assert [line[:4] for line in tail[1:]] == ["  # ", "  sa", "  # ", "  sa"]
    assert max(map(len, tail)) <= 80


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_names_no_none_and_shows_what_all_commands_have_last(saccade, command):
    _, out, _ = saccade(command, "--help")
    assert "None" not in out
    _, _, boxes = out.partition("show this help message")  # after the usage
    own, _, common = boxes.partition("common options")
    assert all(flag in common and flag not in own for flag in ("--json", "--quiet", "--verbose"))


GROUPED = {
    "train": ("data", "model", "training", "regularization", "machine"),
    "bench": ("data", "measurement", "runtime", "server"),
    "sweep": ("points", "data", "measurement", "runtime"),
    "serve": ("address", "API", "proxy", "supervision", "log"),
}


@pytest.mark.parametrize("command", GROUPED)
def test_a_long_help_has_headings(saccade, command):
    _, out, _ = saccade(command, "--help")
    lines = (
        re.fullmatch(r"\W+((?:\w+ )?(?:options|arguments)) \W+", one) for one in out.splitlines()
    )
    headings = [found[1] for found in lines if found]
    own = [f"{name} options" for name in GROUPED[command]]
    positional = ["positional arguments"] if "positional" in out else []
    assert headings == [*positional, "options", *own, "common options"]
    kinds = get_type_hints(cli.COMMANDS[command].verb).values()
    (options,) = (kind for kind in kinds if hasattr(kind, "groups"))
    named = " ".join(options.groups.values()).split()
    assert len(named) == len({*named}) and {*named} <= {one.name for one in fields(options)}


def test_a_heading_may_be_called_as_an_option(monkeypatch, saccade):
    seen = []
    monkeypatch.setattr("saccade.serving.bench.bench.bench", lambda *given: seen.append(given[1]))
    words = ("x", "--out", "y", "--no-server", "--model", "m", "--data", "d", "--rounds", "2")
    saccade("bench", *words, "--force")
    (options,) = seen
    assert (options.server, options.model, options.data, options.url) == (False, "m", "d", None)
    assert (options.rounds, options.force, options.concurrency) == (2, True, (1, 4, 16))


def options_that_are_on():
    for command, one in cli.COMMANDS.items():
        for kind in get_type_hints(one.verb).values():
            for field in fields(kind) if is_dataclass(kind) else ():
                if field.default is True:
                    yield command, f"--no-{field.name.replace('_', '-')}"


@pytest.mark.parametrize(("command", "flag"), [*options_that_are_on()])
def test_help_of_a_flag_that_turns_off_describes_it(saccade, command, flag):
    """Its comment has a text of its own for the flag, and no default stands behind it."""
    _, out, _ = saccade(command, "--help")
    shown = re.sub(r"[│\s]+", " ", out)
    words = shown.partition(f" {flag} ")[2].partition(" --")[0]
    assert words and "default" not in words
    assert flag not in words and ";" not in words, "the text of the option that is on"


# Command lines, and what the message has to contain beside the exit code 2.
REFUSED = {
    "command": (("exprt",), ("'exprt' is not a command", "Did you mean export?")),
    "flag first": (("--force", "export"), ("expected a command first",)),
    "option": (("export", "x", "--out", "y", "--bugdet", "1"), ("--bugdet", "mean --budget?")),
    "option, not the missing": (("export", "x", "--ot", "y"), ("--ot.", "Did you mean --out?")),
    "option before the file": (
        ("export", "--buget", "1", "x", "--out", "y"),
        ("--buget.", "Did you mean --budget?"),
    ),
    "negated": (("bench", "x", "--out", "y", "--no-serve"), ("mean --no-server?",)),
    "missing": (("export",), ("needs checkpoint", "--out PATH", "For example: saccade export")),
    "whole number": (
        ("bench", "x", "--out", "y", "--limit", "many"),
        ("--limit: found 'many', expected a whole number",),
    ),
    "number": (
        ("bench", "x", "--out", "y", "--seconds", "1s"),
        ("--seconds: found '1s', expected a number. ",),
    ),
    "percentage": (
        ("calibrate", "x", "--risk", "0.5%"),
        ("--risk: found '0.5%', expected a number: 0.5% is 0.005. For example",),
    ),
    "numbers": (
        ("bench", "x", "--out", "y", "--concurrency", "1,b"),
        ("--concurrency: found 'b', expected a whole number",),
    ),
    "choice": (
        ("bench", "x", "--out", "y", "--task", "topp1"),
        ("--task: found 'topp1'", "caption, hard-negatives", "Did you mean top1?"),
    ),
    "family": (("train", "nacc", "--out", "x"), ("family: found 'nacc'", "Did you mean nac?")),
    "architecture": (("models", "ViT"), ("Models with a vit trunk are of family sot or sparo.",)),
    "earlier flag": (
        ("plan", "x", "--rps", "1", "--slo-ms", "1", "--max-utilization", "2"),
        ("--max-utilization: found 2.0, expected above 0",),
    ),
    "no value": (("serve", "x", "--grpc-port"), ("--grpc-port: found no value, expected N",)),
    "too many": (("verify", "x", "y"), ("found 'y' after the last argument it takes",)),
    "several values": (
        ("export", "x", "--out", "y", "--budget", "1", "0.5"),
        ("found '0.5'", "Several values have commas between them: --budget 1,0.5."),
    ),
    "a name of other programs": (
        ("train", "nac", "--out", "x", "--lr", "1"),
        ("has no option --lr. Did you mean --learning-rate?",),
    ),
    "a port": (("serve", "x", "--port", "1"), ("Did you mean --grpc-port?",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_is_a_sentence_or_two(saccade, case):
    arguments, words = REFUSED[case]
    code, out, err = saccade(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("saccade: ") and err.count("\n") == 1, err
    assert not re.search("[╭│╰]|Traceback|no type matching", err)
    for word in words:
        assert word in err


def test_words_that_a_parser_of_another_release_does_not_give(saccade, monkeypatch):
    """Its hook is not promised: without it the parser refuses in its own words."""
    from tyro import _errors

    monkeypatch.delattr(_errors, "on_parse_error")
    code, _, err = saccade("export", "x", "--out", "y", "--bugdet", "1")
    assert code == 2
    assert "--bugdet" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("doctor",), (logging.INFO, False)),
        (("doctor", "-q"), (logging.WARNING, True)),
        (("-q", "doctor"), (logging.WARNING, True)),
        (("doctor", "--verbose"), (logging.DEBUG, False)),
    ],
)
def test_quiet_and_verbose(saccade, monkeypatch, words, expected):
    def seen() -> Answer:
        """Look."""
        note("a note")
        logging.getLogger("saccade.progress").debug("a small step")
        return Answer({}, f"{level()} {is_quiet()}")

    monkeypatch.setitem(cli.COMMANDS, "doctor", Command(seen, ""))
    code, out, err = saccade(*words)
    assert (code, out.split()) == (0, [*map(str, expected)])
    assert ("a note" in err) == (not expected[1])
    assert ("a small step" in err) == (expected[0] == logging.DEBUG)
    assert not logging.getLogger("saccade").handlers


def test_a_refusal_keeps_its_trace_when_asked(saccade):
    assert "Traceback" not in saccade("verify", "missing")[2]
    assert "Traceback" in saccade("verify", "missing", "-v")[2]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_completion_completes_commands_and_options(saccade, tmp_path):
    code, script, _ = saccade("completion", "bash")
    assert code == 0
    file = tmp_path / "completion.bash"
    file.write_text(script)

    def completed(*words):
        # As bash does it when the tabulator is pressed: the function that `complete` names.
        code = f"""
            source {file}
            function=$(complete -p saccade | sed 's/.*-F \\([^ ]*\\).*/\\1/')
            COMP_WORDS=(saccade "$@"); COMP_CWORD=$#
            COMP_LINE="${{COMP_WORDS[*]}}"; COMP_POINT=${{#COMP_LINE}}
            $function; printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "-c", code, "bash", *words], capture_output=True, text=True)
        return {word.strip() for word in done.stdout.splitlines()}

    assert completed("exp") == {"explore", "export"}
    assert "--budget" in completed("export", "--bu")
    assert "--budget" in completed("export", "model.safetensors", "--out", "folder", "--bu")


def test_a_command_ends_with_what_it_made_and_what_is_next(saccade, tiny_folder, tmp_path):
    """On standard error; not with -q, and not beside JSON."""
    out = tmp_path / "a repository"
    code, answer, notes = saccade("repository", tiny_folder, "--out", out)
    assert code == 0 and "Next" not in answer and "saccade serve" not in answer
    made, following = notes.splitlines()
    files = [path for path in out.rglob("*") if path.is_file()]
    assert made.startswith(f"{out}: model repository, {len(files)} files, ")
    assert re.search(r" [KM]iB, in [0-9.]+ s\.$", made)
    assert following == f"Next: saccade preflight '{out}'"
    for manner in ("-q", "--json"):
        assert saccade("repository", tiny_folder, "--out", out, "--force", manner)[2] == ""


def test_models_fits_80_columns(saccade):
    """Also where the output is not a terminal, and with the longest names."""
    _, out, _ = saccade("models", "slot-attention")
    assert max(map(len, out.splitlines())) <= 80
    assert "slot-attention-clevrtex-resnet" in out and "image [b 128" in out
    assert "budgets: t3, t2, t1 (rounds)" in out


def options(**values):
    return type("Options", (), values)()


NOT_PASSED = {"variants": [{"passed": False, "figures": {}}]}
# Of each verb what it is given and gives, and its next command.
CLOSINGS = {
    "train": ({"options": options(out=Path("b/x.safetensors"))}, None, "saccade export b/x.saf"),
    "export": (
        {"options": options(out=Path("b/x"))},
        options(manifests=(1, 2)),
        "saccade bench b/x --out b/x-report",
    ),
    "verify": (
        {"folder": Path("b/x"), "bisect": False},
        options(exit_code=1, artefacts=None, to_dict=lambda _: NOT_PASSED),
        "saccade export CHECKPOINT --out b/x --force",
    ),
    "verify a group": (
        {"folder": Path("b/x"), "bisect": False},
        options(
            exit_code=1,
            artefacts=options(variants=(options(in_group=True),)),
            to_dict=lambda _: NOT_PASSED,
        ),
        "saccade group FOLDER FOLDER --out b/x --force",
    ),
    "verify, if only a policy failed": (
        {"folder": Path("b/x"), "bisect": False},
        options(exit_code=1, to_dict=lambda _: {"variants": [{"passed": True, "figures": {}}]}),
        "",
    ),
    "bench": (
        {"folder": Path("b/x"), "options": options(out=Path("b/r"))},
        None,
        "saccade repository b/x --out b/x-repository",
    ),
    "bench --url": ({"folder": None, "options": options(out=Path("b/r"))}, None, ""),
    "sweep": (
        {"options": options(out=Path("b/s"))},
        options(exit_code=0),
        "saccade choose b/s --budget 0.5",
    ),
    "preflight": (
        {"repository": Path("r"), "options": options(server_version=None)},
        options(exit_code=0),
        "saccade serve r",
    ),
    "preflight --server-version": (
        {"repository": Path("r"), "options": options(server_version="26.07")},
        options(exit_code=0),
        "saccade serve r --print-command --container",
    ),
}


@pytest.mark.parametrize("command", CLOSINGS)
def test_next_command(command):
    given, result, following = CLOSINGS[command]
    closing = cli.COMMANDS[command.split()[0].rstrip(",")].closing(given, result)
    assert closing.next.startswith(following) and bool(closing.next) == bool(following)
    assert "--container" not in closing.next or "--container" in following
    assert closing.lines(200)[0].endswith("in 3 min 20 s.")
    last = closing.lines(200)[1:]
    assert (command == "export") == ("Then: saccade repository b/x --out b/x-repository" in last)


def test_what_writes_has_a_closing():
    """Every command with `--out`."""
    write = {
        command
        for command, one in cli.COMMANDS.items()
        for kind in get_type_hints(one.verb).values()
        if is_dataclass(kind) and "out" in {field.name for field in fields(kind)}
    }
    assert all(cli.COMMANDS[command].closing for command in {*write, "verify", "evaluate"})
