# SPDX-License-Identifier: Apache-2.0
"""The report of the gate, as JSON and for a terminal."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core.sizes import counted
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Parity
from saccade.exporter.gate.metrics import FLOORS, THRESHOLDS, exceeded
from saccade.exporter.policy.policy import CertificateReport

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text


# Figures whose thresholds decide which samples count as sensitive.
_OF_ROWS = ("relative_error", "one_minus_cosine", "row_isolation")
_TITLES = {"one_minus_cosine": "cosine distance", "op_laws": "op invariants"}
_LEGEND = {
    "one_minus_cosine": "cosine distance (one_minus_cosine): 0 for answers of the same direction",
    "row_isolation": "row isolation: how much an answer depends on other samples in its batch",
    "op_laws": "op invariants (op_laws): the worst violation, as a share of what fp32 is allowed",
    "sensitive_rows": "sensitive rows: share of samples where rounding alone exceeds a threshold",
}


@dataclass(frozen=True)
class VariantReport:
    """The gate's result for one file."""

    name: str
    parity: Parity | None  # None if the file could not be run
    problems: tuple[str, ...] = ()  # what is wrong, in words

    @classmethod
    def of(cls, name: str, parity: Parity) -> "VariantReport":
        """Make the row of a file that was run; each figure above its threshold is a problem."""
        problems = exceeded(parity.figures, parity.thresholds)
        if any(figure in parity.overridden for figure in problems if figure in _OF_ROWS):
            problems = [figure for figure in problems if figure != "sensitive_rows"]
        return cls(name, parity, tuple(_problem(figure, parity) for figure in problems))

    @property
    def passed(self) -> bool:
        """True if the file can be served."""
        return self.parity is not None and self.parity.passed and not self.problems


def as_step(precision: str) -> str:
    """Return the advice for a variant that may do as a step of policies; empty for fp32."""
    if precision == "fp32":
        return ""
    return " If it is only an early step of policies, which certify what it answers: --as-step."


@dataclass(frozen=True)
class GateReport:
    """The gate's result for a folder, one row per file."""

    folder: Path
    variants: tuple[VariantReport, ...]
    policies: tuple[CertificateReport, ...] = ()
    images: tuple[str, ...] = ()  # the preprocessing of images, in words
    # The folder as read and hashed, for later steps; None if only the figures are known.
    artefacts: ArtefactFolder | None = field(default=None, repr=False, compare=False)

    @property
    def passed(self) -> bool:
        """True if every variant and every policy passed."""
        variants = all(variant.passed for variant in self.variants)
        return variants and all(policy.passed for policy in self.policies)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object; a figure that is not a number is null."""
        return {
            "folder": str(self.folder),
            "passed": self.passed,
            "table": THRESHOLDS,
            "images": list(self.images),
            "variants": [_row_dict(variant) for variant in self.variants],
            "policies": [policy.to_dict() for policy in self.policies],
        }

    @property
    def exit_code(self) -> int:
        """0 if every variant and every policy passed, otherwise 1."""
        return 0 if self.passed else 1

    def to_text(self) -> "Group":
        """Return a table for a terminal: figures, thresholds, then what is wrong."""
        from rich import box
        from rich.console import Group
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
            box=box.SIMPLE,
            padding=0,
        )
        table.add_column("variant", no_wrap=True)
        for heading in (*(_words(name).replace(" ", "\n") for name in names), "passed"):
            table.add_column(heading, justify="right", min_width=max(map(len, heading.split("\n"))))
        for row in self.variants:
            cells = [_cell(row, name) for name in names]
            table.add_row(
                row.name, *cells, Text("yes") if row.passed else Text("NO", style="bold red")
            )
        table.add_section()
        made = {row.name.rpartition("-")[2] for row in self.variants}
        for precision, limits in THRESHOLDS.items():
            if precision not in made:
                continue
            cells = [f"{limits[name]:g}" if name in limits else "-" for name in names]
            table.add_row(f"at most, {precision}", *cells)
        notes = [
            *(Text(problem, "red") for problem in problems),
            *(_certificate(policy) for policy in self.policies),
            *(Text(words, "yellow") for row in self.variants if (words := _undecided(row))),
            *(Text(words) for name, words in _LEGEND.items() if name in names),
            *map(Text, self.images),
        ]
        return Group(table, *notes)


def _problem(name: str, parity: Parity) -> str:
    """Describe a figure above its threshold."""
    figure, allowed = parity.figures[name], parity.thresholds[name]
    tight = [one for one in _OF_ROWS if one in parity.overridden]
    if name == "sensitive_rows" and tight:
        # The rows are sensitive because of an override: name its threshold.
        own = parity.figures.get("float32_error")
        return (
            f"{_words(tight[0])} may be at most {parity.thresholds[tight[0]]:g} "
            f"(--threshold {tight[0]}), but the model itself exceeds this in float32 on "
            f"{100 * figure:.0f} % of the samples"
            + (f", with errors of up to {own:.2g}" if own is not None else "")
        )
    return f"{_words(name)} is {figure:.2g}, at most {allowed:g} is allowed"


def loosened(parity: Parity) -> str:
    """Return the name of the first threshold to raise so that this file passes."""
    first = exceeded(parity.figures, parity.thresholds)[0]
    tight = [one for one in _OF_ROWS if one in parity.overridden]
    return tight[0] if first == "sensitive_rows" and tight else first


def _certificate(report: CertificateReport) -> "Text":
    from rich.text import Text

    if report.policy is None or report.problem is not None:
        return Text(str(report.problem), "red")
    risk, bound = report.policy.risk, report.policy.bound
    return Text(f"policy {report.name}: risk {risk:g} certified again, bound {bound:.4f}")


def _undecided(row: VariantReport) -> str:
    """Say how little is known of a change of the score, if its interval exceeds the threshold."""
    parity = row.parity
    score = parity.score if parity else None
    if parity is None or score is None or score.low is None or score.high is None:
        return ""
    if score.decided(parity.thresholds["score_points"]):
        return ""
    return (
        f"{row.name}: {counted(score.samples, 'sample')} say little about the score: with 95 % it "
        f"changes by {score.low:+.2g} to {score.high:+.2g} points (--calibrate-on more images, or "
        "--gate thorough)"
    )


def _words(name: str) -> str:
    return _TITLES.get(name, name.replace("_", " "))


def _row_dict(row: VariantReport) -> dict[str, Any]:
    parity = row.parity
    figures = {} if parity is None else parity.figures
    return {
        "name": row.name,
        "passed": row.passed,
        "problems": list(row.problems),
        "figures": {name: x if math.isfinite(x) else None for name, x in figures.items()},
        "thresholds": {} if parity is None else dict(parity.thresholds),
        "overridden": [] if parity is None else list(parity.overridden),
        "floor": None if parity is None else parity.floor,
    }


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
