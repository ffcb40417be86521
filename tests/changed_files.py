# SPDX-License-Identifier: Apache-2.0
"""Change a file by a seed into another of its kind: JSON, bytes, archives and headers."""

import copy
import hashlib
import io
import json
import math
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

from saccade.core.errors import SaccadeError

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 10**9, 10**40, 0.0, -0.0, 0.5),
    *(1e-300, 1e300, math.nan, math.inf, -math.inf, "", "x", "a" * 2_000, "\u2028", "\x1b[31m"),
    *("\ud800", "nac", "sparo", "0", "1e9", [], {}, [[]], [None], [0] * 100, {"": ""}, {"a": []}),
    *([1e9], ["x"], [2**20] * 5, "../../x", "float32", "image"),
)
SIZES = (0, 1, 2, 127, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1)


def changed_value(rng: random.Random, value: Any) -> Any:
    """Return the JSON value with one to three changes."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.randint(1, 3)):
        holder: Any = root
        key: Any = 0
        while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.8:
            holder = holder[key]
            named = isinstance(holder, dict)
            key = rng.choice(list(holder)) if named else rng.randrange(len(holder))
        _change_at(rng, holder, key)
    return root[0]


def _change_at(rng: random.Random, holder: Any, key: Any) -> None:
    way = rng.random()
    if way < 0.7:
        holder[key] = copy.deepcopy(rng.choice(ODD))
    elif way < 0.8:
        for _ in range(rng.choice((1, 3, 70, 300))):
            holder[key] = [holder[key]]
    elif way < 0.9 and isinstance(holder, dict):
        holder[str(rng.choice(ODD))[:50]] = holder[key]
        del holder[key]
    else:
        holder[key] = [holder[key]] * rng.choice((0, 2, 30))


def changed_text(rng: random.Random, value: Any) -> bytes:
    """Return JSON of a changed value, or its text with changed bytes."""
    if rng.random() < 0.8:
        value = changed_value(rng, value)
    text = json.dumps(value).encode()
    return text if rng.random() < 0.7 else changed_bytes(rng, text)


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change, insert or remove bytes in one to four places."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        until = min(len(changed), at + rng.choice((1, 2, 4, 8, 30, 500)))
        way = rng.randrange(6)
        if way == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            width = rng.choice((1, 2, 4, 8))
            size = rng.choice(SIZES) % 2 ** (8 * width)
            changed[at : at + width] = size.to_bytes(width, rng.choice(("little", "big")))
        elif way == 2:
            del changed[at:until]
        elif way == 3:
            changed[at:at] = changed[at:until] * rng.choice((1, 2, 40))
        elif way == 4:
            changed[at:until] = rng.randbytes(until - at)
        elif rng.random() < 0.3:
            del changed[at:]
    return bytes(changed)


def changed_zip(rng: random.Random, data: bytes) -> bytes:
    """Return a valid archive with broken members, or sometimes the other way round."""
    if rng.random() < 0.3:
        return changed_bytes(rng, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for name in rng.sample(sorted(members), rng.randint(1, 2)):
        start = members[name][:160]  # the headers
        members[name] = changed_bytes(rng, start) + members[name][160:]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def changed_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Change the header in front of the same numbers; its metadata is changed like any JSON."""
    if rng.random() < 0.2:
        return changed_bytes(rng, data)
    length = int.from_bytes(data[:8], "little")
    header, numbers = json.loads(data[8 : 8 + length]), data[8 + length :]
    if rng.random() < 0.7 and "saccade" in header.get("__metadata__", {}):
        inner = changed_value(rng, json.loads(header["__metadata__"]["saccade"]))
        if rng.random() < 0.3:
            numbers = changed_bytes(rng, numbers)
        if isinstance(inner, dict):
            inner["data_sha256"] = hashlib.sha256(numbers).hexdigest()
        header["__metadata__"]["saccade"] = json.dumps(inner)
    else:
        header = changed_value(rng, header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + numbers


def read_or_refused(read: Callable[[], object]) -> str:
    """Return the outcome for a changed file, read or refused; anything else is raised."""
    try:
        read()
    except SaccadeError:
        return "refused"
    return "read"
