# SPDX-License-Identifier: Apache-2.0
"""What `make check-deploy` asks beside the tests: checkov about everything that would be applied.

Each finding is mended, or stands in deploy/accepted.txt with its reason. checkov has packages of
its own by the dozen and lives in another environment (CHECKOV names the program). KUBERAY_CRD may
name KubeRay's definition of a RayJob (ray-operator/config/crd/bases/ray.io_rayjobs.yaml of its
repository, which is not part of this one): the job is then held to it, field by field.
"""

import copy
import json
import os
import re
import subprocess
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from rendered import charted, kustomized, pods, yaml

DEPLOY = ROOT / "deploy"
ACCEPTED = DEPLOY / "accepted.txt"
FOLDERS = ("overlays/cpu", "overlays/gpu", "proxy", "models", "kserve", "ray", "ray-gpu")
CHECKS_AT_LEAST = 500  # that pass: a checkov that reads nothing finds nothing


def test_checkov_finds_nothing_new(tmp_path):
    for folder in FOLDERS:
        write(tmp_path / f"{folder.replace('/', '-')}.yaml", kustomized(DEPLOY / folder))
    gpu = yaml.safe_load((DEPLOY / "chart" / "values-gpu.yaml").read_text())
    for name, values in (("cpu", {}), ("gpu", gpu)):
        write(tmp_path / f"chart-{name}.yaml", charted(DEPLOY / "chart", values)[0])
    report = checked(tmp_path)
    assert report["summary"]["parsing_errors"] == 0
    assert report["summary"]["passed"] >= CHECKS_AT_LEAST
    findings = found(report)
    accepted = accepted_findings()
    new = [each for each in findings if not any(matches(row, each) for row in accepted)]
    assert new == [], "mend them, or say in deploy/accepted.txt why not"
    stale = [row for row in accepted if not any(matches(row, each) for each in findings)]
    assert not stale, "these are found no more: take them out of deploy/accepted.txt"


def test_checkov_can_find(tmp_path):
    resources = copy.deepcopy(kustomized(DEPLOY / "overlays" / "cpu"))
    pod = resources["Deployment", "saccade-server"]["spec"]["template"]["spec"]
    pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    write(tmp_path / "open.yaml", resources)
    assert ("CKV_K8S_20", "Deployment.saccade-server") in {
        (check, name) for check, name, _ in found(checked(tmp_path))
    }


@pytest.mark.skipif("KUBERAY_CRD" not in os.environ, reason="KUBERAY_CRD names no definition")
@pytest.mark.parametrize("folder", ["ray", "ray-gpu"])
def test_the_job_fits_kuberays_definition(folder):
    import jsonschema

    definition = yaml.safe_load(Path(os.environ["KUBERAY_CRD"]).read_text())
    (version,) = (each for each in definition["spec"]["versions"] if each["storage"])
    schema = strict(version["schema"]["openAPIV3Schema"])
    job = kustomized(DEPLOY / folder)["RayJob", "saccade-bulk"]
    assert job["apiVersion"] == f"ray.io/{version['name']}"
    jsonschema.validate(job, schema)
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParam"] = {}
    with pytest.raises(jsonschema.ValidationError, match="rayStartParam"):
        jsonschema.validate(job, schema)


def write(path: Path, resources: Mapping[tuple[str, str], dict[str, Any]]) -> None:
    """The resources as checkov reads them: pods of kinds that it does not know as pods."""
    texts = list(resources.values())
    texts += [pod for name, pod in pods(resources).items() if ("Deployment", name) not in resources]
    unique = {(each["kind"], each["metadata"]["name"]): each for each in texts}
    path.write_text(yaml.safe_dump_all(unique.values(), sort_keys=False))


def checked(folder: Path) -> dict[str, Any]:
    """Report of checkov, which asks nobody for more than what it brings."""
    program = os.environ.get("CHECKOV", "checkov")
    command = [program, "-d", folder, "--framework", "kubernetes", "--skip-download", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def found(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Check, resource without its namespace, and file, of each that failed."""
    return [
        (
            failed["check_id"],
            re.sub(r"^(\w+)\.default\.", r"\1.", failed["resource"]),
            Path(failed["file_path"]).stem,
        )
        for failed in report["results"]["failed_checks"]
    ]


def accepted_findings() -> list[tuple[str, str]]:
    rows = [line.split(maxsplit=2) for line in ACCEPTED.read_text().splitlines()]
    rows = [row for row in rows if row and not row[0].startswith("#")]
    assert all(len(row) == 3 for row in rows), "expected CHECK RESOURCE reason"
    return [(check, resource) for check, resource, _ in rows]


def matches(row: tuple[str, str], finding: tuple[str, str, str]) -> bool:
    return row[0] == finding[0] and fnmatchcase(finding[1], row[1])


def strict(schema: Any) -> Any:
    """The schema as an API server reads it that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(each) for key, each in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        # The metadata of a resource is the API server's own.
        closed.setdefault("additionalProperties", False)
    elif schema.get("type") == "object" and "additionalProperties" not in schema:
        closed["additionalProperties"] = True
    return closed
