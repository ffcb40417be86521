# SPDX-License-Identifier: Apache-2.0
"""`saccade choose`: apply the router's rule to measured variants, and show the figures."""

import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from saccade.core.errors import SaccadeError
from saccade.core.machine import this_machine
from saccade.core.options import Options, flag
from saccade.core.sizes import counted
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FILE_NAME as FRONTIER
from saccade.exporter.artefact.frontier import FrontierEntry
from saccade.exporter.artefact.precedence import runtime_name
from saccade.exporter.runtimes.runtime import runtime_named
from saccade.models.scores.results import samples_for
from saccade.serving.bench.figures import (
    bare_text,
    heading,
    rate_text,
    threads_text,
    times_digits,
)
from saccade.serving.bench.report_tables import table_of
from saccade.serving.bench.sweep.state import FILE_NAME as SWEEP
from saccade.serving.repository.checks import check_alike, measurements
from saccade.serving.repository.router_folder import RouterPlan, route_fields

# Files that the router runs, and that import each other by their bare names.
_ROUTER: Any = import_module("saccade.model_repository.router.choose")
_ROUTES: Any = import_module("saccade.model_repository.router.routes")
_APART = 1e-5  # a change of a budget by this share shows in the six digits that are compared
_ANY_BATCH = 8  # run_batch of a route; the choice ignores it
_NUMBERED = re.compile("b[0-9]{4}")  # the name of a budget that is a number
_NOISY = 1.25  # rounds of a quiet machine usually differ by less
_SHARE = {"min_score": ", such as 0.9"}
_OF_ROUTE = (
    "budget", "setting", "precision", "score_name", "score_unit", "score", "lower_bound",
    "inferences_per_second",
)  # fmt: skip
_OF_ENTRY = ("memory_bytes", "embedding_bytes", "dominated_by")


@dataclass(frozen=True)
class ChooseOptions(Options):
    """Options for the router's choice: exactly one of the first four."""

    budget: str | None = None  # largest variant with at most this: 0.5, or a budget's name
    min_score: float | None = None  # fastest variant whose lower 95 % bound is at least this
    max_loss: float | None = None  # --min-score this far below the best score, in points of percent
    max_latency_ms: float | None = None  # best-scoring variant with a latency of at most this
    concurrency: int = 1  # callers of that latency, one of those that were measured
    percentile: Literal[50, 95, 99] = 95  # of that latency
    device: str | None = None  # device whose figures to use, if the frontier has several

    def asked(self) -> tuple[str, str | float]:
        """Return the parameter and its value.

        Raises: SaccadeError if none or several are given, or a loss that is not positive.
        """
        names = [*_ROUTER.RULES, "max_loss"]
        given = [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            found = f" (found {' and '.join(flag(name) for name, _ in given)})" if given else ""
            *flags, last = map(flag, names)
            raise SaccadeError(f"Pass exactly one of {', '.join(flags)} and {last}{found}.")
        if self.max_loss is not None and not 0 < self.max_loss < math.inf:
            raise SaccadeError(f"--max-loss: found {self.max_loss:g}, expected points above 0.")
        return given[0]


@dataclass(frozen=True)
class Choice:
    """The choice that the router would make, and the reason.

    `chosen` and `runner_up` are names of variants. `changes` has the values of the parameter at
    which the choice changes. `measured_on` is the machine whose figures decided.
    """

    parameter: str
    value: str | float
    chosen: str | None
    why: str
    runner_up: str | None
    changes: tuple[dict[str, Any], ...]
    variants: tuple[dict[str, Any], ...]
    measured_on: str | None
    latency: str = "p95 ms"  # the percentile of the latencies, and the callers if not one
    caution: str = ""  # why not to trust the figures
    scored_on: str = ""  # the number of samples and the data of the scores

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        content = asdict(self)
        return {"variant": content.pop("chosen"), **content}

    @property
    def exit_code(self) -> int:
        """Exit status of the command: 1 if the router would refuse the request, else 0."""
        return 0 if self.chosen else 1

    def to_text(self) -> Any:
        """Return the choice and its reason, what would change it, and every variant's figures."""
        from rich.console import Group
        from rich.text import Text

        # Show these columns only if budgets save bytes of an embedding, or a sweep measured memory.
        optional = {"embedding_bytes": "bytes", "memory_bytes": "MiB"}
        empty = {
            heading
            for name, heading in optional.items()
            if all(variant[name] is None for variant in self.variants)
        }
        rows = [
            {heading: text for heading, text in _row(variant, self).items() if heading not in empty}
            for variant in self.variants
        ]
        return Group(Text("\n".join(_lines(self))), "", table_of("", rows).to_text())


def choose(folder: ArtefactFolder | Path | str, options: ChooseOptions) -> Choice:
    """Return the variant that a router over this folder would choose.

    Raises: SaccadeError for a value out of range, a folder without artefacts, measurements of
        another file, or a score or latency that was not measured.
    """
    parameter, value = options.asked()
    folder = ArtefactFolder.open(folder)
    routes, entries = _routes(measured_folder(folder), options.device)
    if parameter == "max_loss":
        parameter, value = "min_score", _least_score(routes, float(value), folder)
    value = _asked_number(routes, parameter, value)
    if asks_load := (options.concurrency, options.percentile) != (1, 95):
        routes = _at_load(routes, entries, options)
    rule = _ROUTER.RULES[parameter]
    _check_measured(routes, parameter, folder)
    if asks_load and rule.figure == "p95_ms":
        callers = counted(options.concurrency, "caller")
        words = f"a p{options.percentile} of at most {{value:g}} ms with {callers}"
        rule = rule._replace(words=words)

    def chosen(at: float, among: Any = routes) -> str | None:
        try:
            name: str = _ROUTER.best(among, parameter, at).name
        except _ROUTER.RequestRefused:
            return None
        return name

    best = chosen(value)
    rest = routes._replace(variants=tuple(route for route in routes.variants if route.name != best))
    return Choice(
        parameter=parameter,
        value=value,
        chosen=best,
        why=_why(routes, rule, value, best)
        + _as_good(routes, rule, value, best)
        + (_samples_needed(routes, entries.values(), options) if best is None else ""),
        runner_up=chosen(value, rest) if best and rest.variants else None,
        changes=tuple(_changes(routes, rule, value, chosen)),
        variants=tuple(_figures(route, entries.get(route.name)) for route in routes.variants),
        measured_on=measured_on(list(entries.values())) if entries else None,
        latency=_latency_heading(options),
        caution=_caution(list(entries.values())) if entries else "",
        scored_on=_scored_on(entries.values()),
    )


def _asked_number(routes: Any, parameter: str, value: str | float) -> float:
    """Return the number that the router reads from a value, or a budget's name."""
    try:
        if parameter == "budget" and (named := _ROUTER.by_budget_name(routes, value)):
            value = named.budget
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # a refusal repeats it as it was given
        return float(_ROUTER.asked_number(routes, parameter, value))
    except _ROUTER.RequestRefused as error:
        reason = str(error).removeprefix(f"parameter {parameter} ")
        if reason == str(error):
            raise SaccadeError(f"{flag(parameter)}: {error}.") from error
        raise SaccadeError(f"{flag(parameter)} {reason}{_SHARE.get(parameter, '')}.") from error


def measured_on(entries: Sequence[FrontierEntry]) -> str:
    """Return the machine, the runtime and its threads, of measurements of one machine."""
    ops = sorted({entry.ops for entry in entries if entry.ops})
    by = f", custom ops by {' and '.join(ops)}" if ops else ""
    threads = threads_text(entry.threads for entry in entries)
    return f"{entries[0].device}, {entries[0].runtime}, {threads}{by}"


def _latency_heading(options: ChooseOptions) -> str:
    callers = f" x{options.concurrency}" if options.concurrency != 1 else ""
    return f"p{options.percentile} ms{callers}"


def _at_load(routes: Any, entries: dict[str, FrontierEntry], options: ChooseOptions) -> Any:
    """Return the routes with the latencies of these callers, at this percentile."""
    measured = sorted({n for entry in entries.values() for n in entry.concurrencies})
    if options.concurrency not in measured:
        found = ", ".join(map(str, measured)) or "none"
        raise SaccadeError(
            f"--concurrency {options.concurrency} was not measured (measured: {found}). Measure it "
            f"with: saccade bench FOLDER --concurrency 1,{options.concurrency} --out REPORT"
        )
    return routes._replace(
        variants=tuple(
            route._replace(p95_ms=entry.latency_ms(options.concurrency, options.percentile))
            if (entry := entries.get(route.name))
            else route
            for route in routes.variants
        )
    )


def _least_score(routes: Any, loss: float, folder: ArtefactFolder) -> float:
    """Return the score that is this many points below the best one."""
    _check_measured(routes, "min_score", folder)
    best = max(
        (route for route in routes.variants if route.score is not None), key=lambda one: one.score
    )
    return float(best.score - (loss / 100 if best.score_unit == "share" else loss))


def _samples_needed(routes: Any, entries: Iterable[FrontierEntry], options: ChooseOptions) -> str:
    """Say with how many samples the best variant would fit, if its own interval is too wide."""
    shares = [route for route in routes.variants if route.score_unit == "share"]
    if options.max_loss is None or not shares:
        return ""
    score = max(route.score for route in shares)
    samples = min(entry.score.n for entry in entries)
    needed = samples_for(score * (1 - score), options.max_loss / 100)
    if needed <= samples:
        return ""
    return (
        f": with {counted(samples, 'sample')}, the interval of the best score alone is wider. "
        f"About {float(f'{needed:.2g}'):,.0f} samples show a loss of {options.max_loss:g} "
        f"point{'s' * (options.max_loss != 1)}"
    )


def _scored_on(entries: Iterable[FrontierEntry]) -> str:
    counts: dict[str, set[int]] = {}
    for entry in entries:
        counts.setdefault(entry.score.data, set()).add(entry.score.n)
    texts = [
        f"{' or '.join(f'{n:,}' for n in sorted(numbers))} samples of {data}"
        for data, numbers in counts.items()
    ]
    return " and ".join(texts)


def _caution(entries: Sequence[FrontierEntry]) -> str:
    """Return why measurements of one machine should be repeated; empty without a reason."""
    spread = max(max(rates) / min(rates) for one in entries if (rates := one.speed_rounds or (1,)))
    reasons = []
    if spread > _NOISY:
        reasons.append(f"rounds of one variant differ by up to {spread:.1f} times")
    here = this_machine(runtime_named(runtime_name(entries[0].runtime)).label())
    if here.device == entries[0].device and here.runtime != entries[0].runtime:
        reasons.append(f"{here.runtime} is installed now")
    return f"Measure again before you trust the speeds: {' and '.join(reasons)}." if reasons else ""


def measured_folder(folder: ArtefactFolder) -> ArtefactFolder:
    """Return the folder that has the frontier; for a sweep, its artefact folder.

    Raises: SaccadeError for a sweep that is not finished.
    """
    if not (folder.path / SWEEP).exists():
        return folder
    artefacts = folder.path / "artefacts"
    if not (artefacts / FRONTIER).exists():
        raise SaccadeError(
            f"{folder}: its sweep is not finished, so there is no {FRONTIER} yet. To resume it, "
            "run the same `saccade sweep` command again."
        )
    return ArtefactFolder(artefacts)


def _routes(folder: ArtefactFolder, device: str | None) -> tuple[Any, dict[str, FrontierEntry]]:
    folder.check_files()
    check_alike(folder)
    measured, variants = measurements(folder, device), folder.variants
    plan = RouterPlan(
        model=folder.model,
        variants=variants,
        preprocessing=None,
        labels=(),
        classes={},
        measured=measured,
        run_batch={variant.name: _ANY_BATCH for variant in variants},
    )
    routes = tuple(_ROUTES.Route(**route_fields(plan, variant)) for variant in variants)
    return _ROUTES.Routes(plan.model, plan.family, None, {}, routes), measured


def _check_measured(routes: Any, parameter: str, folder: ArtefactFolder) -> None:
    rule = _ROUTER.RULES[parameter]
    if rule.measured and all(getattr(route, rule.figure) is None for route in routes.variants):
        if rule.figure == "p95_ms" and folder.frontier is not None:
            place = shlex.quote(str(folder))
            raise SaccadeError(
                f"{folder}: {flag(parameter)} needs latencies measured through a server, found "
                f"none in {FRONTIER}. Measure them with: saccade bench {place} --out REPORT "
                "(without --no-server)"
            )
        raise SaccadeError(
            f"{folder}: {flag(parameter)} needs measured {rule.measured}, and it has none. "
            "Measure them with: saccade sweep CHECKPOINT, or saccade bench FOLDER"
        )


def _why(routes: Any, rule: Any, value: float, best: str | None) -> str:
    wanted = rule.wanted(routes, value)
    if best is None:
        return f"No variant has {wanted}"
    fitting = [route for route in routes.variants if rule.fits(route, value)]
    why = f"{rule.best_words} of {len(fitting)} variant{'s' * (len(fitting) != 1)} with {wanted}"
    fastest = max(fitting, key=rule.best)
    if rule.by_speed and fastest.name != best:
        why += (
            f"; its measured speed does not differ significantly from that of {fastest.name}, "
            "and it has fewer multiply-adds"
        )
    return why


def _as_good(routes: Any, rule: Any, value: float, best: str | None) -> str:
    """Say which faster variant may score as well, if the best score decided."""
    if best is None or rule.figure != "p95_ms":
        return ""
    own = routes.named(best)
    as_good = [
        route
        for route in routes.answering
        if rule.fits(route, value)
        and route.quickness > own.quickness
        and None not in (route.score, own.lower_bound)
        and route.score >= own.lower_bound
    ]
    if not as_good:
        return ""
    faster = max(as_good, key=lambda route: route.quickness)
    return (
        f"; the score of {faster.name} is within its 95 % interval, with "
        f"{times_digits(faster.quickness / own.quickness)} times as many answers per second"
    )


def _changes(
    routes: Any, rule: Any, value: float, chosen: Callable[[float], str | None]
) -> list[dict[str, Any]]:
    """Return the nearest value on each side of `value` at which the choice changes.

    Between two figures of variants the choice is constant, so only the figures are tried.
    """
    figures = (getattr(route, rule.figure) for route in routes.variants)
    steps = sorted({figure for figure in figures if figure is not None})
    now, changes = chosen(value), []
    for side in (-1, 1):
        beyond = [
            step for step in steps if (rule.compared(step) - rule.compared(value)) * side >= 0
        ]
        for step in beyond[::side]:
            # Try just past the figure on the side where its variant stops or starts to qualify.
            past = rule.at_least == (side > 0)
            at = _next(step, side, rule.compared) if past else step
            if (other := chosen(at)) != now:
                words = {(-1, False): "at most", (-1, True): "below"}
                words |= {(1, False): "at least", (1, True): "above"}
                changes.append({"when": words[side, past], "value": step, "variant": other})
                break
    return changes


def _next(step: float, side: int, compared: Callable[[float], float]) -> float:
    """Return the nearest number on that side that compares as different."""
    at = math.nextafter(step, side * math.inf)
    return at if compared(at) != compared(step) else step * (1 + side * _APART)


def _figures(route: Any, entry: FrontierEntry | None) -> dict[str, Any]:
    return {
        "variant": route.name,
        **{name: getattr(route, name) for name in _OF_ROUTE},
        "latency_ms": route.p95_ms,
        **{name: getattr(entry, name, None) for name in _OF_ENTRY},
    }


def _lines(choice: Choice) -> list[str]:
    if choice.chosen is None:
        lines = [f"{choice.why}."]
    else:
        lines = [f"{choice.chosen}: {choice.why}."]
        if choice.runner_up is not None:
            lines.append(f"Runner-up: {choice.runner_up}.")
    option = flag(choice.parameter)
    for change in choice.changes:
        other = change["variant"] or "no variant"
        lines.append(f"With {option} {change['when']} {change['value']:g}: {other}.")
    if choice.measured_on is not None:
        lines.append(f"Scored on {choice.scored_on}.")
        lines.append(" ".join([f"Measured on {choice.measured_on}.", choice.caution]).rstrip())
    return lines


def _row(variant: dict[str, Any], choice: Choice) -> dict[str, str]:
    mark = {choice.chosen: "chosen", choice.runner_up: "runner-up"}.get(variant["variant"], "")
    if not mark and variant["dominated_by"]:
        mark = f"dominated by {variant['dominated_by']}"
    memory, rate = variant["memory_bytes"], variant["inferences_per_second"]
    return {
        "variant": variant["variant"],
        "budget": budget_text(variant["setting"], variant["budget"]),
        **_score(variant, choice),
        "per second": "-" if rate is None else rate_text(rate),
        choice.latency: _number(variant["latency_ms"], ".2f"),
        "MiB": _number(memory and memory / 2**20, ".1f"),
        "bytes": _number(variant["embedding_bytes"], ",d"),
        "": mark,
    }


def _score(variant: dict[str, Any], choice: Choice) -> dict[str, str]:
    """Return the score and its lower bound in the form of a report, by their headings."""
    known = next((one for one in choice.variants if one["score"] is not None), variant)
    unit, cells = known["score_unit"] or "index", {}
    for name, key in ((known["score_name"] or "score", "score"), ("at least", "lower_bound")):
        figure = {"name": name, "unit": unit, "value": variant[key]}
        cells[heading(figure)] = "-" if figure["value"] is None else bare_text(figure)
    return cells


def budget_text(setting: str, budget: float) -> str:
    """Return what `--budget` takes: a number, or a name and what it is worth."""
    return f"{budget:g}" if _NUMBERED.fullmatch(setting) else f"{setting} ({budget:.2g})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
