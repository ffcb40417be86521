# SPDX-License-Identifier: Apache-2.0
"""The answer of `saccade ops` as tables."""

from typing import Any


def render(found: dict[str, Any]) -> Any:
    """Ops with their attributes, then the implementations with version or reason."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    ops = Table("op", "inputs", "outputs", "attributes (default)", "tolerance by type")
    for op in found["ops"]:
        attributes = [f"{name}={each['default']}" for name, each in op["attributes"].items()]
        tolerance = [f"{dtype} {value:g}" for dtype, value in op["tolerance"].items()]
        cells = (
            op["name"],
            _ports(op["inputs"]),
            _ports(op["outputs"]),
            "\n".join(attributes) or "none",
            "\n".join(tolerance),
        )
        # As plain text: the brackets of the axes would be read as a style.
        ops.add_row(*map(Text, cells))
    ways = Table("", "implementation", "found, or what to do")
    for each in found["implementations"]:
        mark = "ok" if each["available"] else "-"
        ways.add_row(*map(Text, (mark, each["name"], each["detail"])))
    return Group(ops, ways)


def _ports(ports: dict[str, str]) -> str:
    return "\n".join(f"{name} [{axes}]" for name, axes in ports.items())
