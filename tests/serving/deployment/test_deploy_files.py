# SPDX-License-Identifier: Apache-2.0
"""Manifests and chart, rendered by kubectl and helm, against Kubernetes' schemas and each other."""

import copy
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from places import ROOT, module_at
from rendered import charted, kustomized, pods

from saccade.serving.bulk.options import BulkOptions
from saccade.serving.repository.installation import Requirements
from saccade.serving.server.process import CLOSED
from saccade.serving.server.serve import (
    IMAGE,
    MODELS,
    SHARED_MEMORY_MIB,
    STOP_TIMEOUT_S,
    container_arguments,
)

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install '.[dev]'")
kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed"
)

DEPLOY = ROOT / "deploy"
FOLDERS = ("base", "overlays/cpu", "overlays/gpu", "proxy", "models")
BULK = {"ray": "workers", "ray-gpu": "gpu-workers"}
OTHERS = ("kserve", *BULK)  # with resources of kinds that Kubernetes does not define
OLDEST = "1.30"  # the first whose pods may sleep before they stop, without a program for it
ON_GPU = Requirements(gpu=True, runtimes=("tensorrt",), rate_limit=True)


def the_script(name: str) -> ModuleType:
    return module_at(DEPLOY / f"{name}.py")


@pytest.fixture(scope="module")
def rendered():
    return {name: kustomized(DEPLOY / name) for name in (*FOLDERS, *OTHERS)}


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


@pytest.mark.parametrize("folder", OTHERS)
def test_pods_of_other_kinds_fit_the_schema(rendered, folder):
    found = pods(rendered[folder])
    assert found
    for pod in found.values():
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


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
            if named := re.search(r"\S*saccade-(server|proxy|bulk):\S*", line):
                assert script.PINNED.fullmatch(named[0]), f"{path.name}: {line}"
    copied = Path(shutil.copytree(DEPLOY, tmp_path / "deploy"))
    monkeypatch.setattr(script, "DEPLOY", copied)
    images = [
        f"registry.example:5000/a/saccade-{name}:1.0@sha256:{digit * 64}"
        for name, digit in (("server", "a"), ("proxy", "b"), ("bulk", "d"))
    ]
    script.pin(images)
    assert not [path for path in copied.rglob("*.yaml") if "0" * 64 in path.read_text()]
    for folder in ("overlays/cpu", "overlays/gpu", "proxy"):
        (deployment,) = (
            resource
            for (kind, _), resource in kustomized(copied / folder).items()
            if kind == "Deployment"
        )
        assert container_of(deployment)["image"] in images
    assert yaml.safe_load((copied / "chart" / "values.yaml").read_text())["image"] == images[0]
    images[0] = images[0].replace("a" * 64, "c" * 64)
    script.pin(images)  # another version later
    assert "a" * 64 not in (copied / "overlays" / "cpu" / "deployment.yaml").read_text()
    for wrong in ("saccade-server:26.07", "nginx@sha256:" + "a" * 64, "saccade-server@sha256:0"):
        with pytest.raises(ValueError, match="as `docker push` prints it"):
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


@pytest.mark.parametrize("folder", ["overlays/cpu", "overlays/gpu", "proxy", "models", *OTHERS])
def test_pods_are_closed(rendered, folder):
    for name, found in pods(rendered[folder]).items():
        pod = found["spec"]
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"]:
            own = container["securityContext"]
            both = {**pod.get("securityContext", {}), **own}
            assert both["runAsNonRoot"] is True and both["runAsUser"] == 1000, name
            assert both["seccompProfile"] == {"type": "RuntimeDefault"}
            assert own["readOnlyRootFilesystem"] is True
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"] == {"drop": ["ALL"]}
            limits, asked = (container["resources"][kind] for kind in ("limits", "requests"))
            assert set(limits) >= {"cpu", "memory", "ephemeral-storage"} == set(asked)
            # What may be written counts: a pod over its limit is ended, not the node.
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            own_volumes = [each for each in pod["volumes"] if each["name"] in mounted]
            written = [each["emptyDir"] for each in own_volumes if "emptyDir" in each]
            scratch = sum(
                mebibytes(each["sizeLimit"]) for each in written if each.get("medium") != "Memory"
            )
            assert scratch <= mebibytes(asked["ephemeral-storage"])


def mebibytes(text: str) -> int:
    number, unit = int(text[:-2]), text[-2:]
    return number * {"Mi": 1, "Gi": 1024}[unit]


@pytest.mark.parametrize("folder", ["overlays/cpu", "overlays/gpu"])
def test_the_model_store_is_read_only_and_memory_is_shared(rendered, folder):
    pod = rendered[folder]["Deployment", "saccade-server"]["spec"]["template"]["spec"]
    mounts = {each["mountPath"]: each for each in pod["containers"][0]["volumeMounts"]}
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


@pytest.mark.parametrize("overlay, given", [("cpu", None), ("gpu", "values-gpu.yaml")])
def test_the_chart_is_the_overlay(rendered, overlay, given):
    chart = DEPLOY / "chart"
    values = yaml.safe_load((chart / given).read_text()) if given else {}
    resources, answer = charted(chart, values)
    assert resources == rendered[f"overlays/{overlay}"]
    icon = {"severity": 1, "path": "Chart.yaml", "error": "icon is recommended"}
    assert answer["lint"]["errors"] == [] and answer["lint"]["messages"] == [icon]


@pytest.mark.parametrize(
    "values",
    [
        {"alive": "/v2/health/live"},  # a name of the chart's first version
        {"image": "saccade-server:26.07"},
        {"router": "nac/ready"},
        {"extraArguments": ["rate-limit"]},
        {"minReplicas": 0},
        {"resources": {"limits": {"cpu": None}}},
    ],
    ids=lambda values: next(iter(values)),
)
def test_the_chart_refuses_what_it_does_not_know(values):
    resources, answer = charted(DEPLOY / "chart", values)
    assert not resources and next(iter(values)) in answer["refused"]


def test_every_value_of_the_chart_changes_something():
    chart = DEPLOY / "chart"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    schema = yaml.safe_load((chart / "values.schema.json").read_text())["properties"]
    assert set(schema) - {"global"} == set(values)
    templates = "".join(path.read_text() for path in (chart / "templates").glob("*.yaml"))
    assert set(re.findall(r"\.Values\.(\w+)", templates)) == set(values)


@pytest.mark.parametrize(("folder", "group"), BULK.items())
def test_the_bulk_job_stays_inside_and_has_a_token_where_it_scales(rendered, folder, group):
    resources = rendered[folder]
    found = pods(resources)
    assert set(found) == {f"saccade-bulk-{part}" for part in ("submitter", "head", group)}
    (policy,) = (each["spec"] for (kind, _), each in resources.items() if kind == "NetworkPolicy")
    labels = policy["podSelector"]["matchLabels"]
    assert policy["ingress"][0]["from"] == [{"podSelector": {"matchLabels": labels}}]
    for name, pod in found.items():
        assert labels.items() <= pod["metadata"]["labels"].items(), name
        tokens = [each["name"] for each in pod["spec"]["volumes"] if "projected" in each]
        holders = [
            container["name"]
            for container in pod["spec"]["containers"]
            if {mount["name"] for mount in container["volumeMounts"]} & set(tokens)
        ]
        assert holders == (["autoscaler"] if name.endswith("head") else [])
        account = pod["spec"].get("serviceAccountName")
        assert account is None if tokens else ("ServiceAccount", account) in resources


def bulk_options(entrypoint: str) -> BulkOptions:
    """Options of the job's command; what they do not take they refuse."""
    program, verb, artefact, *words = entrypoint.split()
    assert (program, verb, artefact) == ("saccade", "bulk", "/models/nac")
    pairs = zip(words[::2], words[1::2], strict=True)
    flags = {name.removeprefix("--"): value for name, value in pairs}
    engines = tuple(flags.pop("engines").split(",")) if "engines" in flags else ()
    return BulkOptions(**flags, engines=engines)


@pytest.mark.parametrize("folder", BULK)
def test_the_bulk_job_is_one_command_on_one_version_of_ray(rendered, folder):
    spec = rendered[folder]["RayJob", "saccade-bulk"]["spec"]
    options = bulk_options(spec["entrypoint"])
    assert (options.runner, options.address) == ("ray", "auto")
    cluster = spec["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert options.worker_range() == (group["minReplicas"], group["maxReplicas"])
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert spec["shutdownAfterJobFinishes"] and cluster["enableInTreeAutoscaling"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    built = (ROOT / "docker" / "bulk" / "Dockerfile").read_text()
    assert f"ARG RAY_VERSION={cluster['rayVersion']}\n" in built
    pinned = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned in ([], [cluster["rayVersion"]])


def test_workers_have_the_gpu_that_the_bulk_job_asks_for(rendered):
    for folder in BULK:
        spec = rendered[folder]["RayJob", "saccade-bulk"]["spec"]
        options = bulk_options(spec["entrypoint"])
        (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
        (container,) = group["template"]["spec"]["containers"]
        limit = container["resources"]["limits"].get("nvidia.com/gpu")
        assert limit == (1 if options.on_gpu else None), folder
        chosen = group["template"]["spec"].get("nodeSelector", {})
        numbers = [chosen.get(f"nvidia.com/gpu.compute.{part}") for part in ("major", "minor")]
        kinds = [name.rpartition("-")[2] for name in options.engines]
        assert kinds == ([".".join(numbers)] if options.on_gpu else []), folder


def test_nobody_reaches_the_pod_that_writes_to_the_store(rendered):
    (policy,) = (
        each["spec"] for (kind, _), each in rendered["models"].items() if kind == "NetworkPolicy"
    )
    pod = rendered["models"]["Pod", "saccade-copying"]
    assert policy["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert policy["ingress"] == policy["egress"] == []
    assert policy["policyTypes"] == ["Ingress", "Egress"]
