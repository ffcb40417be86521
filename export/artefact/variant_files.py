# SPDX-License-Identifier: Apache-2.0
"""The files of one variant: a model of several components is one variant to its users."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.artefact.variant import variant_name
from saccade.models.families import entry_of
from saccade.models.preprocessing import Preprocessing


@dataclass(frozen=True)
class VariantFiles:
    """One variant: its files by role; the first answers a plain request."""

    name: str
    components: dict[str, Manifest]

    @property
    def main(self) -> Manifest:
        """The component that answers a plain request."""
        return next(iter(self.components.values()))

    @property
    def sha256(self) -> str:
        """The hash of the file; for several files, the hash of their hashes."""
        if len(self.components) == 1:
            return self.main.file.sha256
        text = "".join(
            f"{role} {component.file.sha256}\n"
            for role, component in sorted(self.components.items())
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def runtime_metadata(self) -> dict[str, Any]:
        """Everything that the server and the client need to know about the variant."""
        return {
            key: value
            for component in self.components.values()
            for key, value in component.facts.items()
        }

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one sample, in the component that answers a plain request."""
        return self.main.cost.multiply_adds.total

    @property
    def preprocessing(self) -> Preprocessing | None:
        """The preprocessing of images, or None if no component takes one."""
        declared = (
            component.preprocessing for component in self.components.values() if encoded(component)
        )
        return next(
            (preprocessing for preprocessing in declared if preprocessing is not None), None
        )

    def images(self) -> Preprocessing:
        """Return the preprocessing of images.

        Raises: SaccadeError if no component takes an image.
        """
        if self.preprocessing is None:
            names = sorted(spec.name for spec in self.main.inputs)
            raise SaccadeError(
                f"{self.name}: takes {', '.join(names)}, but saccade has no such data to measure "
                "with. Measure a model that takes images."
            )
        return self.preprocessing

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of `probabilities`; empty if the model has none."""
        return next(
            (component.labels for component in self.components.values() if component.labels), ()
        )


def grouped(manifests: Sequence[Manifest]) -> tuple[VariantFiles, ...]:
    """Group the manifests of a folder into variants, in the same order.

    Raises: SaccadeError if a variant lacks a component that every request needs.
    """
    variants: dict[str, dict[str, Manifest]] = {}
    for manifest in manifests:
        entry = manifest.variant
        name = variant_name(entry.model, "", entry.setting, entry.precision)
        variants.setdefault(name, {})[entry.role] = manifest
    for name, components in variants.items():
        needed = entry_of(next(iter(components.values())).variant.family).required
        if not set(needed) <= set(components):
            raise SaccadeError(
                f"{name}: found only {', '.join(sorted(components))}, expected the components "
                f"{' and '.join(needed)}, each with its manifest. Export the checkpoint again."
            )
    return tuple(VariantFiles(name, components) for name, components in variants.items())


def encoded(manifest: Manifest) -> tuple[str, ...]:
    """Return the inputs whose pixels arrive at the router as encoded files."""
    if manifest.preprocessing is None:
        return ()
    return tuple(
        spec.name
        for spec in manifest.inputs
        if spec.dtype == "uint8" and spec.name.partition("_")[0] == "image"
    )


def filled(manifest: Manifest) -> tuple[str, ...]:
    """Return the inputs of this component that the router fills in itself."""
    names = entry_of(manifest.variant.family).filled.get(manifest.variant.role, ())
    return tuple(spec.name for spec in manifest.inputs if spec.name in names)
