# SPDX-License-Identifier: Apache-2.0
"""Write a report as one HTML page: charts by plotly.js, tables and answers as plain HTML.

The page loads nothing. Its policy lists the hash of every script and style that may run, so text
that escaped the escaping would not run. Without scripts, the tables and the image remain.
"""

import base64
import hashlib
import html
import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from saccade.core.errors import SaccadeError, require
from saccade.core.escaped import escaped
from saccade.serving.bench.figures import is_share, split_text
from saccade.serving.bench.report_charts import charts, short_name
from saccade.serving.bench.report_policies import sentences
from saccade.serving.bench.report_tables import WORDS, ReportTable, tables

# Styles for maps, which plotly.js adds unless an element with that id exists. No map is drawn.
_STYLE_ID = re.compile(r'getElementById\("([0-9a-f]{64})"\)')
_FACTS = (
    ("processor", "Processor"), ("cores", "Cores"), ("memory_mib", "Memory, MiB"),
    ("load_average", "Load average at the start"), ("system", "System"), ("python", "Python"),
    ("runtime", "Runtime"),
)  # fmt: skip


@dataclass(frozen=True)
class Words:
    """The texts of a page: title, finding, what was measured, and a description of the image."""

    title: str
    headline: str
    summary: str
    alternative: str


def whole_page(report: dict[str, Any], picture: bytes, words: Words) -> str:
    """Return the page as HTML.

    Raises: MissingPackage without plotly.
    """
    library, script, style = _library(), _own("report.js"), _own("report.css")
    return string.Template(_own("report.html")).substitute(
        policy=_policy((library, script), ("", style)),
        style=style,
        title=escape(words.title),
        headline=escape(words.headline),
        summary=escape(words.summary),
        policies=_policies(report),
        alt=escape(words.alternative),
        picture=base64.b64encode(picture).decode(),
        examples=_examples(report),
        tables="\n".join(_table(table) for table in tables(report)),
        machine=_machine(report),
        data=_json(charts(report)),
        unused="".join(f'<template id="{name}"></template>' for name in _style_ids(library)),
        library=library,
        script=script,
    )


def escape(text: str) -> str:
    """Escape text for HTML; characters that reverse text are spelled out, as in a terminal."""
    return html.escape(escaped(text))


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


def _style_ids(library: str) -> list[str]:
    return sorted(set(_STYLE_ID.findall(library)))


def _policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Return the Content-Security-Policy: these scripts and styles, and embedded images."""
    return (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; "
        f"style-src {' '.join(map(_hash, styles))}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(content: Any) -> str:
    """Return JSON for a script element; no text in it can end the element."""
    text = json.dumps(_shown(content), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _shown(content: Any) -> Any:
    """Return the content with every string escaped as for a terminal."""
    if isinstance(content, str):
        return escaped(content)
    if isinstance(content, dict):
        return {key: _shown(value) for key, value in content.items()}
    return [_shown(item) for item in content] if isinstance(content, list | tuple) else content


def _table(table: ReportTable) -> str:
    head = "".join(
        f'<th scope="col"{_aligned(column)}>{escape(column)}</th>' for column in table.columns
    )
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(map(_cell, table.columns[1:], row[1:]))
        + "</tr>"
        for row in table.rows
    )
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    title = escape(table.title)
    return (
        f'<section><h3>{title}</h3><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{title}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}</section>"
    )


def _cell(column: str, cell: str) -> str:
    return f"<td{_aligned(column)}>{escape(cell)}</td>"


def _aligned(column: str) -> str:
    return ' class="words"' if column in WORDS else ""


def _machine(report: dict[str, Any]) -> str:
    machine = report["machine"]
    facts = [(name, machine[key]) for key, name in _FACTS if key in machine]
    facts += [("Server", report["server"] or "none"), ("Measured", report.get("date", ""))]
    facts += sorted(machine.get("versions", {}).items())
    cells = [f"<div><dt>{escape(str(k))}</dt><dd>{escape(_fact(v))}</dd></div>" for k, v in facts]
    files = [
        (file["name"], file["sha256"])
        for variant in report["variants"]
        for file in variant["files"]
    ]
    hashes = [
        (f"{report['data']['name']} ({split_text(report['data'])})", report["data"]["sha256"]),
        *files,
    ]
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="hash">{escape(sha256)}</td></tr>'
        for name, sha256 in hashes
    )
    return (
        f'<dl class="facts">{"".join(cells)}</dl><details><summary>SHA-256 of the data and of '
        f"{len(files)} file{'s' * (len(files) != 1)}</summary>"
        '<div class="scroll" tabindex="0" role="region" aria-label="SHA-256"><table><tbody>'
        f"{rows}</tbody></table></div></details>"
    )


def _fact(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _examples(report: dict[str, Any]) -> str:
    """Return samples with every variant's answer, or an empty string if the report has none."""
    examples = report.get("examples") or {}
    if not examples.get("shown"):
        return ""
    focus = any(
        answer["focus"] for example in examples["shown"] for answer in example["answers"].values()
    )
    seen = " The image next to an answer shows where the model looked, or its slots." * focus
    note = f"{_chosen(report, examples)}{seen}"
    cards = "".join(_example(report, example) for example in examples["shown"])
    return (
        '<section aria-labelledby="answers"><h2 id="answers">Sample answers at every budget</h2>'
        f'<p>{escape(note)}</p><div class="cards">{cards}</div></section>'
    )


def _chosen(report: dict[str, Any], examples: dict[str, Any]) -> str:
    """Describe how the samples were chosen."""
    differ, every = examples["disagreements"], examples["samples"]
    if len(report["variants"]) == 1:
        return f"These are the first of {every:,} test samples."
    if not differ:
        return (
            f"All variants score the same on each of the {every:,} test samples. These are the "
            "first samples."
        )
    agree = any(not _differs(example) for example in examples["shown"])
    also = ", then some on which the variants agree" * agree
    return (
        f"On {differ:,} of {every:,} test samples the variants score differently. The samples "
        f"whose scores are furthest apart come first{also}."
    )


def _example(report: dict[str, Any], example: dict[str, Any]) -> str:
    number = f"Test sample {example['index']}"
    question = f'<p class="question">{escape(example["question"])}</p>' * bool(example["question"])
    truth = f"<p>True answer: <b>{escape(example['truth'])}</b></p>" * bool(example["truth"])
    answers = example["answers"]
    mark = '<span class="tag">budgets differ</span>' * _differs(example)
    rows = "".join(
        _answer(report, variant, answers[variant["variant"]])
        for variant in report["variants"]
        if variant["variant"] in answers
    )
    picture = _image(example["image"], f"{number}, {example['truth'] or 'an image'}", "sample")
    return (
        f'<article class="card"><header><h3>{number}</h3>{mark}</header>'
        f'<div class="asked">{picture}<div>{question}{truth}</div></div>'
        f'<table class="answers"><tbody>{rows}</tbody></table></article>'
    )


def _differs(example: dict[str, Any]) -> bool:
    scores = [answer["score"] for answer in example["answers"].values()]
    return bool(max(scores) > min(scores))


def _answer(report: dict[str, Any], variant: dict[str, Any], answer: dict[str, Any]) -> str:
    name = short_name(report, variant["variant"])
    value = answer["score"]
    is_yes_or_no = is_share(variant["score"]) and value in (0, 1)
    verdict = (
        ("right" if value else "wrong")
        if is_yes_or_no
        else (f"{variant['score']['name']} {value:.2f}")
    )
    sign = {"right": "✓ ", "wrong": "✗ "}.get(verdict, "")
    css = f' class="{verdict}"' if is_yes_or_no else ""
    sure = ""
    if (confidence := answer["confidence"]) is not None:
        share = f"{100 * confidence:.0f} %"
        sure = f'<meter min="0" max="1" value="{confidence:.4f}">{share}</meter> {share}'
    focus = _image(answer["focus"], f"What {name} looked at", "focus")
    text = f"{escape(answer['text'])} " * bool(answer["text"])
    return (
        f'<tr><th scope="row">{escape(name)}</th><td>{focus}</td><td class="words">{text}'
        f'<span{css}>{sign}{escape(verdict)}</span></td><td class="sure">{sure}</td></tr>'
    )


def _policies(report: dict[str, Any]) -> str:
    """Return what each policy gains, as a list; an empty string without policies."""
    items = "".join(f"<li>{escape(one)}</li>" for one in sentences(report))
    return f'<ul class="policies">{items}</ul>' if items else ""


def _image(data: str | None, alt: str, css: str) -> str:
    if not data:
        return ""
    # The data comes from a file: it must be base64 and nothing else.
    clean = base64.b64encode(base64.b64decode(data, validate=True)).decode()
    return f'<img class="{css}" alt="{escape(alt)}" src="data:image/png;base64,{clean}">'
