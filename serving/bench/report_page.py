# SPDX-License-Identifier: Apache-2.0
"""Write a report as one HTML page: charts by plotly.js, tables and answers as plain HTML.

The page loads nothing. Its policy lists the hash of every script and style that may run, so text
that escaped the escaping would not run. Without scripts, the tables and the image remain.
"""

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import Any

from saccade.core.errors import SaccadeError, require
from saccade.core.escaping import escaped
from saccade.serving.bench.figures import is_share, sentences, split_text
from saccade.serving.bench.report_charts import charts, short_name
from saccade.serving.bench.report_tables import WORDS, tables

# Styles for maps, which plotly.js adds unless an element with that id exists. No map is drawn.
_STYLE_ID = re.compile(r'getElementById\("([0-9a-f]{64})"\)')
_FACTS = {
    "processor": "Processor", "cores": "Cores", "memory_mib": "Memory, MiB",
    "load_average": "Load average at the start", "system": "System", "python": "Python",
    "runtime": "Runtime",
}  # fmt: skip


def whole_page(report: dict[str, Any], picture: bytes, **texts: str) -> str:
    """Return the page as HTML.

    `texts` are its title and headline, the summary of what was measured, and the `alternative` to
    the image.
    Raises: MissingPackage without plotly or jinja2.
    """
    jinja2 = require("jinja2", extra="bench")
    library, script, style = _library(), _own("report.js"), _own("report.css")
    # Text is escaped for HTML, unless it is ours.
    ours = {"library": library, "script": script, "style": style}
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined, finalize=_spelled_out
    )
    environment.filters["png"] = _png
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    page: str = environment.from_string(_own("report.html")).render(
        **{name: environment.filters["safe"](text) for name, text in ours.items()},
        **texts,
        # An empty style, to which plotly.js adds its rules by script.
        script_hashes=[_hash(library), _hash(script)],
        style_hashes=[_hash(""), _hash(style)],
        policies=sentences(report),
        picture=base64.b64encode(picture).decode(),
        examples=_examples(report),
        tables=tables(report),
        words=WORDS,
        facts=_facts(report),
        files=[file for variant in report["variants"] for file in variant["files"]],
        data={**report["data"], "split": split_text(report["data"])},
        charts=_spelled_out(charts(report)),
        unused=sorted(set(_STYLE_ID.findall(library))),
    )
    return page


def _spelled_out(content: Any) -> Any:
    """Return content with marks that reverse text spelled out in its texts, as in a terminal."""
    if isinstance(content, dict):
        return {key: _spelled_out(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_spelled_out(item) for item in content]
    # Text that is marked as HTML is ours, or was spelled out before.
    return escaped(content) if type(content) is str else content


def _own(name: str) -> str:
    return resources.files("saccade.serving.bench").joinpath(name).read_text("utf-8")


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


def _facts(report: dict[str, Any]) -> dict[str, str]:
    machine = report["machine"]
    facts = {name: machine[key] for key, name in _FACTS.items() if key in machine}
    facts |= {"Server": report["server"] or "none", "Measured": report.get("date", "")}
    facts |= dict(sorted(machine.get("versions", {}).items()))
    return {
        name: f"{value:.2f}" if isinstance(value, float) else str(value)
        for name, value in facts.items()
    }


def _examples(report: dict[str, Any]) -> dict[str, Any]:
    """Return samples with every variant's answer; nothing if the report has none."""
    examples = report.get("examples") or {}
    shown = []
    for example in examples.get("shown", ()):
        answers = _answers(report, example["answers"])
        differs = len({answer["score"] for answer in answers}) > 1
        shown.append({**example, "answers": answers, "differs": differs})
    return {**examples, "shown": shown} if shown else {}


def _answers(report: dict[str, Any], answers: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answers to one sample with the variants' short names and their verdicts."""
    rows = []
    for variant in report["variants"]:
        if answer := answers.get(variant["variant"]):
            score, name = answer["score"], short_name(report, variant["variant"])
            kind, verdict = "", f"{variant['score']['name']} {score:.2f}"
            if is_share(variant["score"]) and score in (0, 1):
                kind, verdict = ("right", "✓ right") if score else ("wrong", "✗ wrong")
            rows.append({**answer, "name": name, "kind": kind, "verdict": verdict})
    return rows
