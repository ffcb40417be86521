# SPDX-License-Identifier: Apache-2.0
"""The image, the compose file and KServe's resources, as far as they can be checked unbuilt."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dockerfiles import instructions
from places import ROOT

from saccade.serving.repository.installation import LIBRARIES, Requirements
from saccade.serving.repository.router_folder import router_code
from saccade.serving.server.serve import (
    IMAGE,
    ONNXRUNTIME_LIBRARY,
    container_arguments,
    print_command,
)

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install '.[dev]'")


DOCKER, KSERVE = ROOT / "docker", ROOT / "deploy" / "kserve"
ON_GPU = Requirements(gpu=True, runtimes=("tensorrt",), rate_limit=True)
# KServe has no schema here. These fields were read from the definitions of its release 0.20.
RUNTIME_FIELDS = {
    "annotations", "labels", "supportedModelFormats", "protocolVersions", "containers", "volumes",
    "nodeSelector", "tolerations", "affinity", "imagePullSecrets", "multiModel", "disabled",
}  # fmt: skip
PREDICTOR_FIELDS = {
    "minReplicas", "maxReplicas", "automountServiceAccountToken", "model", "scaleTarget",
    "scaleMetric", "nodeSelector", "tolerations", "serviceAccountName", "timeout",
}  # fmt: skip
MODEL_FIELDS = {"modelFormat", "protocolVersion", "runtime", "storageUri", "resources", "env"}


def test_every_stage_and_source_of_the_image_is_there():
    for path, context in (
        (DOCKER / "Dockerfile", ROOT),
        (DOCKER / "proxy/Dockerfile", DOCKER / "proxy"),
        (DOCKER / "bulk/Dockerfile", ROOT),
    ):
        stages: dict[str, str] = {}
        for word, rest in instructions(path):
            if word == "FROM":
                image, _, name = rest.partition(" AS ")
                assert re.search(r"\$\{\w+_(IMAGE|DIGEST)\}$", image) or image in stages
                stages[name] = image
            elif word == "COPY":
                *sources, _ = [word for word in rest.split() if not word.startswith("--")]
                origin = re.match(r"--from=(\S+)", rest)
                assert origin is None or origin[1] in stages
                assert origin or all((context / source).exists() for source in sources), rest
        users = [rest for word, rest in instructions(path) if word == "USER"]
        assert users[-1] == "1000:1000"
        # KubeRay brings the probes of its pods.
        asked = any(word == "HEALTHCHECK" for word, _ in instructions(path))
        assert asked or path.parent.name == "bulk"


def test_the_images_versions_and_places_are_those_of_the_printed_command():
    words = instructions(DOCKER / "Dockerfile")
    release = next(rest for word, rest in words if rest.startswith("RELEASE="))
    assert release == f"RELEASE={IMAGE.rpartition(':')[2]}"
    built = {rest.split()[-2].rpartition("/")[2] for word, rest in words if "--from=" in rest}
    targets = {rest.split()[-1] for word, rest in words if "--from=" in rest}
    assert targets == {f"{LIBRARIES}/"}
    assert built == {ONNXRUNTIME_LIBRARY, "libsaccade_tensorrt.so"}
    plugins = container_arguments(ON_GPU)[-2].rpartition("=")[2]
    assert Path(plugins) == LIBRARIES / "libsaccade_tensorrt.so"
    assert any(
        word == "ENV" and rest.startswith(f"LD_LIBRARY_PATH={LIBRARIES}$") for word, rest in words
    )


def test_the_router_imports_what_the_image_has():
    code = router_code("captioner")  # the family that brings a file of its own
    own = {name.removesuffix(".py") for name in code}
    imported, at_once = set(), set()
    for text in code.values():
        tree = ast.parse(text)
        at_once |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    assert imported - own - set(sys.stdlib_module_names) <= {
        *("numpy", "PIL", "triton_python_backend_utils"),
        # Where the environment names a receiver; done without if it is missing. The second one is
        # what its exporter sends with.
        *("opentelemetry", "requests"),
    }
    assert not [module for module in at_once if str(module).startswith("opentelemetry")]


def test_the_images_build_commands_are_understood(tmp_path):
    runs = [rest for word, rest in instructions(DOCKER / "Dockerfile") if word == "RUN"]
    (native,) = (run for run in runs if run.startswith("cmake "))
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    configure = native.partition("&&")[0]
    configure = configure.replace("/plugins", str(ROOT / "plugins")).replace(
        "/build", str(tmp_path / "build")
    )
    done = subprocess.run(shlex.split(configure), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (plugins,) = (run for run in runs if "tensorrt.mk" in run)
    make = plugins.partition("&& ")[2].replace("/plugins", str(ROOT / "plugins"))
    (tmp_path / "NvInferRuntime.h").touch()
    script = f'header={tmp_path}/NvInferRuntime.h; CUDA_ARCHITECTURES="75 89"; {make} NVCC=true'
    dry = f"{script} -n --always-make BUILD={tmp_path}/tensorrt"
    shown = subprocess.run(["sh", "-c", dry], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "libsaccade_tensorrt.so" in shown.stdout and "sm_89" in shown.stdout
    (tmp_path / "NvInferRuntime.h").unlink()
    wrong = subprocess.run(["sh", "-c", dry], capture_output=True)
    assert wrong.returncode != 0


READ = SimpleNamespace(runtime="onnxruntime")


def test_compose_says_what_the_printed_command_says(tmp_path, monkeypatch):
    monkeypatch.setattr("saccade.serving.server.serve.read_repository", lambda folder: READ)
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    server = services["saccade-server"]
    words = print_command(tmp_path, container=True)
    at = words.index(IMAGE)
    docker, inside = list(words[:at]), list(words[at + 1 :])
    assert server["image"] == IMAGE
    assert server["command"] == inside
    (volume,) = server["volumes"]
    said = {f"--user={server['user']}", *(f"--tmpfs={tmpf}" for tmpf in server["tmpfs"])}
    said |= {f"--cap-drop={capability}" for capability in server["cap_drop"]}
    said |= {f"--security-opt={option}" for option in server["security_opt"]}
    said |= {f"--publish={port}" for port in server["ports"]}
    said |= {
        f"--shm-size={server['shm_size']}",
        f"--stop-timeout={server['stop_grace_period'][:-1]}",
    }
    said |= {"--read-only"} if server["read_only"] else set()
    said |= {f"--pids-limit={server['pids_limit']}", "--pull=never"}
    said |= {f"--mount=type={volume['type']},source={tmp_path},target={volume['target']},readonly"}
    assert said == set(docker) - {"docker", "run", "--rm"}
    assert volume["read_only"] is True


def test_compose_with_a_gpu_adds_what_plans_need():
    over = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())["services"]["saccade-server"]
    assert over["command"] == ["tritonserver", *container_arguments(ON_GPU)]
    (device,) = over["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    stages = {
        rest.partition(" AS ")[2]
        for word, rest in instructions(DOCKER / "Dockerfile")
        if word == "FROM"
    }
    whole = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert {over["build"]["target"], whole["saccade-server"]["build"]["target"]} <= stages


def test_only_the_proxy_can_be_opened_and_its_places_fit():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert all(port.startswith("127.0.0.1:") for port in services["saccade-server"]["ports"])
    proxy = services["saccade-proxy"]
    assert proxy["ports"] == ["${SACCADE_LISTEN:-127.0.0.1}:8443:8443"]
    assert proxy["read_only"] is True and proxy["cap_drop"] == ["ALL"]
    assert "listen 8443 ssl" in (DOCKER / "proxy/place/server.conf").read_text()
    pod = yaml.safe_load((ROOT / "deploy/proxy/deployment.yaml").read_text())["spec"]["template"]
    assert proxy["stop_grace_period"] == f"{pod['spec']['terminationGracePeriodSeconds']}s"
    (entry,) = (
        rest for word, rest in instructions(DOCKER / "proxy/Dockerfile") if word == "ENTRYPOINT"
    )
    assert f'"-p", "{proxy["tmpfs"][0]}/"' in entry
    assert proxy["volumes"][0]["target"] == "/etc/saccade-proxy/tls"
    assert '"-c", "/etc/saccade-proxy/nginx.conf"' in entry


def faults(runtime: dict[str, Any], service: dict[str, Any]) -> list[str]:
    """Names in its two resources that KServe would not know or not find."""
    unknown = []
    predictor, spec = service["spec"]["predictor"], runtime["spec"]
    model = predictor["model"]
    for where, given, known in (
        ("runtime", spec, RUNTIME_FIELDS),
        ("predictor", predictor, PREDICTOR_FIELDS),
        ("model", model, MODEL_FIELDS),
    ):
        unknown += [f"{where} has {field}" for field in sorted(set(given) - known)]
    if (runtime["apiVersion"], runtime["kind"]) != ("serving.kserve.io/v1alpha1", "ServingRuntime"):
        unknown.append("kind of the runtime")
    kind = "serving.kserve.io/v1beta1", "InferenceService"
    if (service["apiVersion"], service["kind"]) != kind:
        unknown.append("kind of the service")
    if model["runtime"] != runtime["metadata"]["name"]:
        unknown.append("no such runtime")
    formats = {(each["name"], each["version"]) for each in spec["supportedModelFormats"]}
    if (model["modelFormat"]["name"], model["modelFormat"]["version"]) not in formats:
        unknown.append("no such format")
    if model["protocolVersion"] not in spec["protocolVersions"]:
        unknown.append("no such protocol")
    if [container["name"] for container in spec["containers"]] != ["kserve-container"]:
        unknown.append("the container's name")
    return unknown


def read_kserve() -> tuple[dict[str, Any], dict[str, Any]]:
    names = ("servingruntime.yaml", "inferenceservice.yaml")
    runtime, service = (yaml.safe_load((KSERVE / name).read_text()) for name in names)
    return runtime, service


def test_kserve_finds_what_it_needs():
    runtime, service = read_kserve()
    assert faults(runtime, service) == []
    service["spec"]["predictor"]["model"] |= {"runtime": "another", "storageUrl": "x"}
    runtime["spec"]["containers"][0]["name"] = "server"
    assert len(faults(runtime, service)) == 3


def test_kserves_container_is_the_deployments_elsewhere():
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    runtime, service = read_kserve()
    spec = runtime["spec"]
    (container,) = spec["containers"]
    inside = [
        each.replace("=/models", "=/mnt/models") for each in container_arguments(Requirements())
    ]
    assert container["args"] == ["tritonserver", *inside]
    pod = {"containers": [container], "volumes": spec["volumes"]}
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod}
    validator.validate(whole, validator.latest_version(), strict=True)
    uri = service["spec"]["predictor"]["model"]["storageUri"]
    claim = yaml.safe_load((ROOT / "deploy" / "models" / "claim.yaml").read_text())
    deployment = yaml.safe_load((ROOT / "deploy" / "base" / "deployment.yaml").read_text())
    mount = deployment["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]
    assert uri == f"pvc://{claim['metadata']['name']}/{mount['subPath']}"


def test_every_file_says_its_licence():
    files = [path for folder in ("docker", "deploy") for path in (ROOT / folder).rglob("*")]
    for path in filter(Path.is_file, files):
        text = path.read_text().removeprefix("#!/bin/sh\n")
        # JSON has no comments: there it is part of the description.
        first = text if path.suffix == ".json" else text.partition("\n")[0]
        assert "SPDX-License-Identifier: Apache-2.0" in first, path


def test_what_the_document_names_is_there():
    text = (ROOT / "docs" / "production.md").read_text()
    named = set(re.findall(r"(?<![\w/.])(?:docker|deploy|models|docs)/[\w./-]*\w", text))
    assert {"docker/compose.yaml", "deploy/overlays/cpu", "deploy/kserve"} <= named
    assert not [name for name in named if not (ROOT / name).exists()]
    applied = re.findall(r"^kubectl apply -k (\S+)$", text, re.MULTILINE)
    assert all((ROOT / folder / "kustomization.yaml").exists() for folder in applied)
    assert len(applied) == 6


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
