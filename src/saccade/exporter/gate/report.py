# SPDX-License-Identifier: Apache-2.0
"""Report of the gate, for a program and for a terminal."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Parity
from saccade.exporter.gate.metrics import FLOORS, THRESHOLDS, exceeded

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class VariantReport:
    """Results of the gate for one file."""

    name: str
    parity: Parity | None  # None: the file could not be run
    problems: tuple[str, ...] = ()  # what is wrong, beside the figures

    @classmethod
    def of(cls, name: str, parity: Parity) -> "VariantReport":
        """The row of a file that was run: each figure above its threshold is a problem."""
        problems = exceeded(parity.figures, parity.thresholds)
        return cls(
            name,
            parity,
            tuple(
                f"{name.replace('_', ' ')} is {parity.figures[name]:.2g}, "
                f"at most {parity.thresholds[name]:g} is allowed"
                for name in problems
            ),
        )

    @property
    def passed(self) -> bool:
        """True if the file may be served."""
        return self.parity is not None and self.parity.passed and not self.problems


@dataclass(frozen=True)
class GateReport:
    """The gate's answer for a folder, one row a variant."""

    folder: Path
    variants: tuple[VariantReport, ...]
    images: tuple[str, ...] = ()  # what the manifests say becomes of an image, in words
    # As it was read and hashed, for what comes after; none: only the figures are known.
    artefacts: ArtefactFolder | None = field(default=None, repr=False, compare=False)

    @property
    def passed(self) -> bool:
        """True if every variant passed."""
        return all(variant.passed for variant in self.variants)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object; a figure that is not a number is null."""
        return {
            "folder": str(self.folder),
            "passed": self.passed,
            "table": THRESHOLDS,
            "images": list(self.images),
            "variants": [_row_dict(variant) for variant in self.variants],
        }

    @property
    def exit_code(self) -> int:
        """1 if a variant did not pass."""
        return 0 if self.passed else 1

    def to_text(self) -> "Table":
        """For a terminal: figures, then the threshold table, then what is wrong."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        measured = {name for row in self.variants if row.parity for name in row.parity.figures}
        names = [
            name for name in THRESHOLDS["fp32"] if name in measured or name != "sensitive_rows"
        ]
        names += ["float32_error"] if "float32_error" in measured else []
        problems = [f"{row.name}: {problem}" for row in self.variants for problem in row.problems]
        table = Table(
            title="parity gate: unfolded float64 torch against ONNX Runtime",
            caption=Text("\n").join(
                [*(Text(problem, "red") for problem in problems), *map(Text, self.images)]
            ),
            caption_justify="left",
            box=box.SIMPLE,
            padding=0,
        )
        table.add_column("variant", no_wrap=True)
        for heading in (*(name.replace("_", "\n") for name in names), "passed"):
            table.add_column(heading, justify="right", min_width=max(map(len, heading.split("\n"))))
        for row in self.variants:
            cells = [_cell(row, name) for name in names]
            table.add_row(
                row.name, *cells, Text("yes") if row.passed else Text("NO", style="bold red")
            )
        table.add_section()
        for precision, limits in THRESHOLDS.items():
            cells = [f"{limits[name]:g}" if name in limits else "-" for name in names]
            table.add_row(f"at most, {precision}", *cells)
        return table


def _row_dict(row: VariantReport) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": row.name,
        "passed": row.passed,
        "problems": list(row.problems),
        "figures": {},
        "thresholds": {},
        "overridden": [],
        "floor": None,
    }
    if row.parity is not None:
        entry["figures"] = {
            name: value if math.isfinite(value) else None
            for name, value in row.parity.figures.items()
        }
        entry["thresholds"] = dict(row.parity.thresholds)
        entry["overridden"] = list(row.parity.overridden)
        entry["floor"] = row.parity.floor
    return entry


def _cell(row: VariantReport, name: str) -> str:
    parity = row.parity
    if parity is None or name not in parity.figures:
        return ""
    text = f"{parity.figures[name]:.2g}"
    if name in parity.overridden:
        text += f" (override: {parity.thresholds[name]:g})"
    if name == "relative_error" and parity.floor != FLOORS.get(row.name.rpartition("-")[2]):
        text += f" (floor: {parity.floor:g})"
    return text
