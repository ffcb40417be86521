# SPDX-License-Identifier: Apache-2.0
"""Advisories that nobody was asked about are no pass; licences and bills are of what is pinned."""

import hashlib
import importlib
import json
import re
import sys

import pytest
from places import ROOT

PINS = ["one==1.0", "Two_b==2.0"]
CLEAN = {"name": "one", "version": "1.0", "vulns": []}
KNOWN = {"name": "two-b", "version": "2.0", "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"]}]}
SKIPPED = {"name": "two-b", "version": "2.0", "skip_reason": "not found"}


@pytest.fixture
def script(monkeypatch):
    """Import one of the scripts, which find each other as they do when they are run."""
    monkeypatch.syspath_prepend(str(ROOT / "supply_chain"))
    for name in ("packages", "licences", "advisories", "sbom"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def answer(*dependencies):
    return {"dependencies": list(dependencies)}


@pytest.mark.parametrize(
    ("answers", "checked", "known", "words"),
    [
        ({"pypi": answer(CLEAN, KNOWN)}, 2, ["PYSEC-1"], "2 of 2 packages checked, 1 with known"),
        ({"pypi": "no route", "osv": answer(CLEAN, KNOWN)}, 2, ["PYSEC-1"], "pypi did not answer"),
        ({"pypi": answer(CLEAN, SKIPPED)}, 1, [], "NOT CHECKED: 1 of 2 .*: pypi: not"),
        ({"pypi": answer(CLEAN)}, 1, [], "NOT CHECKED: 1 of 2"),
        ({"pypi": "no route", "osv": "down"}, 0, [], "2 of 2 .*: pypi: no route; osv: down"),
    ],
)  # fmt: skip
def test_what_no_service_has_checked_is_said(script, answers, checked, known, words):
    module = script("advisories")
    audit = module.audit(answers, PINS, frozenset())
    assert len(audit.checked) == checked
    assert sorted(each for every in audit.known.values() for each in every) == known
    assert audit.exit_code == (1 if known else 0)
    text = module.render(audit)
    assert re.search(words, text)
    assert ("NOT CHECKED" in text) == (checked < len(PINS))
    assert checked or "0 with known" not in text


def test_an_advisory_is_accepted_by_any_of_its_names(script):
    module = script("advisories")
    assert not module.audit({"osv": answer(KNOWN)}, PINS, frozenset({"CVE-1"})).known


@pytest.mark.parametrize(
    ("shell", "strict", "code", "words"),
    [
        ("echo '{\"dependencies\": []}'", False, 0, "NOT CHECKED"),
        ("echo no network >&2; exit 1", False, 0, r"pip-audit exited with 1 \(no network\)"),
        ("echo no network >&2; exit 1", True, 1, "NOT CHECKED"),
        (f"echo '{json.dumps(answer(KNOWN))}'; exit 1", False, 1, "two-b==2.0: PYSEC-1"),
        (None, False, 0, "could not be started"),
    ],
)
def test_the_command_fails_for_what_is_known(script, tmp_path, capsys, shell, strict, code, words):
    program, constraints = tmp_path / "pip-audit", tmp_path / "constraints.txt"
    if shell is not None:
        program.write_text(f"#!/bin/sh\n{shell}\n")
        program.chmod(0o755)
    constraints.write_text("# pinned\ntwo-b==2.0\n")
    with pytest.raises(SystemExit) as ended:
        script("advisories").main(str(program), constraints, strict)
    seen = capsys.readouterr().out
    assert ended.value.code == code and re.search(words, seen), seen


def test_the_page_of_licences_is_of_what_is_pinned(script):
    packages, licences = script("packages"), script("licences")
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in (ROOT / "docs" / "licences.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    pinned = {name: (version, licence) for name, version, licence in rows if name != "package"}
    for name, version in packages.pinned().items():
        assert pinned[name][0] == version, "run: python supply_chain/licences.py"
        assert pinned[name][1] not in ("", "not said")
        if (packages.installed(name) or "").partition("+")[0] == version:
            assert pinned[name][1] == licences.licence_of(name).replace("|", "/")
    # What is needed through an extra is there as well.
    assert {"aiohttp", "typing-extensions"} <= set(pinned)


def test_the_bill_is_of_the_wheel_and_of_no_machine(script, tmp_path):
    component = {"bom-ref": "a==1", "name": "a", "type": "library"}
    place = {"type": "distribution", "url": "file:///somewhere"}
    own = {"bom-ref": "root", "name": "saccade-serving", "version": "0.1.0", "type": "library"}
    bill = {
        "metadata": {"component": own},
        "components": [component | {"externalReferences": [place]}, own | {"bom-ref": "saccade"}],
        "dependencies": [{"ref": "root", "dependsOn": ["a==1", "saccade"]}, {"ref": "saccade"}],
    }
    program, wheel = tmp_path / "cyclonedx-py", tmp_path / "saccade_serving-0.1.0-py3-none-any.whl"
    program.write_text(f"#!/bin/sh\necho '{json.dumps(bill)}'\n")
    program.chmod(0o755)
    wheel.write_bytes(b"wheel")
    script("sbom").main(wheel, str(program))
    content = json.loads((tmp_path / "saccade_serving-0.1.0-py3-none-any.cdx.json").read_bytes())
    (digest,) = content["metadata"]["component"]["hashes"]
    assert digest == {"alg": "SHA-256", "content": hashlib.sha256(b"wheel").hexdigest()}
    assert content["components"] == [component]
    assert content["dependencies"] == [{"ref": "root", "dependsOn": ["a==1"]}]
