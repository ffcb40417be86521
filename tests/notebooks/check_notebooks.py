# SPDX-License-Identifier: Apache-2.0
"""`make check-notebooks`: every notebook of docs is executed from start to end, with a server."""

from pathlib import Path

import pytest
from places import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# Fewer samples and shorter loads: what is tried is whether it runs.
SMALL = {
    "export-to-serve": "",
    "choosing-a-budget": "samples, seconds, budgets = 50, 0.05, (1.0, 0.03125)",
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="not installed: pip install nbformat")
    nbclient = pytest.importorskip("nbclient", reason="not installed: pip install nbclient")
    pytest.importorskip("ipykernel", reason="not installed: pip install ipykernel")
    notebook = nbformat.read(path, as_version=4)
    place = next(
        place for place, cell in enumerate(notebook.cells)
        if "parameters" in cell.metadata.get("tags", ())
    )  # fmt: skip
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(SMALL[path.stem]))
    runner = nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}})
    runner.execute()
    said = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    assert said and not [out for out in said if out.output_type == "error"]
    assert any("image/png" in out.get("data", ()) for out in said)
