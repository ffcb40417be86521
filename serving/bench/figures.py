# SPDX-License-Identifier: Apache-2.0
"""A report's figures as text: scores in their unit, and what the budget saves."""

from collections.abc import Iterable, Sequence
from typing import Any

from saccade.exporter.artefact.frontier import ROUNDS

# Files of the first release have `fraction`.
_SHARES = ("share", "fraction")
_BUSY = 0.5  # load per core; an idle machine is far below
_STEADY = 1.25  # rounds usually differ by no more than this ratio
# Units that add nothing to the score's name.
_PLAIN = ("index", "CIDEr-D")


def is_share(score: dict[str, Any]) -> bool:
    """Return whether the score is a share in [0, 1], shown as a percentage."""
    return score["unit"] in _SHARES


def shown(score: dict[str, Any], value: float) -> float:
    """Return a value of this score as it is printed and drawn: shares as percentages."""
    return 100 * value if is_share(score) else value


def score_text(score: dict[str, Any]) -> str:
    """Return the value with a percent sign if it is a share."""
    value = shown(score, score["value"])
    return f"{value:.2f} %" if is_share(score) else f"{value:.3f}"


def bare_text(score: dict[str, Any]) -> str:
    """Return the value for a column whose heading has the unit."""
    return score_text(score).removesuffix(" %")


def interval_text(score: dict[str, Any]) -> str:
    """Return the 95 % interval."""
    if score["interval"] is None:
        return "-"
    low, high = (shown(score, bound) for bound in score["interval"])
    if is_share(score):
        return f"{low:.1f}-{high:.1f}"
    return f"{low:.3f} to {high:.3f}" if low < 0 else f"{low:.3f}-{high:.3f}"


def heading(score: dict[str, Any]) -> str:
    """Return the name of the score with its unit."""
    if is_share(score):
        return f"{score['name']} %"
    if score["unit"] in _PLAIN or score["unit"] == score["name"]:
        return str(score["name"])
    return f"{score['name']} ({score['unit']})"


def throughput_of(variant: dict[str, Any]) -> tuple[float, str]:
    """Return the throughput that represents a variant, and where it was measured.

    Units: inferences per second.
    """
    point, where = _speed_point(variant)
    return point["inferences_per_second"], where


def _speed_point(variant: dict[str, Any]) -> tuple[dict[str, Any], str]:
    for kind, through in (("concurrency_", "gRPC"), ("router_concurrency_", "the router")):
        names = [name for name in variant["grpc"] or {} if name.startswith(kind)]
        if names:
            name = max(names, key=lambda name: int(name.rpartition("_")[2]))
            where = f"through {through}, concurrency {name.rpartition('_')[2]}"
            return variant["grpc"][name], where
    best = variant["in_process"]["best_batch"]
    return variant["in_process"][f"batch_{best}"], "in process, best batch"


def noise_text(report: dict[str, Any]) -> str:
    """Return a warning if the machine was busy or the rounds differ much, else an empty string."""
    machine, found = report["machine"], []
    load, cores = machine.get("load_average", 0.0), machine.get("cores", 1)
    if load > _BUSY * cores:
        of = f"{cores} core{'s' * (cores != 1)}"
        found.append(f"the load average was {load:.1f} on {of} at the start")
    spread = max((_spread(variant) for variant in report["variants"]), default=1.0)
    if spread > _STEADY:
        found.append(f"rounds of one variant differ by up to {spread:.1f} times")
    if not found:
        return ""
    return (
        f"Noisy machine: {' and '.join(found)}. Measure again on an idle machine before you trust "
        "the speeds."
    )


def has_rounds(variants: Sequence[dict[str, Any]]) -> bool:
    """Return whether costs were compared by rounds; older releases compared single figures."""
    return all(_speed_point(variant)[0].get(ROUNDS) for variant in variants)


def _spread(variant: dict[str, Any]) -> float:
    """Return the ratio of the fastest to the slowest round of a variant's throughput."""
    rates = _speed_point(variant)[0].get(ROUNDS, ())
    if cost := variant.get("costs", {}).get("throughput"):
        rates = cost["least"], cost["most"]
    return float(max(rates) / min(rates)) if rates and min(rates) > 0 else 1.0


def threads_text(threads: Iterable[int]) -> str:
    """Return the threads of one run, of several variants."""
    found = sorted(set(threads))
    words = "one" if found == [1] else " or ".join(map(str, found))
    return f"{words} thread{'s' * (found != [1])}"


def ops_text(report: dict[str, Any]) -> str:
    """Return how custom ops ran, if there are any; reports of older releases do not have it."""
    kinds = sorted({variant["ops"] for variant in report["variants"] if variant.get("ops")})
    return f"custom ops by {' and '.join(kinds)}" if kinds else ""


def saves_bytes(variant: dict[str, Any]) -> bool:
    """Return whether the budget saves bytes of an embedding rather than time."""
    return variant.get("embedding_bytes") is not None


def cost_of(variant: dict[str, Any]) -> float:
    """Return a variant's place in the image: bytes per embedding, or inferences per second."""
    return float(variant["embedding_bytes"]) if saves_bytes(variant) else throughput_of(variant)[0]


def split_text(data: dict[str, Any]) -> str:
    """Return which samples of the report's data were scored."""
    split = data.get("split") or "test"  # absent in reports from before the option
    return "all samples" if split == "all" else f"the {split} split"


def works(variant: dict[str, Any]) -> list[tuple[str, dict[str, Any], dict[str, Any] | None]]:
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


def points(served: dict[str, Any], prefix: str) -> list[str]:
    """Return the points through the server with this prefix, fewest clients first."""
    names = [name for name in served if name.startswith(prefix)]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def _keys(value: Any) -> Any:
    return value if isinstance(value, dict) else ()
