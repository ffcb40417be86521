# SPDX-License-Identifier: Apache-2.0
"""What a build has made, as a table for a reader."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.export.runtimes.tensorrt.engine_manifest import EngineManifest
from saccade.export.runtimes.tensorrt.modules import NAMES

_MIB = 2**20


def rendered(folder: Path, manifests: Sequence[EngineManifest]) -> Any:
    """A row a plan: its size, the types of its matrix layers, how long it took."""
    from rich.table import Table

    first = manifests[0]
    by = f"{NAMES[first.engine]} {first.version} for {', '.join(first.compute_capabilities)}"
    table = Table(title=f"{folder}: {by}", title_justify="left")
    for name in ("variant", "MiB", "matrix layers", "batch", "build s"):
        table.add_column(name, justify="left" if name in ("variant", "matrix layers") else "right")
    for each in manifests:
        types = ", ".join(f"{count} {kind}" for kind, count in each.layer_types.items())
        batch = next(iter(each.profiles.values()))
        shown = ":".join(str(batch[key][0]) for key in ("min", "opt", "max"))
        size = f"{each.file.bytes / _MIB:.1f}"
        table.add_row(each.variant.name, size, types, shown, f"{each.build_seconds:.1f}")
    return table
