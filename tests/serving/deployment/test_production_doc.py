# SPDX-License-Identifier: Apache-2.0
"""Every command of docs/production.md, in order, as far as it goes without Docker and cluster."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from proxies import DOCUMENT, ROOT, nginx_or_skip
from rendered import kubectl_or_skip

from saccade.core.errors import SaccadeError
from saccade.exporter import export
from saccade.models.shipped import located
from saccade.serving.bench import bench
from saccade.serving.commands import cli

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install '.[dev]'")

ELSEWHERE = "its verb has tests of its own"


def lines() -> list[str]:
    """The commands of the document, those that go on in the next line joined."""
    blocks = re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@pytest.fixture
def clone(tmp_path, tiny_folder, monkeypatch):
    """A folder with what a clone has, and a small model where the shipped one is exported to."""
    for name in ("docker", "deploy", "src", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(tiny_folder, tmp_path / "build" / "nac")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_commands_of_saccade_are_accepted_and_run(
    needs_server, clone, tiny_repository, monkeypatch, capsys
):
    def stop(place, options):
        raise SaccadeError(f"{place}: {ELSEWHERE}")

    # Minutes each; what is looked at here is that these options are known.
    monkeypatch.setattr(export, "export", stop)
    monkeypatch.setattr(bench, "bench", stop)
    ours = [shlex.split(line) for line in lines() if line.startswith("saccade ")]
    ours = [words for words in ours if words[1] != "classify"]  # asked through the proxy's test
    assert len(ours) == 8
    for words in ours:
        code = cli.run(words[1:])
        seen = capsys.readouterr()
        if words[1] in ("export", "bench"):
            assert code == 2 and ELSEWHERE in seen.err and located(words[2]).exists(), words
        else:
            assert code == 0 and seen.out, (words, seen.err)
        if "--json" in words:
            assert "--publish=127.0.0.1:9001:8001" in json.loads(seen.out)["command"]


def shell(script: str, **environment: str) -> str:
    done = subprocess.run(
        ["bash", "-euc", script], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_compose_asks_for_is_made(clone):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, with which the certificate is made")
    begins = ("mkdir -p build/tls", "openssl ", "export ")
    script = "\n".join(line for line in lines() if line.startswith(begins))
    text = "".join(
        (ROOT / "docker" / name).read_text() for name in ("compose.yaml", "compose.gpu.yaml")
    )
    asked = sorted(set(re.findall(r"\$\{(\w+):\?(?!sh docker/pin)", text)))
    printed = shell(f"{script}\nprintf '%s\\n' " + " ".join(f'"${name}"' for name in asked))
    values = dict(zip(asked, printed.splitlines(), strict=True))
    assert values["SACCADE_REPOSITORY"] == str(clone / "build" / "repo")
    assert {path.name for path in Path(values["SACCADE_TLS"]).iterdir()} == {"tls.crt", "tls.key"}


def test_the_proxy_without_docker_has_what_it_needs(clone):
    nginx = nginx_or_skip()
    made = [line for line in lines() if line.startswith(("mkdir -p build/tls", "openssl "))]
    begins = ("cp -r ", "mkdir build/proxy/run", "sed -i ", "nginx ")
    laid = [line for line in lines() if line.startswith(begins)]
    assert len(laid) == 5 and laid[-1].startswith("nginx ")
    shell("\n".join(made + laid[:-1]))
    shell(laid[-1].replace("nginx", f"{shlex.quote(nginx)} -t", 1))


def test_the_cluster_finds_the_secrets_that_are_made(clone):
    program = kubectl_or_skip()
    (clone / "credentials").write_text("[default]\n")
    made = [line for line in lines() if line.startswith(("mkdir -p build/tls", "openssl "))]
    create = [line for line in lines() if line.startswith("kubectl create secret ")]
    ours = [line.replace("kubectl", shlex.quote(program), 1) for line in create]
    tried = [f"{line} --dry-run=client --output=yaml; echo ---" for line in ours]
    text = shell("\n".join(made + tried), KUBECONFIG="/dev/null")
    secrets = {
        resource["metadata"]["name"]: set(resource["data"])
        for resource in yaml.safe_load_all(text)
        if resource
    }
    proxy = (ROOT / "deploy/proxy/deployment.yaml").read_text()
    files = set(re.findall(r"tls/(\S+);", (ROOT / "docker/proxy/place/server.conf").read_text()))
    assert secrets.pop(re.search(r"secretName: (\S+)", proxy)[1]) == files
    job = (ROOT / "deploy/ray/rayjob.yaml").read_text()
    (named,) = re.findall(r"value: /etc/saccade-bulk/s3/(\S+)", job)
    assert secrets == {re.search(r"secretName: (\S+)", job)[1]: {named}}


def test_no_command_is_left_untried():
    # Docker's and the cluster's: their files are read by test_container_files, test_deploy_files.
    known = (
        "saccade ", "mkdir ", "openssl ", "export SACCADE_", "export GRPC_", "cp -r ", "sed -i ",
        "nginx ",
        "sh docker/pin.sh", "set -a", "python deploy/pin_images.py ", "docker push ", "docker tag ",
        "docker build --build-arg ", "docker compose -f docker/compose.yaml ",
        "kubectl create secret ", "kubectl apply -k deploy/", "kubectl cp build/repo ",
        "kubectl cp build/nac ", "helm install saccade-server deploy/chart",
        "kubectl wait --for=condition=Ready pod/saccade-copying",
        "kubectl delete pod saccade-copying",
    )  # fmt: skip
    assert [line for line in lines() if not line.startswith(known)] == []
