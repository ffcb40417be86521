# SPDX-License-Identifier: Apache-2.0
"""Writes deploy/chart from the manifests: python deploy/make_chart.py

The manifests are the source; the chart says the same with what differs from place to place in
values.yaml, and values-gpu.yaml for the overlay of GPUs. No helm was at hand to render it: a test
puts the values in by itself and compares with the overlays.
"""

from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parent
SPDX = "# SPDX-License-Identifier: Apache-2.0\n"
NOTE = "# Written by deploy/make_chart.py from the manifests; not rendered by helm so far.\n"
CHART = {
    "apiVersion": "v2",
    "name": "saccade-server",
    "description": "The server of saccade's models in a cluster. Not rendered by helm so far.",
    "type": "application",
    "version": "0.1.0",
    "appVersion": "26.07",
}
POD = ("spec", "template", "spec")
SERVER = (*POD, "containers", 0)
# Where a value stands in a resource, and what it is called. The order is that of values.yaml.
VALUES: tuple[tuple[str, str, tuple[str | int, ...]], ...] = (
    ("image", "Deployment", (*SERVER, "image")),
    ("alive", "Deployment", (*SERVER, "livenessProbe", "httpGet", "path")),
    ("arguments", "Deployment", (*SERVER, "args")),
    ("resources", "Deployment", (*SERVER, "resources")),
    ("claim", "Deployment", (*POD, "volumes", 0, "persistentVolumeClaim", "claimName")),
    ("repository", "Deployment", (*SERVER, "volumeMounts", 0, "subPath")),
    ("nodeSelector", "Deployment", (*POD, "nodeSelector")),
    ("tolerations", "Deployment", (*POD, "tolerations")),
    ("rollingUpdate", "Deployment", ("spec", "strategy", "rollingUpdate")),
    ("minReplicas", "HorizontalPodAutoscaler", ("spec", "minReplicas")),
    ("maxReplicas", "HorizontalPodAutoscaler", ("spec", "maxReplicas")),
    ("waitingSeconds", "HorizontalPodAutoscaler",
     ("spec", "metrics", 0, "pods", "target", "averageValue")),
)  # fmt: skip
ABSENT: dict[str, Any] = {"nodeSelector": {}, "tolerations": []}
Resources = dict[tuple[str, str], dict[str, Any]]


def render(folder: Path) -> Resources:
    """Output of `kubectl kustomize`, for the little of it that is used here."""
    resources: Resources = {}
    content = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if odd := set(content) - {"apiVersion", "kind", "resources", "patches"}:
        raise ValueError(f"{folder}: {sorted(odd)} are not rendered here")
    for name in content["resources"]:
        path = folder / name
        if path.is_dir():
            resources |= render(path.resolve())
        else:
            resource = yaml.safe_load(path.read_text())
            resources[resource["kind"], resource["metadata"]["name"]] = resource
    for patch in content.get("patches", []):
        target = resources[patch["target"]["kind"], patch["target"]["name"]]
        for operation in yaml.safe_load((folder / patch["path"]).read_text()):
            _apply(target, **operation)
    return resources


def chart_files() -> dict[str, str]:
    """Every file of the chart by its place in it."""
    on_cpu, on_gpu = (render(DEPLOY / "overlays" / name) for name in ("cpu", "gpu"))
    files = {
        "Chart.yaml": SPDX + NOTE + _text(CHART),
        "values.yaml": SPDX + NOTE + _text(_values(on_cpu)),
        "values-gpu.yaml": SPDX + NOTE + _text(_values(on_gpu)),
    }
    for resource in on_cpu.values():
        marks = {}
        for name, kind, way in VALUES:
            if resource["kind"] == kind:
                mark = f"VALUE-{name}"
                _place(resource, way)[way[-1]] = mark
                marks[mark] = name
        text = _text(resource)
        for mark, name in marks.items():
            text = _with_expression(text, mark, name)
        files[f"templates/{resource['kind'].lower()}.yaml"] = SPDX + NOTE + text
    return files


def _values(resources: Resources) -> dict[str, Any]:
    values = {}
    for name, kind, way in VALUES:
        place = _place(resources[kind, "saccade-server"], way)
        values[name] = ABSENT[name] if name in ABSENT and way[-1] not in place else place[way[-1]]
    return values


def _with_expression(text: str, mark: str, name: str) -> str:
    """A mark becomes its value, as JSON: that is YAML too, and needs no indentation."""
    if text.count(f" {mark}\n") != 1:
        raise ValueError(f"{mark} is not there once")
    return text.replace(f" {mark}\n", f" {{{{ .Values.{name} | toJson }}}}\n")


def _place(resource: Any, way: tuple[str | int, ...]) -> Any:
    for part in way[:-1]:
        resource = resource[part]
    return resource


def _apply(target: Any, op: str, path: str, value: Any) -> None:
    *way, last = (part.replace("~1", "/") for part in path.removeprefix("/").split("/"))
    for part in way:
        target = target[int(part) if isinstance(target, list) else part]
    if isinstance(target, list):
        if (op, last) != ("add", "-"):
            raise ValueError(f"{op} {path} is not applied here")
        target.append(value)
        return
    if (op == "replace") != (last in target):
        raise ValueError(f"{op} {path} does not fit what stands there")
    target[last] = value


def _text(content: Any) -> str:
    return str(yaml.safe_dump(content, sort_keys=False, width=1000))


def main() -> None:
    """Write the files."""
    for name, text in chart_files().items():
        path = DEPLOY / "chart" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path.relative_to(DEPLOY.parent))


if __name__ == "__main__":
    main()
