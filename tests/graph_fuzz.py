# SPDX-License-Identifier: Apache-2.0
"""Randomly changed ONNX files, one per seed."""

import random
from functools import cache
from typing import Any

import hostile_graphs
from changed_files import read_or_refused
from one_node import one_node_model
from tiny_artefacts import onnx_model

from saccade.exporter.graph.limits import parse_graph
from saccade.plugins.ops import OPS

_NUMBERS = (-1, 0, 1, 7, 16, 255, 2**31, 2**62, -(2**63), 2**63 - 1)
_TEXTS = ("", "x", "f0", "bomb", "trips", "\x1b[2J", "\u202e", "../../x", "y" * 2000)
_REPEATED = 300  # maximum number of copies of a message
_MANY_BYTES = 4_000_000


@cache
def _sound() -> tuple[bytes, ...]:
    """Return the original files: a model, every op with its body, and small hostile ones."""
    honest = [onnx_model(), *(one_node_model(OPS[op]) for op in OPS)]
    known = hostile_graphs.HOSTILE | hostile_graphs.COSTLY
    hostile = [make() for name, (make, _) in known.items() if "000" not in name]
    return tuple(each.SerializeToString() for each in (*honest * 3, *hostile))


def outcome(seed: int) -> str:
    """Return the outcome for this seed's file, read or refused; anything else is raised."""
    rng = random.Random(seed)
    data = rng.choice(_sound())
    data = _changed_bytes(rng, data) if rng.random() < 0.3 else _changed_messages(rng, data)
    return read_or_refused(lambda: parse_graph(data, "model.onnx"))


def _changed_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at:at] = rng.randbytes(rng.randint(1, 9))
            case 2:
                del changed[at : at + rng.randint(1, 40)]
            case _:
                changed[at:at] = changed[at : at + rng.randint(1, 200)] * rng.randint(1, 20)
    return bytes(changed)


def _changed_messages(rng: random.Random, data: bytes) -> bytes:
    proto = hostile_graphs.onnx.load_model_from_string(data)
    for _ in range(rng.randint(1, 4)):
        message = proto
        for _ in range(rng.randint(0, 6)):
            inside = [
                each
                for field, value in message.ListFields()
                if field.type == field.TYPE_MESSAGE
                for each in (value if _is_repeated(field) else [value])
            ]
            if not inside:
                break
            message = rng.choice(inside)
        _change_field(rng, message)
        if proto.ByteSize() > _MANY_BYTES:
            break
    return bytes(proto.SerializeToString())


def _is_repeated(field: Any) -> bool:
    return bool(field.is_repeated)


def _change_field(rng: random.Random, message: Any) -> None:
    field = rng.choice(message.DESCRIPTOR.fields)
    if field.type == field.TYPE_MESSAGE:
        if not _is_repeated(field):
            getattr(message, field.name).SetInParent()
        elif held := list(getattr(message, field.name)):
            copies = [rng.choice(held) for _ in range(rng.randint(1, _REPEATED))]
            if sum(copy.ByteSize() for copy in copies) < _MANY_BYTES:
                getattr(message, field.name).extend(copies)
        else:
            getattr(message, field.name).add()
        return
    if rng.random() < 0.2:
        message.ClearField(field.name)
        return
    if field.type == field.TYPE_STRING:
        value: Any = rng.choice(_TEXTS)
    elif field.type == field.TYPE_BYTES:
        value = rng.randbytes(rng.randint(0, 64))
    elif field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        value = rng.choice((0.0, float("nan"), float("inf"), 1e30))
    else:
        value = rng.choice(_NUMBERS)
    try:
        if _is_repeated(field):
            getattr(message, field.name).extend([value] * rng.randint(1, 40))
        else:
            setattr(message, field.name, value)
    except ValueError:  # out of the field's range, or not in the enumeration
        message.ClearField(field.name)
