# SPDX-License-Identifier: Apache-2.0
"""Build the variants of an artefact folder into plans, each with its manifest and ranges."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from saccade.core.checks import check_one_of
from saccade.core.errors import SaccadeError
from saccade.core.files import (
    new_folder,
    refuse_existing,
    sha256_of,
    write_atomically,
)
from saccade.core.progress import progress_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import FileEntry, Manifest, ParentEntry
from saccade.exporter.artefact.variant import PRECISIONS
from saccade.exporter.graph.trial import refuse_untried
from saccade.exporter.runtimes.gpu import gpu_at_hand
from saccade.exporter.runtimes.runtime import BuildOptions
from saccade.exporter.runtimes.tensorrt.child import BuildJob, BuiltPlan, Network, build_in_child
from saccade.exporter.runtimes.tensorrt.engine_manifest import (
    PLAN_SUFFIX,
    Engine,
    EngineManifest,
    Profile,
    plan_bytes,
    write_engine_manifest,
)
from saccade.exporter.runtimes.tensorrt.layer_types import (
    check_bindings,
    compare_with_inspector,
    expected_types_of,
    layer_types,
    prove_types,
)
from saccade.exporter.runtimes.tensorrt.loading import look_inside
from saccade.exporter.runtimes.tensorrt.modules import (
    NAMES,
    chosen_capabilities,
    chosen_engine,
    takes_plugins,
)
from saccade.models.interface import TensorSpec
from saccade.plugins.availability import TENSORRT_LIBRARY

Range = tuple[int, int, int]  # smallest, the one to tune for, largest
BATCH = "b"
_WORD = re.compile(r"[a-z][a-z0-9_]*")
_MOST_SLOTS = 64  # the most that a request may ask for
_LARGEST = 2**31 - 1


def read_range(text: str, flag: str) -> Range:
    """Read a range such as 1:8:64, or one number for a fixed size.

    Raises: SaccadeError if it is not a range or its numbers do not increase.
    """
    parts = text.split(":")
    if len(parts) not in (1, 3) or not all(part.isascii() and part.isdigit() for part in parts):
        raise SaccadeError(
            f"{flag} {text!r}: expected smallest:usual:largest such as 1:8:64, or one number."
        )
    least, usual, most = (int(part) for part in (parts * 3 if len(parts) == 1 else parts))
    if not 1 <= least <= usual <= most <= _LARGEST:
        raise SaccadeError(
            f"{flag} {text!r}: {least}, {usual}, {most} are not increasing numbers of at least 1. "
            "Write smallest:usual:largest, such as 1:8:64."
        )
    return least, usual, most


def read_axes(given: tuple[str, ...]) -> dict[str, Range]:
    """Read ranges of other axes, such as k=1:7:16; by axis name.

    Raises: SaccadeError if one has another form, or names the batch or an axis twice.
    """
    ranges: dict[str, Range] = {}
    for text in given:
        word, equals, numbers = text.partition("=")
        if not equals or not _WORD.fullmatch(word) or word == BATCH or word in ranges:
            raise SaccadeError(
                f"--axis {text!r}: expected an axis other than the batch, each once, such as "
                "k=1:7:16. For the batch, use --batch."
            )
        ranges[word] = read_range(numbers, f"--axis {word}")
    return ranges


def profiles_of(
    manifest: Manifest, batch: Range, axes: Mapping[str, Range]
) -> dict[str, dict[str, Any]]:
    """Return the profile of every input of a variant; a fixed axis keeps its size.

    An axis `k` counts slots. The usual number is the model's own. The largest is the number that
    the router accepts, or the number of slots that the model learned.

    Raises: SaccadeError if an axis has no range, or a range that the manifest forbids.
    """
    known = {BATCH: batch, **_slots(manifest), **axes}
    words = {axis for spec in manifest.inputs for axis in spec.shape if isinstance(axis, str)}
    name = manifest.variant.name
    if open_axes := sorted(words - set(known)):
        raise SaccadeError(
            f"{name}: the range of axis {open_axes[0]!r} is unknown. "
            f"Pass a range, such as --axis {open_axes[0]}=1:8:64."
        )
    learned = _learned_slots(manifest)
    if "k" in words and learned and known["k"][2] > learned:
        raise SaccadeError(
            f"--axis k: asks for up to {known['k'][2]} slots, but {name} has learned {learned}. "
            f"Pass a range up to {learned}, or leave the option out."
        )
    return {spec.name: _profile(spec, known) for spec in manifest.inputs}


def check_axes(manifests: Sequence[Manifest], axes: Mapping[str, Range]) -> None:
    """Check that every axis with a range exists in some variant.

    Raises: SaccadeError otherwise.
    """
    inputs = [spec for manifest in manifests for spec in manifest.inputs]
    known = {axis for spec in inputs for axis in spec.shape if isinstance(axis, str)} - {BATCH}
    for axis in axes:
        check_one_of("--axis", axis, sorted(known), "For the batch, use --batch.")


def check_batch(manifest: Manifest, batch: Range) -> None:
    """Check that a variant with a fixed batch gets a range of only that number.

    Raises: SaccadeError otherwise.
    """
    for spec in manifest.inputs:
        first = spec.shape[0]
        if isinstance(first, int) and batch != (first,) * 3:
            raise SaccadeError(
                f"--batch {':'.join(map(str, batch))}: {spec.name!r} of {manifest.variant.name} "
                f"has a fixed batch of {first}. Pass --batch {first}."
            )


def _profile(spec: TensorSpec, known: Mapping[str, Range]) -> Profile:
    ranges = [(axis,) * 3 if isinstance(axis, int) else known[axis] for axis in spec.shape]
    least, usual, most = zip(*ranges, strict=True)
    return {"min": least, "opt": usual, "max": most}


def _slots(manifest: Manifest) -> dict[str, Range]:
    usual = manifest.facts.get("slots")
    if not isinstance(usual, int):
        return {}
    return {"k": (1, usual, _learned_slots(manifest) or max(_MOST_SLOTS, usual))}


def _learned_slots(manifest: Manifest) -> int | None:
    rule = manifest.facts.get("initial_state")
    if not isinstance(rule, dict) or rule.get("kind") != "learned":
        return None
    return len(rule["slots"])


_MIB = 2**20


@dataclass(frozen=True)
class Engines:
    """A folder of plans and the manifest of each."""

    folder: Path
    manifests: tuple[EngineManifest, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        manifests = [manifest.to_dict() for manifest in self.manifests]
        return {"folder": str(self.folder), "engines": manifests}

    def files(self) -> list[dict[str, Any]]:
        """Return a summary of each plan, for lists of files."""
        return [
            {
                "name": manifest.file.name,
                "bytes": manifest.file.bytes,
                "sha256": manifest.file.sha256,
                "compute_capabilities": list(manifest.compute_capabilities),
                "version": manifest.version,
                "build_seconds": round(manifest.build_seconds, 3),
            }
            for manifest in self.manifests
        ]

    def to_text(self) -> Any:
        """Return a table with a row per plan: size, types of matrix layers, build time."""
        from rich.table import Table

        first = self.manifests[0]
        by = f"{NAMES[first.engine]} {first.version} for {', '.join(first.compute_capabilities)}"
        table = Table(title=f"{self.folder}: {by}", title_justify="left")
        words = ("variant", "matrix layers")
        for name in ("variant", "MiB", "matrix layers", "batch", "build s"):
            table.add_column(name, justify="left" if name in words else "right")
        for manifest in self.manifests:
            types = ", ".join(f"{count} {kind}" for kind, count in manifest.layer_types.items())
            batch = next(iter(manifest.profiles.values()))
            shown = ":".join(str(batch[key][0]) for key in ("min", "opt", "max"))
            size = f"{manifest.file.bytes / _MIB:.1f}"
            table.add_row(
                manifest.variant.name, size, types, shown, f"{manifest.build_seconds:.1f}"
            )
        return table


def build(artefact: ArtefactFolder | Path | str, options: BuildOptions) -> Engines:
    """Write `<variant>.plan` and its manifest for each variant of an artefact folder.

    The folder is created only when every variant was built. Each engine is built in a separate
    process.

    Raises: GateFailed if a network has other types than its variant promises, SaccadeError for
        an option or a file that cannot be built, MissingPackage if TensorRT is not installed.
    """
    artefact = ArtefactFolder.open(artefact)
    manifests = chosen_variants(artefact, options.variant)
    jobs = _jobs(artefact, manifests, options)
    out = options.out or default_out(artefact, jobs[0].engine, jobs[0].compute_capabilities)
    refuse_existing(out, force=options.force, inputs=[artefact.path])
    cache = options.timing_cache
    with _no_empty_parent(out), new_folder(out, force=options.force) as folder:
        built = build_all(artefact, manifests, jobs, folder, cache)
        digest = None if cache is None else sha256_of(cache)
        built_manifests = []
        for manifest, job, result in zip(manifests, jobs, built, strict=True):
            engine = _manifest(folder, manifest, job, result, digest)
            built_manifests.append(_seen_on_gpu(folder, engine, artefact, manifest))
            write_engine_manifest(folder, built_manifests[-1])
    return Engines(out, tuple(built_manifests))


@contextmanager
def _no_empty_parent(out: Path) -> Iterator[None]:
    made = not out.parent.exists()
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):
                out.parent.rmdir()
        raise


def default_out(artefact: ArtefactFolder, engine: str, capabilities: tuple[str, ...]) -> Path:
    """Return the output folder of engines if `--out` is not given."""
    return artefact.path / "engines" / f"{engine}-{'+'.join(capabilities)}"


def chosen_variants(artefact: ArtefactFolder, wanted: tuple[str, ...]) -> list[Manifest]:
    """Return the manifests of the wanted variants (default: all) after checking each file's hash.

    Raises: SaccadeError for a name that the folder does not have, with the export command for it.
    """
    names = [manifest.variant.name for manifest in artefact.manifests]
    for name in wanted:
        precision = name.rpartition("-")[2]
        flag = f" --precision {precision}" if precision in PRECISIONS else ""
        make = f"The precision is chosen on export: saccade export CHECKPOINT{flag}"
        check_one_of(f"{artefact}: a variant", name, names, make)
    chosen = [
        manifest for manifest in artefact.manifests if not wanted or manifest.variant.name in wanted
    ]
    refuse_untried(artefact, chosen)
    return chosen


def build_all(
    artefact: ArtefactFolder,
    manifests: Sequence[Manifest],
    jobs: Sequence[BuildJob],
    folder: Path,
    timing_cache: Path | None,
) -> list[BuiltPlan]:
    """Build each job into `<folder>/<variant>.plan`, after its network's types were verified.

    Every build extends the timing cache, both for the next build and in `timing_cache` itself.

    Raises: GateFailed for a network of other types, SaccadeError for what TensorRT refuses.
    """
    built = []
    with progress_of("build", len(jobs)) as advance:
        for manifest, job in zip(manifests, jobs, strict=True):
            advance(0, note=job.name)
            work = folder / f".work-{job.name}"
            work.mkdir()
            proof = _proof(artefact, manifest)
            result = build_in_child(replace(job, timing_cache=timing_cache), work, proof, advance)
            result.plan.replace(folder / (job.name + PLAN_SUFFIX))
            if timing_cache is not None and result.timing_cache is not None:
                write_atomically(timing_cache, result.timing_cache.read_bytes())
            write_atomically(folder / f"{job.name}.log", result.log.encode())
            shutil.rmtree(work)
            built.append(result)
    return built


def _proof(artefact: ArtefactFolder, manifest: Manifest) -> Callable[[Network], None]:
    expected_types = expected_types_of(artefact, manifest)

    def prove(network: Network) -> None:
        check_bindings(expected_types.name, network, manifest.inputs, manifest.outputs)
        prove_types(expected_types, network)
        # Make sure that the parsed file is the one that the plan's manifest names.
        artefact.file(manifest)

    return prove


def _seen_on_gpu(
    folder: Path, engine: EngineManifest, artefact: ArtefactFolder, manifest: Manifest
) -> EngineManifest:
    """Add what the inspector shows to the manifest, if this machine has the GPU for the plan."""
    gpu = gpu_at_hand()
    if gpu is None or gpu.capability not in engine.compute_capabilities:
        return engine
    plan = folder / engine.file.name
    inspected = look_inside(plan, engine, plan_bytes(plan, engine))
    seen = compare_with_inspector(expected_types_of(artefact, manifest), inspected.inspector)
    return replace(engine, options={**engine.options, "inspector": seen})


def _check_symmetric(manifest: Manifest) -> None:
    recipe = manifest.quantization
    if recipe is not None and recipe.target != "gpu":
        raise SaccadeError(
            f"{manifest.variant.name}: was quantized for a {recipe.target} (recipe "
            f"{recipe.recipe}), but TensorRT needs symmetric int8. Export again with: saccade "
            "export CHECKPOINT --precision int8 --int8-for gpu"
        )


def _jobs(
    artefact: ArtefactFolder, manifests: Sequence[Manifest], options: BuildOptions
) -> list[BuildJob]:
    batch, axes = read_range(options.batch, "--batch"), read_axes(options.axis)
    check_axes(manifests, axes)
    for manifest in manifests:
        check_batch(manifest, batch)
        _check_symmetric(manifest)
    profiles = [profiles_of(manifest, batch, axes) for manifest in manifests]
    engine = chosen_engine(options.engine)
    if engine == "tensorrt-rtx" and options.timing_cache is not None:
        raise SaccadeError(
            "--timing-cache: TensorRT-RTX does not measure kernels and so has no timing cache. "
            "Leave it out, or pass --engine tensorrt."
        )
    capabilities = chosen_capabilities(engine, options.compute_capability)
    return [
        BuildJob(
            name=manifest.variant.name,
            engine=engine,
            onnx=artefact.file(manifest),
            profiles=profile,
            compute_capabilities=capabilities,
            workspace_mib=options.workspace_mib,
            plugins=plugins_of(engine, manifest),
        )
        for manifest, profile in zip(manifests, profiles, strict=True)
    ]


def plugins_of(engine: str, manifest: Manifest) -> tuple[Path, ...]:
    """Return the plugin library if the engine uses it; TensorRT-RTX uses the function bodies."""
    wanted = takes_plugins(engine) and manifest.custom_ops and TENSORRT_LIBRARY.exists()
    return (TENSORRT_LIBRARY,) if wanted else ()


def _manifest(
    folder: Path, manifest: Manifest, job: BuildJob, built: BuiltPlan, timing_cache: str | None
) -> EngineManifest:
    gpu = gpu_at_hand()
    plan = folder / (job.name + PLAN_SUFFIX)
    return EngineManifest(
        variant=manifest.variant,
        file=FileEntry(plan.name, sha256_of(plan), plan.stat().st_size),
        parent=ParentEntry(manifest.file.name, manifest.file.sha256),
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        engine=cast(Engine, job.engine),
        version=built.network.version,
        compute_capabilities=job.compute_capabilities,
        driver=gpu.driver if gpu else None,
        profiles=job.profiles,
        options={
            "workspace_mib": job.workspace_mib,
            "profiling_verbosity": "detailed",
            "tf32": False,
        },
        timing_cache_sha256=timing_cache,
        plugins={path.name: sha256_of(path) for path in job.plugins},
        layer_types=layer_types(built.network),
        build_seconds=round(built.seconds, 3),
    )
