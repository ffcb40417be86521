# SPDX-License-Identifier: Apache-2.0
"""The container is built on bytes that somebody chose, and has its share of the machine."""

import re
import subprocess

import pytest
from dockerfiles import instructions
from places import ROOT

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install '.[dev]'")

DOCKER = ROOT / "docker"


def test_images_are_built_on_bytes_that_somebody_chose():
    pinned, composed = set(), set()
    for place in ("Dockerfile", "proxy/Dockerfile", "bulk/Dockerfile"):
        path = DOCKER / place
        words = instructions(path)
        images = [rest.partition(" AS ")[0] for word, rest in words if word == "FROM"]
        said = [rest for word, rest in words if word == "ARG"]
        values = dict(each.split("=", 1) for each in said if "=" in each)
        digests = {each for each in said if each.endswith("_DIGEST")}
        stages = {rest.partition(" AS ")[2] for word, rest in words if word == "FROM"}
        for image in set(images) - stages:
            name = image.removeprefix("${").removesuffix("}")
            digest = re.search(r"@\$\{(\w+)\}$", values.get(name, image))
            # Without a default: nobody builds without having asked a registry.
            assert digest and digest[1] in digests, image
        pinned |= digests
        composed |= digests if place != "bulk/Dockerfile" else set()
    script = (DOCKER / "pin.sh").read_text()
    assert set(re.findall(r"^digest (\w+) ", script, re.MULTILINE)) == pinned
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"].values()
    given = {
        name: value for service in services for name, value in service["build"]["args"].items()
    }
    assert given == {name: f"${{{name}:?sh docker/pin.sh}}" for name in composed}
    assert all(service["pull_policy"] == "build" for service in services)


def test_the_script_of_the_digests_takes_no_other_answer(tmp_path):
    docker = tmp_path / "docker"
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    def run(answer: str) -> subprocess.CompletedProcess[str]:
        docker.write_text(f"#!/bin/sh\necho '{answer}'\n")
        docker.chmod(0o755)
        command = ["sh", DOCKER / "pin.sh"]
        return subprocess.run(command, env=path, capture_output=True, text=True)

    answer = run("sha256:" + "a" * 64)
    assert answer.returncode == 0 and answer.stdout.count("_DIGEST=sha256:aaaa") == 4
    wrong = run("MANIFEST UNKNOWN")
    assert wrong.returncode == 2 and "the registry said 'MANIFEST UNKNOWN'" in wrong.stderr


def test_pip_takes_what_has_the_hash_alone():
    (line,) = (
        rest for word, rest in instructions(DOCKER / "Dockerfile") if rest.startswith("pip3 ")
    )
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} < set(line.split())
    text = (DOCKER / "requirements.txt").read_text().replace("\\\n", "")
    wanted = [splitline.split() for splitline in text.splitlines() if not splitline.startswith("#")]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert wanted and {name for name, *_ in wanted} <= set(pinned)
    for _, *hashes in wanted:
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes)
    kept = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert "!docker/requirements.txt" in kept
    (script,) = re.findall(r"^ *echo (\S+) \| uv", (DOCKER / "pin_packages.sh").read_text(), re.M)
    assert [name.partition("==")[0] for name, *_ in wanted] == [script]


def test_a_container_has_its_share_and_no_more():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    gpu = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())["services"]
    for name, service in services.items():
        over = {**service, **gpu.get(name, {})}
        for each in (service, over):
            # Without the second, as much swap again may be used.
            assert each["mem_limit"] == each["memswap_limit"], name
            assert each["pids_limit"] > 0 and each["cpus"] > 0, name
    assert not [name for name, service in services.items() if "environment" in service]
    assert "ADMIN_KEY" not in (DOCKER / "compose.yaml").read_text()
