# SPDX-License-Identifier: Apache-2.0
"""The files of one variant: a model of several parts is one variant for whoever asks."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saccade.errors import SaccadeError
from saccade.export.artefact.manifest import Manifest
from saccade.export.artefact.variant import variant_name
from saccade.models.families import entry_of
from saccade.models.preprocessing import Preprocessing


@dataclass(frozen=True)
class VariantParts:
    """One variant: its files by role, first the one that answers a plain request."""

    name: str
    parts: dict[str, Manifest]

    @property
    def main(self) -> Manifest:
        """The part that answers a plain request."""
        return next(iter(self.parts.values()))

    @property
    def sha256(self) -> str:
        """The hash of the file; of several files, that of their hashes."""
        if len(self.parts) == 1:
            return self.main.file.sha256
        text = "".join(f"{role} {part.file.sha256}\n" for role, part in sorted(self.parts.items()))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def facts(self) -> dict[str, Any]:
        """What the server and the client need to know of it."""
        return {key: value for part in self.parts.values() for key, value in part.facts.items()}

    @property
    def multiply_adds(self) -> int:
        """Of one sample of the part that answers a plain request."""
        return self.main.cost.multiply_adds.total

    @property
    def preprocessing(self) -> Preprocessing | None:
        """What the image is, where one of the parts takes one."""
        found = (part.preprocessing for part in self.parts.values() if encoded(part))
        return next((each for each in found if each is not None), None)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of `probabilities`, if the model has some."""
        return next((part.labels for part in self.parts.values() if part.labels), ())


def grouped(manifests: Sequence[Manifest]) -> tuple[VariantParts, ...]:
    """The variants of a folder, in the order of its manifests.

    Raises: SaccadeError if a variant lacks a part that every request needs.
    """
    found: dict[str, dict[str, Manifest]] = {}
    for manifest in manifests:
        entry = manifest.variant
        name = variant_name(entry.model, "", entry.setting, entry.precision)
        found.setdefault(name, {})[entry.role] = manifest
    for name, parts in found.items():
        needed = entry_of(next(iter(parts.values())).variant.family).required
        if not set(needed) <= set(parts):
            raise SaccadeError(
                f"{name}: found the part {', '.join(sorted(parts))}, expected "
                f"{' and '.join(needed)}, each with its manifest. Export the checkpoint again."
            )
    return tuple(VariantParts(name, parts) for name, parts in found.items())


def encoded(manifest: Manifest) -> tuple[str, ...]:
    """Inputs whose pixels come to the router as encoded files."""
    if manifest.preprocessing is None:
        return ()
    return tuple(
        spec.name
        for spec in manifest.inputs
        if spec.dtype == "uint8" and spec.name.partition("_")[0] == "image"
    )


def filled(manifest: Manifest) -> tuple[str, ...]:
    """Inputs of this part that the router fills itself."""
    names = entry_of(manifest.variant.family).filled.get(manifest.variant.role, ())
    return tuple(spec.name for spec in manifest.inputs if spec.name in names)
