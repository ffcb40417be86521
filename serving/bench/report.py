# SPDX-License-Identifier: Apache-2.0
"""Show a benchmark's figures as tables, an image and a page, all from one JSON object.

The page has charts by plotly.js; tables and answers are plain HTML. It loads nothing. Its policy
lists the hash of every script and style that may run, so text that escaped the escaping would not
run. Without scripts, the tables and the image remain.

`python -m saccade.serving.bench.report build/report/report.json` draws the image and the page
again.
"""

import base64
import hashlib
import json
import re
import sys
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from saccade.core.errors import Damaged, SaccadeError, require
from saccade.core.escaping import escaped
from saccade.core.files import write_atomically
from saccade.core.schema import read_json
from saccade.serving.bench.figures import (
    cost_of,
    is_share,
    own_text,
    saves_bytes,
    sentences,
    split_text,
    words,
)
from saccade.serving.bench.picture import frontier_png
from saccade.serving.bench.report_charts import charts, short_name
from saccade.serving.bench.report_tables import WORDS, tables

SCHEMA = "saccade.report"
VERSION = 2
_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_NEAR = 0.03  # small loss: absolute for shares, else relative to the largest variant's score
# Styles for maps, which plotly.js adds unless an element with that id exists. No map is drawn.
_STYLE_ID = re.compile(r'getElementById\("([0-9a-f]{64})"\)')


def render(report: dict[str, Any]) -> Any:
    """Return the tables for a terminal, as one rich renderable."""
    from rich.console import Group
    from rich.text import Text

    parts = [part for table in tables(report) for part in (table.to_text(), "")]
    return Group(*parts, *map(Text, sentences(report)), Text(words("summary", report)))


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write report.json, frontier.png and report.html into an existing folder."""
    compact = json.dumps(report, sort_keys=True, allow_nan=False, separators=(",", ":"))
    write_atomically(folder / "report.json", (compact + "\n").encode())
    draw(report, folder)


def draw(report: dict[str, Any], folder: Path) -> None:
    """Write frontier.png and report.html. The page needs no other file."""
    picture = frontier_png(report)
    whole = page(report, picture).encode()
    write_atomically(folder / "frontier.png", picture)
    write_atomically(folder / "report.html", whole)


def page(report: dict[str, Any], picture: bytes) -> str:
    """Return the report as one self-contained HTML page.

    Raises: MissingPackage without plotly or jinja2.
    """
    jinja2 = require("jinja2", extra="bench")
    library, script, style = _library(), own_text("report.js"), own_text("report.css")
    # Text is escaped for HTML, unless it is ours.
    ours = {"library": library, "script": script, "style": style}
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined, finalize=_spelled_out
    )
    environment.filters |= {
        "answers": lambda example: list(example["answers"].values()),
        "differs": lambda example: len({one["score"] for one in example["answers"].values()}) > 1,
        "png": _png,
        "short": lambda variant: short_name(report, variant["variant"]),
        "split": split_text,
    }
    environment.tests["share"] = is_share
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    whole: str = environment.from_string(own_text("report.html")).render(
        **{name: environment.filters["safe"](text) for name, text in ours.items()},
        report=report,
        headline=headline(report),
        summary=words("summary", report),
        alternative=words("alternative", report),
        # An empty style, to which plotly.js adds its rules by script.
        script_hashes=[_hash(library), _hash(script)],
        style_hashes=[_hash(""), _hash(style)],
        policies=sentences(report),
        picture=base64.b64encode(picture).decode(),
        tables=tables(report),
        words=WORDS,
        files=[file for variant in report["variants"] for file in variant["files"]],
        charts=_spelled_out(charts(report)),
        unused=sorted(set(_STYLE_ID.findall(library))),
    )
    return whole


def headline(report: dict[str, Any]) -> str:
    """Compare the cheapest variant that loses little with the largest, in a sentence."""
    full, *_ = variants = report["variants"]
    kept = [variant for variant in variants if variant["dominated_by"] is None]
    score, value = full["score"], full["score"]["value"]
    sign = 1 if score["higher_is_better"] else -1
    little = _NEAR if is_share(score) else _NEAR * abs(value)
    near = [
        variant
        for variant in kept
        if variant is not full and sign * (value - variant["score"]["value"]) <= little
    ]
    cheapest = min if saves_bytes(full) else max
    return words("headline", report, kept, cheapest(near, key=cost_of, default=None), little)


def _spelled_out(content: Any) -> Any:
    """Return content with marks that reverse text spelled out in its texts, as in a terminal."""
    if isinstance(content, dict):
        return {key: _spelled_out(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_spelled_out(item) for item in content]
    # Text that is marked as HTML is ours, or was spelled out before.
    return escaped(content) if type(content) is str else content


@cache
def _library() -> str:
    """Return plotly.js from the installed package.

    Raises: SaccadeError if it cannot be embedded in a page.
    """
    package = require("plotly", extra="bench")
    file = resources.files(package).joinpath("package_data", "plotly.min.js")
    # A browser reads any line ending as one character, and hashes what it reads.
    text = file.read_bytes().decode().replace("\r\n", "\n").strip("\n")
    if "</script" in text.lower() or "<!--" in text or "\r" in text:
        raise SaccadeError(
            "plotly.min.js of the installed plotly package cannot be embedded in a page. Install "
            "another release: pip install 'plotly>=6'"
        )
    return text


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _png(data: str) -> str:
    """Return the address of an image from a file: it must be base64 and nothing else."""
    clean = base64.b64encode(base64.b64decode(data, validate=True)).decode()
    return f"data:image/png;base64,{clean}"


def read_report(path: Path) -> dict[str, Any]:
    """Read a report.json that `write_report` wrote.

    Raises: SaccadeError for a missing or foreign file, or an unknown version.
    """
    report = read_json(path, "saccade bench")
    if (version := (report.get("schema"), report.get("version"))) != (SCHEMA, VERSION):
        why = f"has schema and version {version}, expected {(SCHEMA, VERSION)}"
        raise Damaged(path, why, "saccade bench")
    return report


def draw_again(path: Path) -> None:
    """Draw the image and the page again, next to a report.json and from it alone.

    Raises: SaccadeError if `read_report` refuses the file, or the report is incomplete.
    """
    report = read_report(path)
    incomplete: type[Exception] = require("jinja2", extra="bench").UndefinedError
    try:
        draw(report, path.parent)
    except (*_DAMAGE, incomplete) as error:
        raise Damaged(path, f"incomplete or edited ({error!r:.100})", "saccade bench") from error


if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            draw_again(Path(name))
    except SaccadeError as error:
        sys.exit(str(error))
