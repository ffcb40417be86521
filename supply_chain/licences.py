# SPDX-License-Identifier: Apache-2.0
"""Writes docs/licences.md: python supply_chain/licences.py

The licences are those that the installed packages say of themselves. Nobody has read them.
"""

from importlib import metadata

from packages import ROOT, brought_along, installed, pinned

TARGET = ROOT / "docs" / "licences.md"
_HEAD = """# Licences of what saccade is installed with

saccade itself is under Apache-2.0. Below: what each package of `constraints.txt` says of itself
in its metadata, and what these bring along, at the versions that were installed when this was
written, by `supply_chain/licences.py`. Nobody has read the licences, and packages may contain parts
under others.
The embedded server in `nvidia-pytriton` is NVIDIA's Triton Inference Server (BSD-3-Clause).
"""
_LONG = 60


def licence_of(name: str) -> str:
    """A package's own words, the shortest that it has: expression, classifiers, or first line."""
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
    lines = (fields.get("License") or "").strip().splitlines() or ["not said"]
    return lines[0] if len(lines[0]) <= _LONG else f"{lines[0][:_LONG]}..."


def document() -> str:
    """The page."""
    pins = pinned()
    lines = [_HEAD, *_table(pins), "", "Brought along:", "", *_table(brought_along(set(pins)))]
    return "\n".join(lines) + "\n"


def _table(packages: dict[str, str]) -> list[str]:
    lines = ["| package | version | licence |", "|---|---|---|"]
    for name, version in sorted(packages.items()):
        said = licence_of(name) if installed(name) else "not installed where this was written"
        lines.append(f"| {name} | {version} | {said.replace('|', '/')} |")
    return lines


if __name__ == "__main__":
    TARGET.write_text(document())
    print(TARGET.relative_to(ROOT))
