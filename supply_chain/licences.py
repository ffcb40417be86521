# SPDX-License-Identifier: Apache-2.0
"""Write docs/licences.md: python supply_chain/licences.py

The licenses are those that the installed packages declare. The licenses themselves were not read.
"""

from importlib import metadata

from packages import ROOT, brought_along, installed, pinned

TARGET = ROOT / "docs" / "licences.md"
_HEAD = """# Licenses of the packages that saccade installs

saccade itself is licensed under Apache-2.0. The tables list the packages in `constraints.txt` and
their dependencies, with the versions that were installed when `supply_chain/licences.py` wrote this
page, and the license that each package declares in its metadata. The licenses themselves were not
read, and packages may contain parts under other licenses.
The embedded server in `nvidia-pytriton` is NVIDIA's Triton Inference Server (BSD-3-Clause).
"""
_LONG = 60


def licence_of(name: str) -> str:
    """Return a package's declared license: expression, classifiers, or first line of the text."""
    fields = metadata.metadata(name)
    if expression := fields.get("License-Expression"):
        return str(expression)
    classifiers = [
        classifier.rpartition(" :: ")[2]
        for classifier in fields.get_all("Classifier") or ()
        if classifier.startswith("License :: ") and classifier != "License :: OSI Approved"
    ]
    if classifiers:
        return ", ".join(sorted(classifiers))
    lines = (fields.get("License") or "").strip().splitlines() or ["not declared"]
    return lines[0] if len(lines[0]) <= _LONG else f"{lines[0][:_LONG]}..."


def document() -> str:
    """Return the page."""
    pins = pinned()
    lines = [_HEAD, *_table(pins), "", "Their dependencies:", "", *_table(brought_along(set(pins)))]
    return "\n".join(lines) + "\n"


def _table(packages: dict[str, str]) -> list[str]:
    lines = ["| package | version | license |", "|---|---|---|"]
    for name, version in sorted(packages.items()):
        said = licence_of(name) if installed(name) else "not installed when this page was written"
        lines.append(f"| {name} | {version} | {said.replace('|', '/')} |")
    return lines


if __name__ == "__main__":
    TARGET.write_text(document())
    print(TARGET.relative_to(ROOT))
