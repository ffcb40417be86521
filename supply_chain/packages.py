# SPDX-License-Identifier: Apache-2.0
"""The packages that saccade installs: the pinned ones and their dependencies."""

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def pinned(constraints: Path = ROOT / "constraints.txt") -> dict[str, str]:
    """Return the packages of a constraints file with their versions."""
    lines = (line.partition("#")[0].strip() for line in constraints.read_text().splitlines())
    return {name: version for name, _, version in (line.partition("==") for line in lines if line)}


def brought_along(names: set[str]) -> dict[str, str]:
    """Return all direct and indirect dependencies that are installed here."""
    own = {normal(name) for name in names}
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    # A package with each requested extra, or none: `tritonclient[grpc]` has more dependencies.
    left = [(name, "") for name in own] + _asked(_of_the_project())
    while left:
        name, extra = requirement = left.pop()
        if requirement in seen or not (version := installed(name)):
            continue
        seen.add(requirement)
        versions[name] = version
        left += _asked(metadata.requires(name) or (), extra)
    return {name: version for name, version in sorted(versions.items()) if name not in own}


def _asked(requirements: Iterable[str], extra: str = "") -> list[tuple[str, str]]:
    parsed = [Requirement(text) for text in requirements]
    wanted = [
        requirement
        for requirement in parsed
        if not requirement.marker or requirement.marker.evaluate({"extra": extra})
    ]
    return [
        (normal(requirement.name), own)
        for requirement in wanted
        for own in ("", *requirement.extras)
    ]


def _of_the_project() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        *project["dependencies"],
        *(
            requirement
            for extra in project["optional-dependencies"].values()
            for requirement in extra
        ),
    ]


def installed(name: str) -> str | None:
    """Return the version that is installed here, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def normal(name: str) -> str:
    """Return a package's name in the normalized form of package indexes."""
    return re.sub(r"[-_.]+", "-", name).lower()
