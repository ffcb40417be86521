# SPDX-License-Identifier: Apache-2.0
"""Export the shipped digits-sum, ready to serve."""

from pathlib import Path

from saccade.exporter.exported import ExportOptions, export

CHECKPOINT = (
    Path(__file__).parent.parent
    / "src"
    / "saccade"
    / "models"
    / "shipped"
    / "digits-sum.safetensors"
)


def digits_folder(folder: Path, budgets: tuple[float, ...]) -> Path:
    """Return the artefact folder `nac`; it is created once and then reused."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        export(CHECKPOINT, ExportOptions(folder, name="nac", budget=budgets))
    return folder
