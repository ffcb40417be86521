# SPDX-License-Identifier: Apache-2.0
"""The optimization profile of a variant: a range of shapes per input, from the axis names."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.tensorrt.engine_manifest import Profile
from saccade.models.interface import TensorSpec

Range = tuple[int, int, int]  # smallest, the one to tune for, largest
BATCH = "b"
_WORD = re.compile(r"[a-z][a-z0-9_]*")
_MOST_SLOTS = 64  # the most that a request may ask for
_LARGEST = 2**31 - 1


def read_range(text: str, flag: str) -> Range:
    """Read a range such as 1:8:64, or one number for a fixed size.

    Raises: SaccadeError if it is not a range or its numbers do not increase.
    """
    parts = text.split(":")
    if len(parts) not in (1, 3) or not all(part.isascii() and part.isdigit() for part in parts):
        raise SaccadeError(
            f"{flag} {text!r}: expected smallest:usual:largest such as 1:8:64, or one number."
        )
    least, usual, most = (int(part) for part in (parts * 3 if len(parts) == 1 else parts))
    if not 1 <= least <= usual <= most <= _LARGEST:
        raise SaccadeError(
            f"{flag} {text!r}: {least}, {usual}, {most} are not increasing numbers of at least 1. "
            "Write smallest:usual:largest, such as 1:8:64."
        )
    return least, usual, most


def read_axes(given: tuple[str, ...]) -> dict[str, Range]:
    """Read ranges of other axes, such as k=1:7:16; by axis name.

    Raises: SaccadeError if one has another form, or names the batch or an axis twice.
    """
    ranges: dict[str, Range] = {}
    for text in given:
        word, equals, numbers = text.partition("=")
        if not equals or not _WORD.fullmatch(word) or word == BATCH or word in ranges:
            raise SaccadeError(
                f"--axis {text!r}: expected an axis other than the batch, each once, such as "
                "k=1:7:16. For the batch, use --batch."
            )
        ranges[word] = read_range(numbers, f"--axis {word}")
    return ranges


def profiles_of(
    manifest: Manifest, batch: Range, axes: Mapping[str, Range]
) -> dict[str, dict[str, Any]]:
    """Return the profile of every input of a variant; a fixed axis keeps its size.

    An axis `k` counts slots. The usual number is the model's own. The largest is the number that
    the router accepts, or the number of slots that the model learned.

    Raises: SaccadeError if an axis has no range, or a range that the manifest forbids.
    """
    known = {BATCH: batch, **_slots(manifest), **axes}
    words = {axis for spec in manifest.inputs for axis in spec.shape if isinstance(axis, str)}
    name = manifest.variant.name
    if open_axes := sorted(words - set(known)):
        raise SaccadeError(
            f"{name}: the range of axis {open_axes[0]!r} is unknown. "
            f"Pass a range, such as --axis {open_axes[0]}=1:8:64."
        )
    learned = _learned_slots(manifest)
    if "k" in words and learned and known["k"][2] > learned:
        raise SaccadeError(
            f"--axis k: asks for up to {known['k'][2]} slots, but {name} has learned {learned}. "
            f"Pass a range up to {learned}, or leave the option out."
        )
    return {spec.name: _profile(spec, known) for spec in manifest.inputs}


def check_axes(manifests: Sequence[Manifest], axes: Mapping[str, Range]) -> None:
    """Check that every axis with a range exists in some variant.

    Raises: SaccadeError otherwise.
    """
    inputs = [spec for manifest in manifests for spec in manifest.inputs]
    known = {axis for spec in inputs for axis in spec.shape if isinstance(axis, str)} - {BATCH}
    if unknown := sorted(set(axes) - known):
        raise SaccadeError(
            f"--axis {unknown[0]}: no input has such an axis. Expected, besides the batch: "
            f"{', '.join(sorted(known)) or 'none'}."
        )


def check_batch(manifest: Manifest, batch: Range) -> None:
    """Check that a variant with a fixed batch gets a range of only that number.

    Raises: SaccadeError otherwise.
    """
    for spec in manifest.inputs:
        first = spec.shape[0]
        if isinstance(first, int) and batch != (first,) * 3:
            raise SaccadeError(
                f"--batch {':'.join(map(str, batch))}: {spec.name!r} of {manifest.variant.name} "
                f"has a fixed batch of {first}. Pass --batch {first}."
            )


def _profile(spec: TensorSpec, known: Mapping[str, Range]) -> Profile:
    ranges = [(axis,) * 3 if isinstance(axis, int) else known[axis] for axis in spec.shape]
    least, usual, most = zip(*ranges, strict=True)
    return {"min": least, "opt": usual, "max": most}


def _slots(manifest: Manifest) -> dict[str, Range]:
    usual = manifest.facts.get("slots")
    if not isinstance(usual, int):
        return {}
    return {"k": (1, usual, _learned_slots(manifest) or max(_MOST_SLOTS, usual))}


def _learned_slots(manifest: Manifest) -> int | None:
    rule = manifest.facts.get("initial_state")
    if not isinstance(rule, dict) or rule.get("kind") != "learned":
        return None
    return len(rule["slots"])
