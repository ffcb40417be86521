# SPDX-License-Identifier: Apache-2.0
"""Render the resources of the manifests and the chart with kubectl and helm."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed: pip install '.[dev]'")

Resources = dict[tuple[str, str], dict[str, Any]]
_MISSING = "{} is not installed: pip install '.[dev]'"
# In a separate process, because the library contains the runtime of another language.
_HELM = """
import json, sys
import helm_python as helm
chart, values = sys.argv[1], json.loads(sys.argv[2])
try:
    with helm.Chart.load(chart) as loaded:
        answer = {"files": loaded.render(values, name="saccade", namespace="default")}
except helm.HelmError as error:
    answer = {"refused": str(error)}
answer["lint"] = helm.lint(chart, values, strict=True, kube_version="v1.30.0")
print(json.dumps(answer))
"""


def kubectl_or_skip() -> str:
    """Return the kubectl of this environment or machine, or skip the test."""
    own = shutil.which("kubectl", path=str(Path(sys.executable).parent))
    if (program := own or shutil.which("kubectl")) is None:
        pytest.skip(_MISSING.format("kubectl"))
    return program


def kustomized(folder: Path) -> Resources:
    """Return the resources that `kubectl apply -k` would send to a cluster."""
    done = subprocess.run(
        [kubectl_or_skip(), "kustomize", folder],
        capture_output=True,
        text=True,
        env={**os.environ, "KUBECONFIG": os.devnull},
    )
    assert done.returncode == 0, done.stderr
    return _resources([done.stdout])


def charted(chart: Path, values: dict[str, Any]) -> tuple[Resources, dict[str, Any]]:
    """Return the resources of the chart with these values, and helm's answer.

    The answer has `lint`, and `refused` if the resources could not be rendered.
    """
    done = subprocess.run(
        [sys.executable, "-c", _HELM, chart, json.dumps(values)], capture_output=True, text=True
    )
    if "No module named 'helm_python'" in done.stderr:
        pytest.skip(_MISSING.format("helm-python-sdk"))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    return _resources(answer.get("files", {}).values()), answer


def _resources(texts: Any) -> Resources:
    resources: Resources = {}
    for text in texts:
        for resource in yaml.safe_load_all(text):
            key = resource["kind"], resource["metadata"]["name"]
            assert key not in resources, f"{key} is there twice"
            resources[key] = resource
    return resources


def pods(resources: Resources) -> dict[str, dict[str, Any]]:
    """Return every pod of the resources as a Pod, including those of custom resources."""
    found: dict[str, dict[str, Any]] = {}
    for (kind, name), resource in resources.items():
        if kind == "Pod":
            found[name] = resource
        elif kind == "Deployment":
            found[name] = _pod(name, resource["spec"]["template"])
        elif kind == "ServingRuntime":
            containers = {key: resource["spec"][key] for key in ("containers", "volumes")}
            # The InferenceService says it for both.
            asked = {"automountServiceAccountToken": False, **containers}
            found[name] = _pod(name, {"spec": asked})
        elif kind == "RayJob":
            found |= _ray_pods(name, resource["spec"])
    return found


def _ray_pods(name: str, spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cluster, options = spec["rayClusterSpec"], spec["rayClusterSpec"]["autoscalerOptions"]
    head = cluster["headGroupSpec"]["template"]
    (container,) = head["spec"]["containers"]
    # KubeRay puts it beside the head.
    scaler = {
        "name": "autoscaler",
        "image": container["image"],
        **{key: options[key] for key in ("resources", "securityContext", "volumeMounts")},
    }
    both = {**head, "spec": {**head["spec"], "containers": [container, scaler]}}
    workers = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    templates = {"submitter": spec["submitterPodTemplate"], "head": both, **workers}
    return {f"{name}-{part}": _pod(f"{name}-{part}", each) for part, each in templates.items()}


def _pod(name: str, template: dict[str, Any]) -> dict[str, Any]:
    labels = template.get("metadata", {}).get("labels", {})
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels},
        "spec": template["spec"],
    }  # fmt: skip
