# SPDX-License-Identifier: Apache-2.0
"""Write the sweeps of docs/budgets.md: figures into results, charts into docs/examples.

    python benchmarks/example_sweeps.py [build/sweep/example build/sweep/sparo]

Pass the folders of finished sweeps; their commands are in docs/budgets.md. Every example is then
drawn again from the committed figures. Report pages contain plotly.js, which is not committed, so
they go into build/examples.
"""

import sys
from pathlib import Path

from result_file import write_result

from saccade.core.files import write_atomically
from saccade.serving.bench.picture import frontier_png
from saccade.serving.bench.report import page, read_report

RESULTS = Path("benchmarks/results")
EXAMPLES = Path("docs/examples")
PAGES = Path("build/examples")


def main(folders: list[str]) -> None:
    """Copy the figures of these sweeps, without raw samples, and draw all examples."""
    for folder in folders:
        report = read_report(Path(folder) / "report" / "report.json")
        for variant in report["variants"]:
            del variant["samples"]
        report.pop("examples", None)
        write_result(RESULTS / f"sweep_{report['model']}.json", report)
    for path in sorted(RESULTS.glob("sweep_*.json")):
        report = read_report(path)
        picture = frontier_png(report)
        name = f"sweep-{report['model']}"
        write_atomically(EXAMPLES / f"{name}.png", picture)
        PAGES.mkdir(parents=True, exist_ok=True)
        write_atomically(PAGES / f"{name}.html", page(report, picture).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
