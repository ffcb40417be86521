# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/reliability.md from the table of faults and the result files.

Also writes the counts of changed files in docs/security.md, and the tables of docs/envoy.md.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chaos.file_tables import fuzzed, killed
from chaos.proxy_tables import apart, failover, proxied
from chaos.table import NO_CALLERS, ROWS, START, Notice, Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
PAGES = {  # page: its generated blocks
    PAGE: ("faults", "soak", "overload", "overload-proxy", "killed"),
    ROOT / "docs" / "security.md": ("fuzz",),
    ROOT / "docs" / "envoy.md": ("limits", "proxied", "proxied-one", "failover"),
}
RESULTS = ROOT / "benchmarks" / "results"
UNMEASURED = "Not measured yet."
# Aims of the overload benchmark under other names than in its result file.
_AIMS = {"full speed after it": "capacity after it", "refused at once": "immediate refusals"}


def write() -> None:
    """Fill in every marked block of the pages."""
    for path, names in PAGES.items():
        path.write_text(filled(path.read_text(), names=names))


def filled(text: str, results: Path = RESULTS, names: Sequence[str] = PAGES[PAGE]) -> str:
    """Return a page's text with its marked blocks written from the result files."""
    chaos, overload, commands = (
        _read(results / name) for name in ("chaos.json", "overload.json", "killed.json")
    )
    readers, graphs = (_read(results / f"fuzz_{name}.json") for name in ("readers", "graphs"))
    limits, through, through_one, struck = (
        _read(results / f"{name}.json")
        for name in (
            "overload_envoy_limits", "overload_envoy", "overload_envoy_one", "failover",
        )
    )  # fmt: skip
    in_turn = _read(results / "overload_proxy.json")
    blocks: dict[str, Callable[[], str]] = {
        "faults": lambda: faults(chaos),
        "soak": lambda: soak(chaos),
        "overload": lambda: overload_table(overload),
        "overload-proxy": lambda: apart(in_turn) if in_turn else UNMEASURED,
        "killed": lambda: killed(commands) if commands else UNMEASURED,
        "fuzz": lambda: fuzzed(readers, graphs) if readers and graphs else UNMEASURED,
        "limits": lambda: proxied(limits) if limits else UNMEASURED,
        "proxied": lambda: proxied(through) if through else UNMEASURED,
        "proxied-one": lambda: proxied(through_one) if through_one else UNMEASURED,
        "failover": lambda: failover(struck) if struck else UNMEASURED,
    }
    for name in names:
        start, end = f"<!-- {name}: written by `python -m chaos page` -->", f"<!-- end {name} -->"
        head, block, rest = text.partition(start)
        if not block:
            raise ValueError(f"the page has no block {start}")
        text = f"{head}{start}\n{blocks[name]()}\n{end}{rest.partition(end)[2]}"
    return text


def faults(chaos: dict[str, Any]) -> str:
    """Return the table of faults: what may be noticed, and what was."""
    lines = [
        "| fault | when | its callers may notice | others may notice | result |",
        "|---|---|---|---|---|",
    ]
    rows = chaos.get("rows", {})
    for row in ROWS:
        what = row.what[0].upper() + row.what[1:]
        others = "no other callers" if row.victim == "all" else _words(row.others)
        if row.moment == START:
            callers, others = "refused with exit code 2 and a message", "-"
        elif not row.survives:
            callers = "the service stops, nothing is left"
        else:
            callers = _words(row.callers)
        when = "under overload" if row.load == "open loop" else row.moment
        seen = _seen(row, rows.get(row.name))
        lines.append(f"| {what} | {when} | {callers} | {others} | {seen} |")
    return "\n".join([*lines, "", _machine(rows.values())]).rstrip()


def soak(chaos: dict[str, Any]) -> str:
    """Return the table of the soak and its control."""
    if not {"soak", "control"} <= set(chaos):
        return UNMEASURED
    lines = ["| | requests | memory | failed | restarts | verdict |", "|---|---|---|---|---|---|"]
    for name, title in (("soak", "the service"), ("control", "a router that leaks on purpose")):
        result = chaos[name]
        memory = next(check for check in result["checks"] if check["what"] == "memory grows")
        verdict = "flat" if memory["passed"] else "leaks"
        failed = sum(result["failed"].values())
        lines.append(
            f"| {title} | {result['requests']:,} | {_growth(memory['found'])} | {failed} | "
            f"{result['restarts']} | {verdict} |"
        )
    return "\n".join([*lines, "", _machine([chaos["soak"]])])


def overload_table(overload: dict[str, Any]) -> str:
    """Return the table of measured loads, and whether the aims were met."""
    if not overload:
        return UNMEASURED
    lines = [
        "| budgets | deadline | load | in time | goodput | p99 answered | refused after (p50, p99) "
        "| restarts | memory | capacity after it | aims missed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in overload["loads"]:
        refused = one["refused_ms"]
        times = f"{refused['p50']:.0f}, {refused['p99']:.0f} ms" if refused else "-"
        answered = one["answered_ms"]
        missed = ", ".join(_AIMS.get(name, name) for name, met in one["aims"].items() if not met)
        lines.append(
            f"| {one['budgets']} | {one['deadline_s']:g} s | {one['times']:g} x | "
            f"{100 * one['in_time'] / max(1, one['sent']):.0f} % | "
            f"{100 * one['goodput_of_capacity']:.0f} % of capacity | "
            f"{f'''{answered['p99']:.0f} ms''' if answered else '-'} | {times} | "
            f"{one['restarts']} | {one['memory_mib']['grown']:+.0f} MiB | "
            f"{100 * one['recovered_of_capacity']:.0f} % | {missed or 'none'} |"
        )
    greedy = overload.get("greedy")
    said = ""
    if greedy:
        said = (
            f"\nWhile one caller had {greedy['waiting']:,} requests waiting, another one sent one "
            f"request at a time: {greedy['same']['answered']} of {greedy['same']['calls']} were "
            f"answered at the same budget, {greedy['other']['answered']} of "
            f"{greedy['other']['calls']} at another one.\n"
        )
    return "\n".join([*lines, said + _refusals(overload), _machine([overload])])


def _refusals(overload: dict[str, Any]) -> str:
    """Return the cost of refusals alone at the highest load, which limits the goodput."""
    cost, cores = overload.get("refusal"), overload["machine"]["cores"]
    if not cost:
        return ""
    worst = max(overload["loads"], key=lambda one: float(one["offered"]))
    refused = max(0.0, worst["offered"] - worst["capacity_before"])
    each_us = cost["service_cpu_us"] + cost["generator_cpu_us"]
    return (
        f"\nA refused request takes {cost['service_cpu_us']:.0f} us of the service's "
        f"CPU time and {cost['generator_cpu_us']:.0f} us of the generator's. At "
        f"{worst['times']:g} times the capacity of `{worst['budgets']}`, refusing "
        f"{refused:,.0f} requests per second is work for {1e-6 * refused * each_us:.1f} cores, of "
        f"which there are {cores}, before a single answer is computed.\n"
    )


def _words(notice: Notice) -> str:
    if not notice.statuses:
        return "nothing"
    names = " or ".join(sorted(notice.statuses))
    return f"{names} for at most {notice.for_s:g} s" if notice.for_s else names


def _growth(found: str) -> str:
    return re.sub(r"^1 bytes", "1 byte", found.replace(" a request", " per request")) + " more"


def _past(what: str) -> str:
    return what.replace(" hear", " got")


def _seen(row: Row, observed: dict[str, Any] | None) -> str:
    if observed is None:
        return "not measured yet"
    if "untried" in observed:
        return f"not tried: {observed['untried']}"
    tries = [attempt for attempt in observed["tries"] if "untried" not in attempt]
    held = sum(attempt["passed"] for attempt in tries)
    outages = [
        group["outage_s"] for attempt in tries for group in attempt.get("callers", {}).values()
    ]  # fmt: skip
    often = f"as expected {held} of {len(tries)} times"
    if len(tries) <= 1:
        often = "as expected" if held else "not as expected"
    if held < len(tries):
        wrong = {
            f"{_past(check['what'])}: {check['found']}".replace("|", "/").replace("\n", " ")
            for attempt in tries
            for check in attempt["checks"]
            if not check["passed"]
        }
        often = f"**{often}** ({'; '.join(sorted(wrong))[:200]})"
    worst = max(outages, default=0.0)
    quiet = row.moment == START or row.load == NO_CALLERS or not row.survives or worst < 0.05
    return often if quiet else f"{often}, {worst:.1f} s"


def _machine(machine: Any) -> str:
    machines = {
        f"{each['machine']['device']}, {each['machine']['runtime']}"
        for each in machine
        if "machine" in each
    }
    return f"Measured on {'; '.join(sorted(machines))}." if machines else UNMEASURED


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.exists() else {}
