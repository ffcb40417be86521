# SPDX-License-Identifier: Apache-2.0
"""Show the notebooks of docs as pages with their outputs, which are stored in them.

Before MkDocs, with the project's own Python: python docs_site/notebooks.py. With `--run`, run each
notebook first and store what it prints: minutes, for which the machine should be idle.
"""

import argparse
import hashlib
import html
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PAGES = ROOT / "build" / "docs" / "pages" / "notebooks"
CODE = "code_sha256"  # in the metadata of a notebook: the code that printed its outputs
MACHINE = "cores_and_load"  # the same: cores, and the highest load average before and after
_SHOWN = ("image/png", "text/plain")  # the first that an output has is kept


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description="Write the notebooks as pages.")
    parser.add_argument("--run", action="store_true", help="run them first, and store the outputs")
    run = parser.parse_args().run
    PAGES.mkdir(parents=True, exist_ok=True)
    for path in NOTEBOOKS:
        if run:
            path.write_text(json.dumps(executed(path), indent=1, ensure_ascii=False) + "\n")
        (PAGES / f"{path.stem}.md").write_text(page(json.loads(path.read_text()), path.name))


def page(notebook: Mapping[str, Any], name: str) -> str:
    """Return a notebook as Markdown; its links are as in docs."""
    title, *cells = notebook["cells"]
    heading, _, rest = "".join(title["source"]).partition("\n")
    file = f'<a href="{name}" download>Download this notebook</a> and run it.'
    cores, load = notebook["metadata"][MACHINE]
    if load > cores / 2:
        file += f" These outputs are from {cores} cores at a load of {load:g}: speeds are noisy."
    return "\n\n".join([heading, file, rest.strip(), *(_text(cell) for cell in cells)]) + "\n"


def _text(cell: Mapping[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *map(_output, cell["outputs"])])


def _output(output: Mapping[str, Any]) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if image := data.get("image/png"):
        shown = html.escape("".join(data.get("text/plain", "output")), quote=True)
        return f'<img alt="{shown}" src="data:image/png;base64,{"".join(image).strip()}">'
    return f"```text\n{''.join(data['text/plain']).rstrip()}\n```"


def code_sha256(notebook: Mapping[str, Any]) -> str:
    """Return the hash of a notebook's code."""
    cells = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    return hashlib.sha256("\0".join("".join(cell["source"]) for cell in cells).encode()).hexdigest()


def executed(path: Path) -> dict[str, Any]:
    """Run a notebook in an empty folder, and return it with what it printed and drew."""
    import nbclient
    import nbformat

    notebook: dict[str, Any] = json.loads(path.read_text())
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place:
        run = nbformat.reads(json.dumps(notebook), as_version=4)
        nbclient.NotebookClient(
            run, timeout=3600, resources={"metadata": {"path": place}}
        ).execute()
    for cell, done in zip(notebook["cells"], run.cells, strict=True):
        if cell["cell_type"] == "code":
            cell["outputs"] = [*_kept(done.outputs)]
    load = round(max(load, os.getloadavg()[0]), 1)
    notebook["metadata"] |= {CODE: code_sha256(notebook), MACHINE: [os.cpu_count(), load]}
    return notebook


def _kept(outputs: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield what belongs on a page: no progress, no notes, and one form of each object."""
    for output in outputs:
        if output.output_type == "stream" and output.name == "stdout":
            text = re.sub(r"\x1b\[[0-9;]*m", "", output.text)
            yield {"output_type": "stream", "name": "stdout", "text": text.splitlines(True)}
        elif "data" in output:
            kind = next(kind for kind in _SHOWN if kind in output.data)
            yield {"output_type": "display_data", "metadata": {}, "data": {kind: output.data[kind]}}


if __name__ == "__main__":
    main()
