# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/envoy.md: loads with and without the proxy, and failovers."""

from typing import Any


def proxied(overload: dict[str, Any]) -> str:
    """Return the table of all loads in a file, in the order of the runs."""
    lines = [
        "| budgets | deadline | load | through | goodput | answered | late | cut off "
        "| p99 answered | refused after (p50) | generator behind | restarts | memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in overload["loads"]:
        refused, answered = one["refused_ms"], one["answered_ms"]
        goodput = max(0.0, one["goodput_of_capacity"])
        lines.append(
            f"{_load(one)} | {100 * goodput:.0f} % | "
            f"{one['statuses']['OK']:,} | {one['late']:,} | "
            f"{one['statuses'].get('DEADLINE_EXCEEDED', 0):,} of {one['sent']:,} | "
            f"{f'''{answered['p99']:.0f} ms''' if answered else '-'} | "
            f"{f'''{refused['p50']:.0f} ms''' if refused else '-'} | "
            f"{1e-3 * one['lag_ms']['p50']:.1f} s | {one['restarts']} | "
            f"{one['memory_mib']['grown']:+.0f} MiB |"
        )
    machine = overload["machine"]
    said = f"{overload['seconds']:g} s per load. Measured on {machine['device']}"
    return "\n".join([*lines, "", f"{said}, {machine['runtime']}." + _cost(overload)])


def apart(overload: dict[str, Any]) -> str:
    """Return the table of loads with and without `serve --proxy`, the generator on its own core."""
    lines = [
        "| budgets | deadline | load | through | goodput | by core time | of the accepted, in time "
        "| refused after (p50, p99) | cut off | restarts | memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in overload["loads"]:
        refused, cut = one["refused_ms"], one["statuses"].get("DEADLINE_EXCEEDED", 0)
        waited = f"{refused['p50']:.0f}, {refused['p99']:.0f} ms" if refused else "-"
        # A server that was restarted has taken its CPU time with it.
        by_core = one["goodput_of_capacity_by_core_time"]
        by_core = "-" if by_core is None else f"{100 * by_core:.0f} %"
        lines.append(
            f"{_load(one)} | {100 * one['goodput_of_capacity']:.0f} % | "
            f"{by_core} | {100 * one['in_time_of_accepted']:.0f} % | "
            f"{waited} | {cut:,} of {one['sent']:,} | {one['restarts']} | "
            f"{one['memory_mib']['grown']:+.0f} MiB |"
        )
    machine, loads = overload["machine"], [one["load_average"] for one in overload["loads"]]
    said = (
        f"{overload['seconds']:g} s per load, at most {overload['in_flight']} requests at once "
        f"through the proxy. Measured on {machine['device']}, {machine['runtime']}, one core for "
        f"the service and one for the generator, with a load average of {min(loads):.0f} to "
        f"{max(loads):.0f}."
    )
    return "\n".join([*lines, "", said + _cost(overload) + _added(overload)])


def _load(one: dict[str, Any]) -> str:
    """Return the cells that say which load it was, and through what."""
    return f"| {one['budgets']} | {one['deadline_s']:g} s | {one['times']:g} x | {one['through']}"


def _added(overload: dict[str, Any]) -> str:
    """Return what the proxy adds to calls that are answered, measured in turn."""
    if "cost" not in overload:
        return ""
    bare, proxied = overload["cost"]["server"], overload["cost"]["proxy"]
    return (
        f" At 20 requests per second, callers waited {proxied['p50']:.1f} ms through the proxy and "
        f"{bare['p50']:.1f} ms without it (p50); a request took {proxied['proxy']:.2f} ms of the "
        f"proxy's CPU time beside {proxied['service']:.2f} ms of server and models."
    )


def _cost(overload: dict[str, Any]) -> str:
    """Return the CPU time per request in the proxy when most requests are refused."""
    through = [one for one in overload["loads"] if "proxy_cpu_us" in one]
    if not through:
        return ""
    most = max(one["times"] for one in through)
    costs = sorted(one["proxy_cpu_us"] for one in through if one["times"] == most)
    refusal = overload["refusal"]["service_cpu_us"]
    span = " to ".join(dict.fromkeys(f"{cost:.0f}" for cost in (costs[0], costs[-1])))
    return (
        f" At {most:g} times the capacity, a request took {span} us of the proxy's CPU time, "
        f"answered or refused. A refusal by the router takes {refusal:.0f} us."
    )


def failover(result: dict[str, Any]) -> str:
    """Return the table of faults: losses, when traffic moved, when the server was used again."""
    lines = [
        "| fault of one of two servers | times | calls | lost | noticed | moved after "
        "| longest call | used again after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, what in result["faults"].items():
        trials = [trial for trial in result["trials"] if trial["fault"] == name]
        if not trials:
            continue
        worst = {
            key: max(trial[key] for trial in trials) for key in ("moved_s", "longest_s", "back_s")
        }
        lines.append(
            f"| {what} | {len(trials)} | {sum(trial['calls'] for trial in trials):,} | "
            f"{sum(sum(trial['failed'].values()) for trial in trials)} | "
            f"{sum(trial['noticed'] for trial in trials)} | {worst['moved_s']:.1f} s | "
            f"{worst['longest_s']:.2f} s | {worst['back_s']:.0f} s |"
        )
    machine = result["machine"]
    return "\n".join([*lines, "", f"Measured on {machine['device']}, {machine['runtime']}."])
