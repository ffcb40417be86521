# SPDX-License-Identifier: Apache-2.0
"""A report's figures in words: scores in their unit, and what the budget saves."""

from typing import Any

# `fraction` is what files of the first release say.
_SHARES = ("share", "fraction")
# Units that say no more than the score's name.
_PLAIN = ("index", "CIDEr-D")


def is_share(score: dict[str, Any]) -> bool:
    """True if the score is a share in [0, 1], shown in per cent."""
    return score["unit"] in _SHARES


def shown(score: dict[str, Any], value: float) -> float:
    """A value of this score as it is printed and drawn: shares in per cent."""
    return 100 * value if is_share(score) else value


def score_text(score: dict[str, Any]) -> str:
    """The value with its sign."""
    value = shown(score, score["value"])
    return f"{value:.2f} %" if is_share(score) else f"{value:.3f}"


def bare_text(score: dict[str, Any]) -> str:
    """The value under a heading that names the unit."""
    return score_text(score).removesuffix(" %")


def interval_text(score: dict[str, Any]) -> str:
    """The 95 % interval."""
    if score["interval"] is None:
        return "-"
    low, high = (shown(score, bound) for bound in score["interval"])
    if is_share(score):
        return f"{low:.1f}-{high:.1f}"
    return f"{low:.3f} to {high:.3f}" if low < 0 else f"{low:.3f}-{high:.3f}"


def heading(score: dict[str, Any]) -> str:
    """The name of the score with its unit."""
    if is_share(score):
        return f"{score['name']} %"
    if score["unit"] in _PLAIN or score["unit"] == score["name"]:
        return str(score["name"])
    return f"{score['name']} ({score['unit']})"


def throughput_of(variant: dict[str, Any]) -> tuple[float, str]:
    """The throughput that stands for a variant, and where it was measured.

    Units: inferences per second.
    """
    for kind, through in (("concurrency_", "gRPC"), ("router_concurrency_", "the router")):
        names = [name for name in variant["grpc"] or {} if name.startswith(kind)]
        if names:
            name = max(names, key=lambda name: int(name.rpartition("_")[2]))
            where = f"through {through}, concurrency {name.rpartition('_')[2]}"
            return variant["grpc"][name]["inferences_per_second"], where
    best = variant["in_process"]["best_batch"]
    return variant["in_process"][f"batch_{best}"]["inferences_per_second"], "in process, best batch"


def ops_text(report: dict[str, Any]) -> str:
    """Execution of custom ops, where a variant has any; reports of older releases do not say it."""
    kinds = sorted({variant["ops"] for variant in report["variants"] if variant.get("ops")})
    return f"custom ops by {' and '.join(kinds)}" if kinds else ""


def saves_bytes(variant: dict[str, Any]) -> bool:
    """True if the budget saves bytes of an embedding rather than time."""
    return variant.get("embedding_bytes") is not None


def cost_of(variant: dict[str, Any]) -> float:
    """Cost that places a variant on the picture: bytes an embedding, or inferences per second."""
    return float(variant["embedding_bytes"]) if saves_bytes(variant) else throughput_of(variant)[0]


def works(variant: dict[str, Any]) -> list[tuple[str, dict[str, Any], dict[str, Any] | None]]:
    """Each kind of request: how it is called, and its figures in process and through gRPC."""
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
    """The names of the points through the server that begin so, fewest clients first."""
    names = [name for name in served if name.startswith(prefix)]
    return sorted(names, key=lambda name: int(name.rpartition("_")[2]))


def _keys(value: Any) -> Any:
    return value if isinstance(value, dict) else ()
