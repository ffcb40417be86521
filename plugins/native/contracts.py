# SPDX-License-Identifier: Apache-2.0
"""Write contracts.hpp, which tells C++ what contract.py of each op declares.

Run `python -m saccade.plugins.native.contracts`; a test compares the file with the contracts.
"""

import json
import math
from pathlib import Path

from saccade.plugins.contract import Attribute, Op, Port
from saccade.plugins.ops import OPS

HEADER = Path(__file__).with_name("contracts.hpp")
_LETTERS = {"T": "T", "float32": "f", "int64": "i"}
_HEAD = """\
// SPDX-License-Identifier: Apache-2.0
// What contract.py of each op declares; written by python -m saccade.plugins.native.contracts.
#pragma once

#include "contract.hpp"

namespace saccade {

"""


def header() -> str:
    """Return the content of the file."""
    return _HEAD + "".join(map(_contract, OPS.values())) + "\n}  // namespace saccade\n"


def _contract(op: Op) -> str:
    shapes = ", ".join(f"{port.name} [{port.axes}]" for port in op.inputs)
    names = [_text(port.name) for port in op.inputs]
    names += ["nullptr"] * (2 - len(names))
    axes = len(op.inputs[0].axes.split()) - 1
    fields = (
        *(_text(op.node), _text(shapes), f"{{{', '.join(names)}}}"),
        *(_letters(op.inputs), _letters(op.outputs), f"{axes}", f"{len(op.attributes)}"),
    )
    attributes = ",\n".join(map(_attribute, op.attributes.values()))
    return f"constexpr OpContract k{op.node}{{\n    {', '.join(fields)},\n    {{{attributes}}}}};\n"


def _attribute(attribute: Attribute) -> str:
    allowed = attribute.range
    fields = (
        *(_text(attribute.name), _flag(attribute.kind is int), _number(attribute.default)),
        *(_text(attribute.allowed), _number(allowed.least), _number(allowed.most)),
        *(_flag(allowed.above), _flag(allowed.below)),
    )
    return f"{{{', '.join(fields)}}}"


def _letters(ports: tuple[Port, ...]) -> str:
    return _text("".join(_LETTERS[port.dtype] for port in ports))


def _text(text: str) -> str:
    return json.dumps(text)


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _number(value: float) -> str:
    return f"{value!r}" if math.isfinite(value) else f"{'-' if value < 0 else ''}HUGE_VAL"


if __name__ == "__main__":
    HEADER.write_text(header())
