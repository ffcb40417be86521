# SPDX-License-Identifier: Apache-2.0
"""Tables about commands that are killed at any moment, and readers of changed files."""

from typing import Any

SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
FULL = "ENOSPC"
EXAMPLES = 100_000  # wanted number of changed files of each kind
_HEAD = ("command", *SIGNALS, "full disk", "wrong")


def killed(result: dict[str, Any]) -> str:
    """Return the table of trials per command: planned, run, and what was wrong."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    by_command: dict[str, dict[str, dict[str, Any]]] = {}
    for tally in result["results"]:
        by_command.setdefault(tally["command"], {})[tally["fault"]] = tally
    for name, tallies in by_command.items():
        cells = [_counts(tallies.get(fault)) for fault in (*SIGNALS, FULL)]
        lines.append("| " + " | ".join([f"`{name}`", *cells, _wrong(tallies)]) + " |")
    nothing = ["0", "0", "0", "0", "not run yet"]
    lines += [
        "| " + " | ".join([f"`{name}`", *nothing]) + " |" for name in result.get("not_run", ())
    ]
    every = result["results"]
    run, planned, effect = (
        sum(each[key] for each in every) for key in ("run", "planned", "took_effect")
    )
    disks = sorted({run["full_disk"] for run in result["runs"].values()} - {"none"})
    said = (
        f"Of {planned:,} planned trials, {run:,} were run, and {effect:,} took effect. In the "
        "others the command had finished before its moment, or had enough room. Full disks: "
        f"{', '.join(disks) or 'none'}."
    )
    return "\n".join([*lines, "", said])


def _counts(tally: dict[str, Any] | None) -> str:
    if not tally or not tally["planned"]:
        return "-"
    run, planned = tally["run"], tally["planned"]
    return f"{run}" if run == planned else f"{run} of {planned}"


def _wrong(tallies: dict[str, dict[str, Any]]) -> str:
    faults = [fault for tally in tallies.values() for fault in tally["faults"]]
    if not any(tally["run"] for tally in tallies.values()):
        return "not run yet"
    if not faults:
        return "nothing"
    first = faults[0]["wrong"][0].replace("|", "/").replace("\n", " ")
    return f"**in {len(faults)}** ({first[:150]})"


def fuzzed(readers: dict[str, Any], graphs: dict[str, Any]) -> str:
    """Return how many changed files every reader got, and the results."""
    lines = []
    for title, counts in (
        ("Readers of files", readers["readers"]),
        ("ONNX graphs and manifests", {f"{name}s": kind for name, kind in graphs["kinds"].items()}),
    ):
        every = counts.values()
        total, failed = (
            sum(each.get(key, 0) for each in every) for key in ("examples", "failed")
        )  # fmt: skip
        slowest = max(each.get("slowest_seconds", 0.0) for each in every)
        largest = max(each.get("largest_mib", 0) for each in every)
        short = [
            f"{name} {count['examples']:,}"
            for name, count in counts.items()
            if count["examples"] < EXAMPLES
        ]
        lines.append(
            f"- **{title}**, {len(counts)} kinds: {total:,} files, {failed:,} stack traces. The "
            f"slowest file took {slowest:.1f} s, the largest process used {largest:,} MiB. Kinds "
            f"with fewer than {EXAMPLES:,} files: {', '.join(short) or 'none'}."
        )
    return "\n".join(lines)
