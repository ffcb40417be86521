# SPDX-License-Identifier: Apache-2.0
"""Policies in a report: a sentence for each, its tables, and its places in charts."""

import math
from collections.abc import Sequence
from typing import Any

from saccade.exporter.artefact.frontier import POLICIES
from saccade.serving.bench.figures import (
    bare_text,
    heading,
    interval_text,
    points,
    saves_bytes,
    score_text,
    shown,
)

LEFT_OUT = "policies_left_out"
Figures = dict[str, Any]


def policies_of(report: Figures) -> Sequence[Figures]:
    """Return the measured policies of a report; empty without any, as in older reports."""
    policies: Sequence[Figures] = report.get(POLICIES, ())
    return policies


def sentences(report: Figures) -> list[str]:
    """Return what each policy gains and keeps, and which policies were left out and why."""
    left_out = [
        f"Policy {one['policy']} was not measured: {one['reason'].rstrip('.')}."
        for one in report.get(LEFT_OUT, ())
    ]
    return [*map(sentence, policies_of(report)), *left_out]


def sentence(policy: Figures) -> str:
    """Compare a policy with the full model: throughput, answers, certificate."""
    parts = [f"Policy {policy['policy']}{_gained(policy)} {_same(policy)}."]
    if policy["calibrated"]:
        parts.append("They include those that calibrated it: for others, the certificate counts.")
    elif exceeded := _exceeded(policy):
        parts.append(exceeded)
    parts.append(_certified(policy))
    if served := policy["times_full_served"]:
        most = points(policy["grpc"], "router_concurrency_")[-1].rpartition("_")[2]
        parts.append(
            f"Through the router with {most} client{'s' * (most != '1')}: "
            f"{times_digits(served['times'])} times the throughput{_interval(served)}."
        )
    if len(policy["steps"]) == 1:
        parts.append(f"The policy is {policy['steps'][0]['variant']} alone.")
    return " ".join(parts)


def times_digits(times: float) -> str:
    """Return a ratio of throughputs with as many digits as it deserves, such as `2.4`."""
    return f"{times:.0f}" if times >= 100 else f"{times:.1f}" if times >= 1.95 else f"{times:.2f}"


def times_text(ratio: Figures) -> str:
    """Return a ratio of throughputs with its interval, such as `2.4 times (95 %: 2.1 to 2.8)`."""
    return f"{times_digits(ratio['times'])} times{_interval(ratio)}"


def _gained(policy: Figures) -> str:
    ratio = policy["times_full"]
    times = f"{times_digits(ratio['times'])} times"
    where = " in process" if policy["times_full_served"] else ""
    low, high = ratio["interval"] or (0.0, 2.0)
    if low > 1:
        return f": {times} the throughput of the full model{where}{_interval(ratio)}"
    found = "is slower" if high < 1 else "is not shown to be faster"
    return f" {found} than the full model{where}: {times} its throughput{_interval(ratio)},"


def _same(policy: Figures) -> str:
    count = f"{policy['score']['n']:,} test samples"
    same, least = "answer", policy.get("min_ari")  # older reports lack this key
    if least is not None:
        same, count = "segmentation", f"{count} (ARI of {least:g} or more)"
    if policy["agreement"] == 1:
        return f"at the same {same}s on all {count}"
    return f"at the same {same} on {100 * policy['agreement']:.2f} % of {count}"


def _certified(policy: Figures) -> str:
    risk, sure = f"{100 * policy['risk']:g}", f"{100 * policy['confidence']:g} %"
    lost = f"at most {risk} % of the answers differ"
    if policy["against"] == "labels":
        lost = f"the accuracy is at most {risk} points lower"
    return f"Certified with {sure} confidence: {lost}, on data like the calibration's."


def _exceeded(policy: Figures) -> str:
    """Return a warning if more is lost on this data than certified."""
    if policy["against"] == "full":
        lost, least = 1 - policy["agreement"], 1 - policy["agreement_interval"][1]
    else:
        lost, least = -policy["gain"], -policy["gain_interval"][1]
    if lost <= policy["risk"]:
        return ""
    more = f"On these samples {100 * lost:.2f} % are lost, more than certified"
    if least <= policy["risk"]:
        return f"{more}, which can be chance."
    return f"{more}: they are harder than the calibration's. Calibrate on data like this."


def _interval(ratio: Figures) -> str:
    if ratio["interval"] is None:
        return " in a single round"
    low, high = map(times_digits, ratio["interval"])
    return f" (95 %: {low} to {high})"


def policy_rows(report: Figures) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return headings and a row per policy."""
    policies = policies_of(report)
    served = any(policy["times_full_served"] for policy in policies)
    columns = (
        "policy", heading(policies[0]["score"]), "95 %", "same %", "risk %", "per second",
        "x full", "95 %", *["x served"] * served,
    )  # fmt: skip
    return columns, tuple(_row(policy, served) for policy in policies)


def _row(policy: Figures, served: bool) -> tuple[str, ...]:
    times, inside = policy["times_full"], policy["in_process"]
    rate = inside[f"batch_{inside['best_batch']}"]["inferences_per_second"]
    low, high = times["interval"] or (math.nan, math.nan)
    through = policy["times_full_served"]
    return (
        policy["policy"],
        bare_text(policy["score"]),
        interval_text(policy["score"]),
        f"{100 * policy['agreement']:.2f}",
        f"{100 * policy['risk']:g}",
        f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}",
        times_digits(times["times"]),
        "-" if times["interval"] is None else f"{times_digits(low)}-{times_digits(high)}",
        *([times_digits(through["times"]) if through else "-"] * served),
    )


def step_rows(report: Figures) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return headings and a row per step of each policy."""
    rows = tuple(
        (
            policy["policy"],
            str(number),
            str(step["variant"]),
            f"{100 * step['share']:.1f}",
            "always" if step["threshold"] is None else f"{step['threshold']:.4f}",
        )
        for policy in policies_of(report)
        for number, step in enumerate(policy["steps"], 1)
    )
    return ("policy", "step", "by", "ends here %", "if confidence reaches"), rows


def marks(report: Figures) -> list[Figures]:
    """Return the policies as points of a chart: names, scores and texts."""
    return [_mark(policy) for policy in policies_of(report)]


def _mark(policy: Figures) -> Figures:
    score = policy["score"]
    low, high = (shown(score, bound) for bound in score["interval"])
    chain = " → ".join(f"{s['variant']} {100 * s['share']:.0f} %" for s in policy["steps"])
    return {
        "name": policy["policy"],
        "chain": chain,
        "score": shown(score, score["value"]),
        "low": low,
        "high": high,
        "score_text": score_text(score),
        "interval_text": interval_text(score),
        "same": f"{100 * policy['agreement']:.2f} %",
        "risk": f"{100 * policy['risk']:g} %",
    }


def can_be_drawn(report: Figures) -> bool:
    """Return whether policies belong into the image, whose axis may be bytes instead of speed."""
    return bool(policies_of(report)) and not saves_bytes(report["variants"][0])
