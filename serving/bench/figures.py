# SPDX-License-Identifier: Apache-2.0
"""A report's figures as text: scores in their unit, what a budget saves, and what policies gain."""

from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any

from saccade.core.errors import require
from saccade.exporter.artefact.frontier import POLICIES, ROUNDS

Figures = dict[str, Any]
# Units that add nothing to the score's name.
_PLAIN = ("index", "CIDEr-D")


def is_share(score: Figures) -> bool:
    """Return whether the score is a share in [0, 1], shown as a percentage."""
    return bool(score["unit"] == "share")


def shown(score: Figures, value: float) -> float:
    """Return a value of this score as it is printed and drawn: shares as percentages."""
    return 100 * value if is_share(score) else value


def score_text(score: Figures) -> str:
    """Return the value with a percent sign if it is a share."""
    value = shown(score, score["value"])
    return f"{value:.2f} %" if is_share(score) else f"{value:.3f}"


def bare_text(score: Figures) -> str:
    """Return the value for a column whose heading has the unit."""
    return score_text(score).removesuffix(" %")


def interval_text(score: Figures) -> str:
    """Return the 95 % interval."""
    if score["interval"] is None:
        return "-"
    low, high = (shown(score, bound) for bound in score["interval"])
    if is_share(score):
        return f"{low:.1f}-{high:.1f}"
    return f"{low:.3f} to {high:.3f}" if low < 0 else f"{low:.3f}-{high:.3f}"


def heading(score: Figures) -> str:
    """Return the name of the score with its unit."""
    if is_share(score):
        return f"{score['name']} %"
    if score["unit"] in _PLAIN or score["unit"] == score["name"]:
        return str(score["name"])
    return f"{score['name']} ({score['unit']})"


def throughput_of(variant: Figures) -> tuple[float, str]:
    """Return the throughput that represents a variant, and where it was measured.

    Units: inferences per second.
    """
    point, where = _speed_point(variant)
    return point["inferences_per_second"], where


def _speed_point(variant: Figures) -> tuple[Figures, str]:
    for kind, through in (("concurrency_", "gRPC"), ("router_concurrency_", "the router")):
        if names := points(variant["grpc"] or {}, kind):
            where = f"through {through}, concurrency {clients_of(names[-1])}"
            return variant["grpc"][names[-1]], where
    best = variant["in_process"]["best_batch"]
    return variant["in_process"][f"batch_{best}"], "in process, best batch"


def has_rounds(variants: Sequence[Figures]) -> bool:
    """Return whether costs were compared by rounds; older releases compared single figures."""
    return all(_speed_point(variant)[0].get(ROUNDS) for variant in variants)


def threads_text(threads: Iterable[int]) -> str:
    """Return the threads of one run, of several variants."""
    found = sorted(set(threads))
    words = "one" if found == [1] else " or ".join(map(str, found))
    return f"{words} thread{'s' * (found != [1])}"


def threads_of(variants: Sequence[Figures]) -> str:
    """Return the threads of the variants of a report; older reports lack them: one."""
    return threads_text(one["in_process"].get("threads", 1) for one in variants)


def ops_text(report: Figures) -> str:
    """Return how custom ops ran, if there are any; reports of older releases do not have it."""
    kinds = sorted({variant["ops"] for variant in report["variants"] if variant.get("ops")})
    return f"custom ops by {' and '.join(kinds)}" if kinds else ""


def saves_bytes(variant: Figures) -> bool:
    """Return whether the budget saves bytes of an embedding rather than time."""
    return variant.get("embedding_bytes") is not None


def cost_of(variant: Figures) -> float:
    """Return a variant's place in the image: bytes per embedding, or inferences per second."""
    return float(variant["embedding_bytes"]) if saves_bytes(variant) else throughput_of(variant)[0]


def split_text(data: Figures) -> str:
    """Return which samples of the report's data were scored."""
    split = data.get("split") or "test"  # absent in reports from before the option
    return "all samples" if split == "all" else f"the {split} split"


def works(variant: Figures) -> list[tuple[str, Figures, Figures | None]]:
    """Return each kind of request: its title, and its figures in process and through gRPC."""
    beside = [
        name for name, figures in variant["in_process"].items() if "best_batch" in _keys(figures)
    ]
    if not beside:
        return [(variant["variant"], variant["in_process"], variant["grpc"])]
    main = next((file["role"] for file in variant["files"] if file["role"] not in beside), "")
    served = variant["grpc"]
    return [
        (f"{variant['variant']} {main}".rstrip(), variant["in_process"], served),
        *(
            (f"{variant['variant']} {role}", variant["in_process"][role], served and served[role])
            for role in beside
        ),
    ]


def points(served: Iterable[str], prefix: str) -> list[str]:
    """Return the points through the server with this prefix, fewest clients first."""
    return sorted((name for name in served if name.startswith(prefix)), key=clients_of)


def clients_of(point: str) -> int:
    """Return the number of clients of a point through the server."""
    return int(point.rpartition("_")[2])


def policies_of(report: Figures) -> Sequence[Figures]:
    """Return the measured policies of a report; empty without any, as in older reports."""
    policies: Sequence[Figures] = report.get(POLICIES, ())
    return policies


def times_digits(times: float) -> str:
    """Return a ratio of throughputs with as many digits as it deserves, such as `2.4`."""
    return f"{times:.0f}" if times >= 100 else f"{times:.1f}" if times >= 1.95 else f"{times:.2f}"


def rate_text(rate: float) -> str:
    """Return a rate with no more digits than were measured."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _keys(value: Any) -> Any:
    return value if isinstance(value, dict) else ()


def times_text(ratio: Figures) -> str:
    """Return a ratio of throughputs with its interval, such as `2.4 times (95 %: 2.1 to 2.8)`."""
    if ratio["interval"] is None:
        return f"{times_digits(ratio['times'])} times (too few rounds for an interval)"
    low, high = map(times_digits, ratio["interval"])
    return f"{times_digits(ratio['times'])} times (95 %: {low} to {high})"


def sentences(report: Figures) -> list[str]:
    """Return what each policy gains and keeps, and which policies were left out and why."""
    left_out = report.get("policies_left_out", ())
    return [
        *(words("policy", one) for one in policies_of(report)),
        *(words("left_out", one) for one in left_out),
    ]


def words(macro: str, *values: Any) -> str:
    """Return a sentence of report_words.jinja, in which white space of any length is one space."""
    return " ".join(getattr(_macros(), macro)(*values).split())


@cache
def _macros() -> Any:
    jinja2 = require("jinja2", extra="bench")
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "cost": cost_of,
        "difference": _difference,
        "most_clients": lambda served: max(map(clients_of, served)),
        "ops": ops_text,
        "rate": rate_text,
        "score": score_text,
        "split": split_text,
        "spread": lambda variants: max(map(_spread, variants), default=1.0),
        "threads": threads_of,
        "throughput": lambda variant: throughput_of(variant)[0],
        "times": times_digits,
        "where": lambda variant: throughput_of(variant)[1],
    }
    return environment.from_string(own_text("report_words.jinja")).module


def own_text(name: str) -> str:
    """Return a template, script or style of the report."""
    return resources.files("saccade.serving.bench").joinpath(name).read_text("utf-8")


def _difference(score: Figures, value: float) -> str:
    """Return a difference between two values of a score as text."""
    apart = abs(shown(score, value))
    return f"{apart:.1f} points" if is_share(score) else f"{apart:.3f}"


def _spread(variant: Figures) -> float:
    """Return the ratio of the fastest to the slowest round of a variant's throughput."""
    rates = _speed_point(variant)[0].get(ROUNDS, ())
    if cost := variant.get("costs", {}).get("throughput"):
        rates = cost["least"], cost["most"]
    return float(max(rates) / min(rates)) if rates and min(rates) > 0 else 1.0
