# SPDX-License-Identifier: Apache-2.0
"""Take the screenshots of a report page in docs/budgets.md with Debian's Chromium.

python benchmarks/report_pictures.py build/sweep/example/report/report.html
"""

import sys
from pathlib import Path

sys.path.insert(0, "tests")
from browsers import browser, tab

TARGET = Path("docs/examples")
DESKTOP = {"viewport": {"width": 1100, "height": 1010}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2.0}


def main(page: Path) -> None:
    """Take the frontier with a point's figures in light colors, and the answers on a dark phone."""
    with browser() as running:
        with tab(running, page.resolve().as_uri(), **DESKTOP) as shown:
            shown.page.wait_for_selector("#stages-plot .main-svg")
            shown.page.locator("#frontier-plot .scatterlayer .points path").nth(1).hover(force=True)
            shown.page.wait_for_selector("#frontier-plot .hovertext")
            shown.page.screenshot(path=TARGET / "report.png")
        with tab(running, page.resolve().as_uri(), color_scheme="dark", **PHONE) as shown:
            shown.page.wait_for_selector("#stages-plot .main-svg")
            shown.page.locator("#answers").evaluate("element => element.scrollIntoView()")
            shown.page.screenshot(path=TARGET / "report-phone.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
