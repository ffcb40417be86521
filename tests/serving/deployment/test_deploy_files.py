# SPDX-License-Identifier: Apache-2.0
"""Manifests against the Kubernetes schemas, the printed command, and each other; no cluster."""

import copy
import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from places import ROOT

from saccade.serving.repository.requirements import Requirements
from saccade.serving.server.print_command import (
    IMAGE,
    MODELS,
    SHARED_MEMORY_MIB,
    STOP_TIMEOUT_S,
    container_arguments,
)
from saccade.serving.server.process import CLOSED

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'saccade[dev]'")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed"
)

DEPLOY = ROOT / "deploy"
FOLDERS = ("base", "overlays/cpu", "overlays/gpu", "proxy", "models")
OLDEST = "1.30"  # the first whose pods may sleep before they stop, without a program for it
ON_GPU = Requirements(gpu=True, runtimes=("tensorrt",), rate_limit=True)


def the_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DEPLOY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_chart = the_script("make_chart")
render = make_chart.render


@pytest.fixture(scope="module")
def rendered():
    return {name: render(DEPLOY / name) for name in (*FOLDERS, "kserve")}


def container_of(deployment: dict[str, Any]) -> dict[str, Any]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_resource_fits_its_schema(rendered, folder, version):
    for resource in rendered[folder].values():
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize(
    "way, key",
    [
        (("spec", "template", "spec"), "automountServiceAccountTokn"),
        (("spec", "template", "spec", "securityContext"), "runAsNonRot"),
        (("spec", "strategy"), "rollingUpdates"),
    ],
)
def test_the_validator_can_fail(rendered, way, key):
    resource = copy.deepcopy(rendered["overlays/cpu"]["Deployment", "saccade-server"])
    place = resource
    for part in way:
        place = place[part]
    place[key] = True
    with pytest.raises(kubernetes_validate.ValidationError, match=key):
        kubernetes_validate.validate(resource, OLDEST, strict=True)


@pytest.mark.parametrize("folder", [*FOLDERS, "kserve"])
def test_kustomize_renders_the_same(rendered, folder):
    if program := shutil.which("kustomize"):
        command = [program, "build"]
    elif program := shutil.which("kubectl"):
        command = [program, "kustomize"]
    else:
        pytest.skip("neither kustomize nor kubectl is installed")
    done = subprocess.run(
        [*command, DEPLOY / folder], capture_output=True, text=True, env={"KUBECONFIG": "/dev/null"}
    )
    assert done.returncode == 0, done.stderr
    theirs = {
        (resource["kind"], resource["metadata"]["name"]): resource
        for resource in yaml.safe_load_all(done.stdout)
    }
    assert theirs == rendered[folder]


@pytest.mark.parametrize(
    "folder, requirements",
    [("base", Requirements()), ("overlays/cpu", Requirements()), ("overlays/gpu", ON_GPU)],
)
def test_arguments_are_those_that_are_printed(rendered, folder, requirements):
    container = container_of(rendered[folder]["Deployment", "saccade-server"])
    assert container["args"] == ["tritonserver", *container_arguments(requirements)]
    assert container["image"].partition("@")[0] == IMAGE
    # Arguments can be read by whoever sees the process: there is no key, in them or beside them.
    restricted = [argument for argument in container["args"] if "-restricted-" in argument]
    assert len(restricted) == 2 and all(protocol.endswith(f":{CLOSED}") for protocol in restricted)
    assert "env" not in container


def test_images_are_named_by_their_digest(tmp_path, monkeypatch):
    script = the_script("pin_images")
    for path in DEPLOY.rglob("*.yaml"):
        for line in path.read_text().splitlines():
            if named := re.search(r"\S*saccade-(server|proxy):\S*", line):
                assert script.PINNED.fullmatch(named[0]), f"{path.name}: {line}"
    copied = Path(shutil.copytree(DEPLOY, tmp_path / "deploy"))
    monkeypatch.setattr(script, "DEPLOY", copied)
    images = [
        f"registry.example:5000/a/saccade-{name}:1.0@sha256:{digit * 64}"
        for name, digit in (("server", "a"), ("proxy", "b"))
    ]
    script.pin(images)
    assert not [path for path in copied.rglob("*.yaml") if "0" * 64 in path.read_text()]
    for folder in ("overlays/cpu", "overlays/gpu", "proxy"):
        (deployment,) = (
            resource
            for (kind, _), resource in render(copied / folder).items()
            if kind == "Deployment"
        )
        assert container_of(deployment)["image"] in images
    assert yaml.safe_load((copied / "chart" / "values.yaml").read_text())["image"] == images[0]
    images[0] = images[0].replace("a" * 64, "c" * 64)
    script.pin(images)  # another version later
    assert "a" * 64 not in (copied / "overlays" / "cpu" / "deployment.yaml").read_text()
    for wrong in ("saccade-server:26.07", "nginx@sha256:" + "a" * 64, "saccade-server@sha256:0"):
        with pytest.raises(ValueError, match="as `docker push` says it"):
            script.pin([wrong])


def test_a_pod_stops_after_what_is_in_flight(rendered):
    pod = rendered["base"]["Deployment", "saccade-server"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    (exit_s,) = (
        int(argument.partition("=")[2])
        for argument in container["args"]
        if argument.startswith("--exit-timeout-secs=")
    )
    sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= sleep_s + exit_s + 5
    assert pod["terminationGracePeriodSeconds"] == STOP_TIMEOUT_S


@pytest.mark.parametrize("folder", ["overlays/cpu", "overlays/gpu", "proxy", "models"])
def test_pods_are_closed(rendered, folder):
    for (kind, name), resource in rendered[folder].items():
        if kind not in ("Deployment", "Pod"):
            continue
        pod = resource["spec"]["template"]["spec"] if kind == "Deployment" else resource["spec"]
        assert pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] is True
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            limits, asked = (container["resources"][kind] for kind in ("limits", "requests"))
            assert set(limits) >= {"cpu", "memory", "ephemeral-storage"} == set(asked)
            # What may be written counts: a pod over its limit is ended, not the node.
            written = [volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume]
            scratch = sum(
                int(each["sizeLimit"][:-2]) for each in written if each.get("medium") != "Memory"
            )
            assert scratch <= int(asked["ephemeral-storage"][:-2])


@pytest.mark.parametrize("folder", ["overlays/cpu", "overlays/gpu"])
def test_the_model_store_is_read_only_and_memory_is_shared(rendered, folder):
    pod = rendered[folder]["Deployment", "saccade-server"]["spec"]["template"]["spec"]
    mounts = {
        volumemount["mountPath"]: volumemount
        for volumemount in pod["containers"][0]["volumeMounts"]
    }
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    models = mounts[str(MODELS)]
    claim = volumes[models["name"]]["persistentVolumeClaim"]
    assert models["readOnly"] is True and claim["readOnly"] is True
    # A whole file system may hold a lost+found, which the server takes for a model and fails.
    copied = f"kubectl cp build/{models['subPath']} saccade-copying:{MODELS}\n"
    assert copied in (DEPLOY.parent / "docs" / "production.md").read_text()
    assert copied in (DEPLOY / "models" / "copying.yaml").read_text()
    assert ("PersistentVolumeClaim", claim["claimName"]) in rendered["models"]
    shared = volumes[mounts["/dev/shm"]["name"]]["emptyDir"]
    assert shared == {"medium": "Memory", "sizeLimit": f"{SHARED_MEMORY_MIB}Mi"}
    assert {mount["name"] for mount in mounts.values()} == set(volumes)


@pytest.mark.parametrize(
    "folder, name", [("overlays/cpu", "saccade-server"), ("proxy", "saccade-proxy")]
)
def test_resources_mean_each_other(rendered, folder, name):
    resources = rendered[folder]
    deployment = resources["Deployment", name]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    container = container_of(deployment)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert deployment["spec"]["selector"]["matchLabels"] == labels
    for spread in deployment["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
        assert spread["labelSelector"]["matchLabels"] == labels
    service = resources["Service", name]["spec"]
    assert service["selector"] == labels
    assert {port["targetPort"] for port in service["ports"]} <= set(ports)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container.get(probe, {}).get("httpGet") or container.get(probe, {}).get("tcpSocket")
        assert asked is None or asked["port"] in ports
    assert resources["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"] == labels
    policy = resources["NetworkPolicy", name]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    opened = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert opened == set(ports.values())
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}


def test_the_server_asks_nobody_and_is_asked_by_the_proxy(rendered):
    server = rendered["base"]["NetworkPolicy", "saccade-server"]["spec"]
    proxy = rendered["proxy"]["Deployment", "saccade-proxy"]["spec"]["template"]["metadata"]
    assert server["egress"] == []
    assert {"podSelector": {"matchLabels": proxy["labels"]}} in server["ingress"][0]["from"]
    out = rendered["proxy"]["NetworkPolicy", "saccade-proxy"]["spec"]["egress"][0]
    assert out["to"] == [{"podSelector": server["podSelector"]}]
    assert {port["port"] for port in out["ports"]} == {8000, 8001}
    upstreams = (DEPLOY.parent / "docker" / "proxy" / "place" / "http.conf").read_text()
    service = rendered["base"]["Service", "saccade-server"]
    for port in service["spec"]["ports"]:
        assert f"server {service['metadata']['name']}:{port['port']};" in upstreams


@pytest.mark.parametrize("folder", ["base", "overlays/cpu", "overlays/gpu"])
def test_probes_and_scaling(rendered, folder):
    container = container_of(rendered[folder]["Deployment", "saccade-server"])
    assert container["startupProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    expected = "/v2/health/live" if folder == "base" else "/v2/models/nac/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == expected
    scaler = rendered[folder]["HorizontalPodAutoscaler", "saccade-server"]["spec"]
    target = scaler["scaleTargetRef"]
    assert (target["kind"], target["name"]) in rendered[folder]
    assert "replicas" not in rendered[folder]["Deployment", "saccade-server"]["spec"]
    waiting, busy = scaler["metrics"]
    adapter = yaml.safe_load((DEPLOY / "prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    assert waiting["pods"]["metric"]["name"] == rule["name"]["as"]
    assert rule["seriesQuery"].startswith("saccade_waiting_seconds_sum{")
    # A share of the CPUs is a share of what was asked for.
    assert busy["resource"]["name"] == "cpu"
    assert folder == "base" or "cpu" in container["resources"]["requests"]
    assert (container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu") == 1) == (
        folder == "overlays/gpu"
    )


def test_the_chart_is_what_the_script_writes():
    written = {
        path.relative_to(DEPLOY / "chart").as_posix(): path.read_text()
        for path in (DEPLOY / "chart").rglob("*")
        if path.is_file()
    }
    assert written == make_chart.chart_files(), "run: python deploy/make_chart.py"


@pytest.mark.parametrize("overlay, values", [("cpu", "values.yaml"), ("gpu", "values-gpu.yaml")])
def test_the_chart_with_its_values_is_the_overlay(rendered, overlay, values):
    given = yaml.safe_load((DEPLOY / "chart" / values).read_text())
    used = set()

    def put_in(match: re.Match[str]) -> str:
        used.add(match[1])
        return json.dumps(given[match[1]])

    differing = {}
    for path in (DEPLOY / "chart" / "templates").glob("*.yaml"):
        text = re.sub(r"{{ \.Values\.(\w+) \| toJson }}", put_in, path.read_text())
        assert "{{" not in text
        resource = yaml.safe_load(text)
        differing[resource["kind"], resource["metadata"]["name"]] = resource
    pod = differing["Deployment", "saccade-server"]["spec"]["template"]["spec"]
    for name in make_chart.ABSENT:
        if not pod[name]:
            del pod[name]
    assert differing == rendered[f"overlays/{overlay}"]
    assert used == set(given)
