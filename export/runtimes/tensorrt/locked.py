# SPDX-License-Identifier: Apache-2.0
"""`saccade build --locked`: repeat a build and compare the bytes."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.core.leftovers import temporary_folder
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.options import BuildOptions
from saccade.exporter.runtimes.tensorrt.build import (
    build_all,
    chosen_variants,
    default_out,
    plugins_of,
)
from saccade.exporter.runtimes.tensorrt.child import BuildJob, BuiltPlan
from saccade.exporter.runtimes.tensorrt.engine_manifest import (
    PLAN_SUFFIX,
    EngineManifest,
    read_engines,
)
from saccade.exporter.runtimes.tensorrt.modules import chosen_capabilities, chosen_engine, module_of

_OF_THE_MANIFEST = ("batch", "axis", "workspace_mib", "force")
# Rarely, TensorRT-RTX builds a plan from the same graph that differs in a few bytes.
_MOST_BUILDS = 3


@dataclass(frozen=True)
class Rebuilt:
    """The comparison of a plan with the one that was built again."""

    name: str
    identical: bool
    sha256: str
    rebuilt_sha256: str
    different_bytes: int  # within the length of the shorter one; 0 if identical
    first_different: int | None  # its offset; None if none differs
    fixed_addresses: bool  # in both builds; otherwise TensorRT may order names differently
    builds: int  # number of builds until one was identical, or all of them


@dataclass(frozen=True)
class LockedReport:
    """The comparison of all plans in a folder of engines."""

    folder: Path
    rows: tuple[Rebuilt, ...]

    @property
    def identical(self) -> bool:
        """True if every plan was rebuilt with the same bytes."""
        return all(row.identical for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        rows = [asdict(row) for row in self.rows]
        return {"folder": str(self.folder), "identical": self.identical, "plans": rows}

    @property
    def exit_code(self) -> int:
        """0 if every plan has the same bytes, otherwise 1."""
        return 0 if self.identical else 1

    def to_text(self) -> str:
        """Return one line per plan."""
        lines = []
        for row in self.rows:
            if row.identical:
                when = "" if row.builds == 1 else f" in build {row.builds}"
                lines.append(f"{row.name}: the same bytes{when}, SHA-256 {row.sha256[:12]}...")
                continue
            count = row.different_bytes
            differ = "1 byte differs" if count == 1 else f"{count:,} bytes differ"
            where = "" if row.first_different is None else f", from byte {row.first_different:,} on"
            why = "" if row.builds == 1 else f"; none of {row.builds} builds was identical"
            if not row.fixed_addresses:
                why += "; this system does not allow processes to fix their addresses"
            lines.append(
                f"{row.name}: different bytes, SHA-256 {row.rebuilt_sha256[:12]}... instead of "
                f"{row.sha256[:12]}...; {differ}{where}{why}. For a plan that can be reproduced, "
                "build it again with --force"
            )
        said = "every plan is identical" if self.identical else "not every plan is identical"
        return "\n".join([*lines, f"{self.folder}: {said}."])


def rebuild(artefact: ArtefactFolder | Path | str, options: BuildOptions) -> LockedReport:
    """Repeat the builds of a folder of engines, as recorded in its manifests, and replace nothing.

    Raises: SaccadeError if there is nothing to rebuild, or if the build cannot be the same:
        another ONNX file, version, GPU, plugin library or timing cache, or a conflicting option.
    """
    artefact = ArtefactFolder.open(artefact)
    for field in fields(BuildOptions):
        if field.name in _OF_THE_MANIFEST and getattr(options, field.name) != field.default:
            flag = "--" + field.name.replace("_", "-")
            raise SaccadeError(f"{flag}: --locked takes this from the manifests. Leave it out.")
    folder = _folder(artefact, options)
    engines = read_engines(folder)
    if options.variant:
        names = {engine.variant.name for engine in engines}
        if missing := sorted(set(options.variant) - names):
            raise SaccadeError(
                f"--variant {missing[0]}: {folder} has no plan of it, only plans of "
                f"{', '.join(sorted(names))}."
            )
        engines = [engine for engine in engines if engine.variant.name in options.variant]
    rows: dict[str, Rebuilt] = {}
    for builds in range(1, _MOST_BUILDS + 1):
        if left := [engine for engine in engines if _may_match(engine, rows)]:
            rows |= _built_again(artefact, folder, left, options, builds)
    return LockedReport(folder, tuple(rows[engine.variant.name] for engine in engines))


def _may_match(engine: EngineManifest, rows: dict[str, Rebuilt]) -> bool:
    """True if a (further) build may give this plan; TensorRT's builds follow its timing cache."""
    row = rows.get(engine.variant.name)
    return row is None or (not row.identical and engine.engine == "tensorrt-rtx")


def _built_again(
    artefact: ArtefactFolder,
    folder: Path,
    engines: Sequence[EngineManifest],
    options: BuildOptions,
    builds: int,
) -> dict[str, Rebuilt]:
    manifests = chosen_variants(artefact, tuple(engine.variant.name for engine in engines))
    by_name = {manifest.variant.name: manifest for manifest in manifests}
    pairs = [(engine, by_name[engine.variant.name]) for engine in engines]
    jobs = [_job(artefact, engine, manifest, options) for engine, manifest in pairs]
    with temporary_folder("locked") as place:
        cache = None
        if options.timing_cache is not None:
            cache = Path(shutil.copyfile(options.timing_cache, place / "timing_cache"))
        built = build_all(artefact, [pair for _, pair in pairs], jobs, place, cache)
        rows = [
            _row(folder, place, engine, result, builds)
            for engine, result in zip(engines, built, strict=True)
        ]
    return {row.name: row for row in rows}


def _folder(artefact: ArtefactFolder, options: BuildOptions) -> Path:
    if options.out is not None:
        return options.out
    if options.engine is not None or options.compute_capability:
        engine = chosen_engine(options.engine)
        capabilities = chosen_capabilities(engine, options.compute_capability)
        return default_out(artefact, engine, capabilities)
    folders = sorted(path for path in (artefact.path / "engines").glob("[!.]*") if path.is_dir())
    if len(folders) != 1:
        names = ", ".join(folder.name for folder in folders) or "none"
        raise SaccadeError(
            f"{artefact.path / 'engines'}: expected one folder of engines, found {names}. "
            "Pass it with --out, or build it first with: saccade build ARTEFACT"
        )
    return folders[0]


def _job(
    artefact: ArtefactFolder, engine: EngineManifest, manifest: Manifest, options: BuildOptions
) -> BuildJob:
    name = engine.variant.name
    plugins = plugins_of(engine.engine, manifest)
    cache = options.timing_cache
    if cache is not None and not cache.is_file():
        raise SaccadeError(f"{cache}: no such file. Pass the timing cache of the original build.")
    chosen_engine(engine.engine)
    for what, then, now in (
        ("ONNX file", engine.parent.sha256, manifest.file.sha256),
        ("version", engine.version, module_of(engine.engine).__version__),
        (
            "plugin libraries",
            engine.plugins,
            {plugin.name: sha256_of(plugin) for plugin in plugins},
        ),
        ("timing cache", engine.timing_cache_sha256, cache and sha256_of(cache)),
    ):
        if then != now:
            raise SaccadeError(
                f"{name}: found {what} {now}, but the original build had {then}, so the bytes "
                "cannot be the same. Restore the original, or build it again with --force."
            )
    return BuildJob(
        name=name,
        engine=engine.engine,
        onnx=artefact.file(manifest),
        profiles=engine.profiles,
        compute_capabilities=chosen_capabilities(engine.engine, engine.compute_capabilities),
        workspace_mib=engine.options.get("workspace_mib"),
        plugins=plugins,
    )


def _row(
    folder: Path, again: Path, engine: EngineManifest, built: BuiltPlan, builds: int
) -> Rebuilt:
    old = (folder / engine.file.name).read_bytes()
    path = again / (engine.variant.name + PLAN_SUFFIX)
    new = path.read_bytes()
    different = [at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b]
    return Rebuilt(
        name=engine.variant.name,
        identical=old == new,
        sha256=engine.file.sha256,
        rebuilt_sha256=sha256_of(path),
        different_bytes=len(different),
        first_different=different[0] if different else None,
        fixed_addresses=bool(engine.options.get("fixed_addresses")) and built.fixed_addresses,
        builds=builds,
    )
