# SPDX-License-Identifier: Apache-2.0
"""Write a wheel's bill of materials (CycloneDX) next to it: python supply_chain/sbom.py WHEEL

It lists the environment in which the wheel was built and tested. This is more than a wheel without
extras needs: test tools are included. The content does not depend on when or where it was written.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tyro
from packages import ROOT

from saccade.core.files import json_bytes, sha256_of, write_atomically

_SUFFIX = ".cdx.json"


def bill(wheel: Path, program: str) -> dict[str, Any]:
    """Return the components of the environment, with the wheel as their subject.

    Raises: CalledProcessError if cyclonedx-py fails.
    """
    command = [program, "environment", "--output-reproducible", "--output-format", "JSON"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library"]
    done = subprocess.run([*command, sys.executable], capture_output=True, check=True)
    content: dict[str, Any] = json.loads(done.stdout)
    own = content["metadata"]["component"]
    own["hashes"] = [{"alg": "SHA-256", "content": sha256_of(wheel)}]
    own["purl"] = f"pkg:pypi/{own['name']}@{own['version']}"
    # The same package as installed here, from a folder of this machine.
    others = [component for component in content["components"] if component["name"] != own["name"]]
    content["components"] = [_without_places(component) for component in others]
    known = {own["bom-ref"], *(component["bom-ref"] for component in content["components"])}
    content["dependencies"] = [
        dependency | {"dependsOn": sorted(known.intersection(dependency.get("dependsOn", ())))}
        for dependency in content["dependencies"]
        if dependency["ref"] in known
    ]
    return content


def _without_places(component: dict[str, Any]) -> dict[str, Any]:
    kept = [
        reference
        for reference in component.get("externalReferences", ())
        if not str(reference.get("url", "")).startswith("file:")
    ]
    rest = {key: value for key, value in component.items() if key != "externalReferences"}
    return rest | ({"externalReferences": kept} if kept else {})


def main(wheel: tyro.conf.Positional[Path], program: str = "cyclonedx-py") -> None:
    """Write the bill of materials of a wheel and print its path."""
    target = wheel.with_name(wheel.name.removesuffix(".whl") + _SUFFIX)
    write_atomically(target, json_bytes(bill(wheel, program)))
    print(target)


if __name__ == "__main__":
    tyro.cli(main)
