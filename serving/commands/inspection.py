# SPDX-License-Identifier: Apache-2.0
"""`saccade inspect`: what a file or folder is, and the command that usually follows.

Nothing in a file is run or unpickled, and reads stay within `limits`. Hashes are computed from the
bytes and compared with the manifest.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.core.schema import read_json
from saccade.core.sizes import files_below, size_text
from saccade.models.checkpoint_folder import checkpoint_file
from saccade.models.checkpoint_format import AUTHORS_DATA
from saccade.serving.commands.closings import bench_command
from saccade.serving.commands.weight_files import inspect_weights

_HEADINGS = {"bytes": "size", "sha256": "SHA-256", "total_bytes": "total size"}


@dataclass(frozen=True)
class Inspection:
    """What is at a path: its kind, facts by name, and the commands that usually follow."""

    path: Path
    kind: str
    facts: Mapping[str, Any]
    next: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"path": str(self.path), "kind": self.kind, **self.facts, "next": list(self.next)}

    def to_text(self) -> str:
        """Return text for the terminal: a line per fact and per list item."""
        width = max(map(len, self.facts), default=0)
        lines = [f"{self.path}: {self.kind}"]
        for name, value in self.facts.items():
            values = value if isinstance(value, list) else [value]
            shown = [_shown(name, one) for one in values] or ["none"]
            heading = _HEADINGS.get(name, name.replace("_", " "))
            lines.append(f"  {heading:<{width}}  {shown[0]}")
            lines += [f"  {'':<{width}}  {one}" for one in shown[1:]]
        return "\n".join([*lines, *(f"Next: {command}" for command in self.next)])


def inspect(path: Path | str) -> Inspection:
    """Return what a file or folder is: kind, family, budgets, sizes, hashes, next command.

    Raises: SaccadeError if it does not exist, is damaged, or is nothing that saccade reads.
    """
    given, path = Path(path), checkpoint_file(path)
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        found = "a pipe or device" if path.exists() else "nothing there"
        raise SaccadeError(f"{path}: found {found}, expected a file or folder. Check the path.")
    for suffix, look in _BY_SUFFIX.items():
        if path.name.endswith(suffix):
            return look(path)
    kind, facts, following = inspect_weights(path, given)
    return Inspection(given, kind, facts, following)


def _folder(path: Path) -> Inspection:
    for marks, look in _BY_CONTENT.items():
        if any(next(path.glob(mark), None) is not None for mark in marks.split()):
            return look(path)
    from saccade.models.official.hub_folder import foreign

    kind, commands = foreign(path)
    if kind:
        return Inspection(path, kind, {}, commands)
    raise SaccadeError(
        f"{path}: found a folder that contains nothing saccade wrote, expected an artefact "
        "folder, engines, a repository, a sweep, a report, answers of a bulk job, or weights "
        "from a model hub. Pass another path."
    )


def _artefacts(path: Path) -> Inspection:
    from saccade.exporter.artefact.folder import ArtefactFolder
    from saccade.exporter.artefact.manifest import SCHEMA, by_parent

    if read_json(min(path.glob("*.manifest.json"))).get("schema") != SCHEMA:
        return _engines(path)
    folder = ArtefactFolder(path)
    folder.check_files()
    first = folder.manifests[0]
    measured = folder.frontier.entries if folder.frontier is not None else ()
    facts = {
        "model": folder.model,
        "family": first.variant.family,
        "variants": [_variant(one, one.file.total_bytes) for one in folder.manifests],
        "checkpoints": [
            {"name": own[0].parent.name, "sha256": own[0].parent.sha256}
            for own in by_parent(folder.manifests)
        ],
        "measured": sorted({entry.variant for entry in measured}),
        "engines": sorted(each.name for each in path.glob("engines/[!.]*")),
        "total_bytes": files_below(path)[1],
    }
    quoted = shlex.quote(str(path))
    following = (
        f"saccade repository {quoted} --out {quoted}-repository"
        if measured
        else bench_command(path)
    )
    of = "group" if folder.variants[0].in_group else "export"
    return Inspection(path, f"an artefact folder of `saccade {of}`", facts, (following,))


def _engines(path: Path) -> Inspection:
    from saccade.exporter.runtimes.tensorrt.engine_manifest import read_engines

    engines = read_engines(path)
    first = engines[0]
    facts = {
        "model": first.variant.model,
        "family": first.variant.family,
        "built_by": f"{first.engine} {first.version}",
        "compute_capabilities": list(first.compute_capabilities),
        "variants": [_variant(one, one.file.bytes) for one in engines],
        "total_bytes": files_below(path)[1],
    }
    artefact = path.parent.parent if path.parent.name == "engines" else "ARTEFACT"
    following = f"saccade verify {shlex.quote(str(artefact))}"
    return Inspection(path, "engines of `saccade build`", facts, (following,))


def _repository(path: Path) -> Inspection:
    from saccade.serving.repository.description import read_repository

    deployment = read_repository(path)
    facts = {
        "model": deployment.model,
        "variants": list(deployment.variants),
        "not_measured": list(deployment.unmeasured),
        "runtime": deployment.runtime,
        "custom_ops": deployment.ops or "none",
        "total_bytes": files_below(path)[1],
    }
    quoted = shlex.quote(str(path))
    following = (f"saccade preflight {quoted}", f"saccade serve {quoted}")
    return Inspection(path, "a model repository of `saccade repository`", facts, following)


def _sweep(path: Path) -> Inspection:
    from saccade.serving.bench.sweep.state import FILE_NAME

    of = read_json(path / FILE_NAME).get("of")
    points = sorted(each.name for each in path.glob("points/*") if each.is_dir())
    failed = sorted(each.parent.name for each in path.glob("points/*/failed.json"))
    facts = {
        "checkpoint_sha256": of.get("checkpoint") if isinstance(of, dict) else None,
        "points": [point for point in points if point not in failed],
        "failed": failed,
        "finished": (path / "report" / "report.json").exists(),
        "total_bytes": files_below(path)[1],
    }
    quoted = shlex.quote(str(path))
    following = f"saccade choose {quoted} --budget 0.5" if facts["finished"] else "saccade sweep"
    return Inspection(path, "a sweep of `saccade sweep`", facts, (following,))


def _bulk(path: Path) -> Inspection:
    finished = (path / "_SUCCESS").exists()
    plan = read_json(path / ("manifest.json" if finished else "_plan/plan.json"))
    facts = {name: plan.get(name) for name in ("model", "variant", "input", "inputs")}
    facts |= {name: plan[name] for name in ("answers", "errors") if name in plan}
    facts |= {"finished": finished, "total_bytes": files_below(path)[1]}
    following = () if finished else ("run `saccade bulk` with the same options to resume",)
    return Inspection(path, "answers of `saccade bulk`", facts, following)


def _hub(path: Path) -> Inspection:
    from saccade.models.official.hub_folder import hub_of, source_of, weights_in
    from saccade.models.official.sources.hugging_face import check_type

    hub = hub_of(path)
    names = ("*.safetensors", "*.bin")
    parts = [file for name in names for file in sorted(path.glob(name))]
    if not parts:
        raise SaccadeError(
            f"{path}: found a configuration without weights. Copy the weights next to it."
        )
    weights = weights_in(path, hub) if hub is not None else parts[0]
    # An index has no tensors itself; the first of its files shows what they are.
    first = weights if weights in parts else parts[0]
    kind, facts, following = inspect_weights(first, path)
    if hub is None:
        return Inspection(path, kind, {"weights": weights.name, **facts}, following)
    config = read_json(path / ("open_clip_config.json" if hub == "open-clip" else "config.json"))
    names_of = {"model": _model_of(config), "labels": len(config.get("id2label") or ())}
    facts = {"weights": weights.name, **{key: x for key, x in names_of.items() if x}, **facts}
    try:
        source_of(path)
        if hub == "transformers":
            check_type(str(path), config)
        following = (f"saccade convert {shlex.quote(str(path))} --out {_out_of(path)}",)
    except SaccadeError as error:
        facts["converted"] = f"no: {error}"
        following = ()
    return Inspection(path, f"a folder of {hub}", facts, following)


def _model_of(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or config.get("architecture") or ""
    return ", ".join(map(str, names)) if isinstance(names, list) else str(names)


def _out_of(path: Path) -> str:
    return shlex.quote(f"build/{path.resolve().name}.safetensors")


def _onnx(path: Path) -> Inspection:
    from saccade.exporter.artefact.manifest import SUFFIX

    beside = path.with_name(path.name.removesuffix(".onnx") + SUFFIX)
    if beside.is_file():
        return _manifest(beside)
    facts = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    following = "saccade export CHECKPOINT --out FOLDER, which writes files with manifests"
    return Inspection(path, "an ONNX file without a manifest", facts, (following,))


def _plan(path: Path) -> Inspection:
    from saccade.exporter.runtimes.tensorrt.engine_manifest import manifest_of

    return _engine(path, manifest_of(path))


def _manifest(path: Path) -> Inspection:
    from saccade.exporter.artefact.folder import ArtefactFolder
    from saccade.exporter.artefact.manifest import read_manifest

    manifest = read_manifest(path)
    file = ArtefactFolder(path.parent).file(manifest)
    facts = {
        "variant": manifest.variant.name,
        "model": manifest.variant.model,
        "family": manifest.variant.family,
        "keeps": _kept(manifest.variant),
        "precision": manifest.variant.precision,
        "inputs": [f"{spec.name} [{spec.axes}] {spec.dtype}" for spec in manifest.inputs],
        "outputs": [f"{spec.name} [{spec.axes}] {spec.dtype}" for spec in manifest.outputs],
        "parameters": manifest.cost.parameters,
        "multiply_adds": manifest.cost.multiply_adds.total,
        "passed_the_gate": manifest.parity.passed,
        "bytes": manifest.file.total_bytes,
        "sha256": manifest.file.sha256,
        "checkpoint": {"name": manifest.parent.name, "sha256": manifest.parent.sha256},
    }
    following = f"saccade verify {shlex.quote(str(file.parent))}"
    return Inspection(path, "a variant of `saccade export`", facts, (following,))


def _engine(path: Path, manifest: Any) -> Inspection:
    facts = {
        "variant": manifest.variant.name,
        "family": manifest.variant.family,
        "keeps": _kept(manifest.variant),
        "built_by": f"{manifest.engine} {manifest.version}",
        "compute_capabilities": list(manifest.compute_capabilities),
        "bytes": manifest.file.bytes,
        "sha256": manifest.file.sha256,
    }
    following = f"saccade inspect {shlex.quote(str(path.parent))}"
    return Inspection(path, "an engine of `saccade build`", facts, (following,))


def _engine_manifest(path: Path) -> Inspection:
    from saccade.exporter.runtimes.tensorrt.engine_manifest import read_engine_manifest

    return _engine(path, read_engine_manifest(path))


def _frontier(path: Path) -> Inspection:
    from saccade.exporter.artefact.frontier import read_frontier

    frontier = read_frontier(path)
    facts = {
        "model": frontier.model,
        "measurements": [
            f"{entry.variant}: {entry.score.name} {entry.score.value:.4g} of {entry.score.n} "
            f"samples, {entry.speed:.0f} per second, {entry.runtime} on {entry.device}"
            for entry in frontier.entries
        ],
    }
    if frontier.policies:
        facts["policies"] = [
            f"{policy.policy}: {policy.times_full.times:.2f} times the throughput of "
            f"{policy.full}, same answer on {100 * policy.agreement:.2f} % of "
            f"{policy.score.n} samples"
            for policy in frontier.policies
        ]
    following = f"saccade choose {shlex.quote(str(path.parent))} --budget 0.5"
    return Inspection(path, "measurements of `saccade bench`", facts, (following,))


def _report(path: Path) -> Inspection:
    from saccade.serving.bench.report import read_report

    report = read_report(path)
    page = path.with_name("report.html")
    facts: dict[str, Any] = {name: report[name] for name in ("model", "data") if name in report}
    facts |= {"page": str(page) if page.exists() else None, "bytes": path.stat().st_size}
    return Inspection(path, "a report of `saccade bench`", facts, ())


def _selection(path: Path) -> Inspection:
    from saccade.models.sparo.ranking import read_selection

    chosen = read_selection(path)
    facts = {
        "slots": len(chosen["order"]),
        "best_first": ", ".join(map(str, chosen["order"][:16])),
        "chosen_by": chosen["kind"],
        "data": chosen["data"],
        "checkpoint_sha256": chosen["checkpoint_sha256"],
    }
    following = f"saccade export CHECKPOINT --slots {shlex.quote(str(path))} --out FOLDER"
    return Inspection(path, "a selection of slots of `saccade select`", facts, (following,))


def _json_file(path: Path) -> Inspection:
    content = read_json(path)
    schema = content.get("schema")
    if isinstance(schema, str) and schema in _BY_SCHEMA:
        return _BY_SCHEMA[schema](path)
    if {"order", "mask", "checkpoint_sha256"} <= content.keys():
        return _selection(path)
    found = "without a schema" if schema is None else f"of schema {str(schema)!r:.60}"
    raise SaccadeError(
        f"{path}: found JSON {found}, which saccade did not write, expected a manifest, "
        "frontier.json, report.json or a selection of slots. Pass another path."
    )


_BY_SUFFIX: Mapping[str, Callable[[Path], Inspection]] = {
    ".json": _json_file,
    ".onnx": _onnx,
    ".plan": _plan,
}
_BY_SCHEMA: Mapping[str, Callable[[Path], Inspection]] = {
    "saccade.manifest": _manifest,
    "saccade.engine": _engine_manifest,
    "saccade.frontier": _frontier,
    "saccade.report": _report,
    "saccade.repository": lambda path: _repository(path.parent),
    "saccade.sweep": lambda path: _sweep(path.parent),
    "saccade.bulk": lambda path: _bulk(path.parents[path.name != "manifest.json"]),
}
# The most specific first: a sweep also contains a report, and a folder of answers a plan.
_BY_CONTENT: Mapping[str, Callable[[Path], Inspection]] = {
    "sweep.json": _sweep,
    "saccade.json": _repository,
    "_plan/plan.json _SUCCESS": _bulk,
    "*.manifest.json": _artefacts,
    "report.json": lambda path: _report(path / "report.json"),
    "config.json open_clip_config.json": _hub,
}


def _variant(manifest: Any, size: int) -> dict[str, Any]:
    """Return the facts of one variant of an artefact folder or of engines."""
    return {
        "name": manifest.variant.name,
        "keeps": _kept(manifest.variant),
        "bytes": size,
        "sha256": manifest.file.sha256,
    }


def _kept(variant: Any) -> str:
    return f"{variant.kept} of {variant.total} {variant.unit} ({variant.setting})"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(_shown(key, one) for key, one in value.items())
    if name.endswith("bytes"):
        return size_text(value)
    if name.endswith("sha256") and isinstance(value, str):
        return f"{value[:12]}..." if name == "sha256" else f"SHA-256 {value[:12]}..."
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if name == "trained_on" and value == AUTHORS_DATA:
        return "not known here: it was converted"
    return "none" if value is None else str(value)
