# SPDX-License-Identifier: Apache-2.0
"""The pieces of a finished sweep become entries of the frontier and a report."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from saccade.export.artefact.frontier import Entry
from saccade.machine import Machine
from saccade.plugins.execution import Ops
from saccade.serving.bench.in_process import Calls, InProcess
from saccade.serving.bench.load import LoadResult
from saccade.serving.bench.report_content import Measurement, add_served, content, raw_samples
from saccade.serving.bench.scored import entry_of_found
from saccade.serving.bench.served import Place
from saccade.serving.bench.sweep.axes import Figures, as_json, figures, frontiers
from saccade.serving.bench.sweep.options import SweepOptions
from saccade.serving.bench.sweep.ready import Ready
from saccade.serving.bench.sweep.state import SweepFolder
from saccade.serving.bench.sweep.turns import in_process_turns, served_results


def entry_without_server(
    state: SweepFolder, each: Ready, options: SweepOptions, machine: Machine
) -> Entry:
    """The frontier's entry before anything went through a server."""
    inside = _joined(each, in_process_turns(state, each, options.rounds))
    return entry_of_found(each.variant, each.found, inside, machine, _ops(options))


def assemble(
    state: SweepFolder, ready: Sequence[Ready], options: SweepOptions, machine: Machine
) -> tuple[dict[str, Any], tuple[Entry, ...]]:
    """The report, and the entries with who dominates whom."""
    found = [_measurement(state, each, options, machine) for each in ready]
    values = {each.variant.name: each.found.samples for each in ready}
    costs = {one.entry.variant: each for one, each, _ in found}
    entries, dominated = frontiers([one.entry for one, _, _ in found], costs, values)
    measured = [
        replace(one, entry=entry) for (one, _, _), entry in zip(found, entries, strict=True)
    ]
    full = content(measured, options)
    for variant in full["variants"]:
        name = variant["variant"]
        variant["costs"] = as_json(name, costs[name], dominated)
    servers = {version for _, _, version in found if version}
    full |= {"machine": machine.to_dict(), "server": ", ".join(sorted(servers)) or None}
    # A finished sweep that is asked for again was not measured now.
    full["date"] = datetime.fromtimestamp(state.last_written, UTC).isoformat(timespec="seconds")
    return full, entries


def _measurement(
    state: SweepFolder, each: Ready, options: SweepOptions, machine: Machine
) -> tuple[Measurement, Figures, str]:
    turns = in_process_turns(state, each, options.rounds)
    inside = _joined(each, turns)
    entry = entry_of_found(each.variant, each.found, inside, machine, _ops(options))
    samples = raw_samples(each.found, inside)
    version = ""
    served: Mapping[Place, list[LoadResult]] = {}
    if options.server:
        version, served = served_results(state, each, options.rounds)
        entry = replace(entry, grpc=add_served(samples, served))
    memory = [_memory(state, each, turn) for turn in range(options.rounds)]
    samples["memory"] = memory
    costs = figures(each, turns, served, memory, entry)
    entry = replace(entry, memory_bytes=int(costs["memory"].value))
    return Measurement(each.variant, each.found, entry, samples), costs, version


def _ops(options: SweepOptions) -> Ops:
    return "kernels" if options.op_library else "bodies"


def _memory(state: SweepFolder, each: Ready, turn: int) -> dict[str, int]:
    content = state.read(each.point, f"memory-{turn}")
    assert content is not None
    return content


def _joined(
    each: Ready, turns: Sequence[Mapping[str, InProcess]]
) -> dict[tuple[str, str], InProcess]:
    """All rounds together; a batch size that a round left out is left out."""
    found = {}
    for role in turns[0]:
        sizes = [size for size in turns[0][role].calls if all(size in t[role].calls for t in turns)]
        found[each.variant.name, role] = InProcess(
            {size: _all_calls([turn[role].calls[size] for turn in turns]) for size in sizes}
        )
    return found


def _all_calls(calls: Sequence[Calls]) -> Calls:
    seconds = [each for one in calls for each in one.seconds]
    return Calls(calls[0].batch, seconds, sum(one.core_s for one in calls))
