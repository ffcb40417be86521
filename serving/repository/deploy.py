# SPDX-License-Identifier: Apache-2.0
"""Write the model repository of an artefact folder: one folder that a server loads."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.core.files import copy_file, json_bytes, new_folder, refuse_existing, sha256_of
from saccade.core.verbosity import note
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FILE_NAME as FRONTIER
from saccade.exporter.artefact.frontier import FrontierEntry, cost_shares
from saccade.exporter.artefact.manifest import DATA_SUFFIX, SUFFIX, VariantFiles
from saccade.exporter.graph.trial import refuse_untried
from saccade.models.preprocessing import Preprocessing
from saccade.plugins.contract import OPS, Ops
from saccade.serving.client.texts import Labelling, class_vectors, read_labelling
from saccade.serving.repository.checks import check_alike, chosen, measurements
from saccade.serving.repository.description import DESCRIPTION, Deployment, description
from saccade.serving.repository.model_config import MAX_BATCH, MODEL_FILE, variant_config
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.policies import (
    NO_POLICIES,
    RouterPolicies,
    served_adaptive,
    served_monitor,
    served_policies,
)
from saccade.serving.repository.preflight.repository import Target
from saccade.serving.repository.preflight.verb import broken_rules
from saccade.serving.repository.router_folder import (
    MOST,
    RouterPlan,
    absurd_caps,
    write_labels,
    write_router,
)
from saccade.serving.repository.runtimes.registry import served_runtime
from saccade.serving.repository.runtimes.served_runtime import ServedFiles, StoredFile
from saccade.serving.repository.stored_sample import Sample, samples, write_sample
from saccade.serving.repository.threads import ThreadRule, served_cores, thread_rules


@dataclass(frozen=True)
class RepositoryPlan:
    """Everything that is known about a repository before it is written."""

    folder: ArtefactFolder  # with the served variants only
    options: RepositoryOptions
    router: RouterPlan
    served: Mapping[str, ServedFiles]  # of each component, by its name
    threads: Mapping[str, ThreadRule]  # the same
    ops: Ops


def deploy(
    folder: ArtefactFolder | Path | str,
    options: RepositoryOptions,
    *,
    labelling: Labelling | None = None,
    policies: RouterPolicies | None = None,
) -> Deployment:
    """Write the repository of an artefact folder: every variant, and the router that calls them.

    `labelling` takes the place of the options' label files, and `policies`, whose certificates
    have been checked, that of the folder's policy files.

    Raises: SaccadeError if the output exists, an artefact does not match its manifest, a plan does
        not match its artefact, the frontier has measurements of other files, one router cannot
        serve all variants, or a server would not load the repository.
    """
    folder, out = ArtefactFolder.open(folder), options.out
    texts = [path for path in (options.labels, options.templates) if path is not None]
    inputs = [folder.path, *map(Path, options.engines), *texts]
    refuse_existing(out, force=options.force, inputs=inputs)
    labelling = labelling or read_labelling(options.labels, options.templates)
    refuse_untried(folder, folder.manifests)
    plan = plan_repository(folder, options, labelling, policies)
    kept = samples(plan.folder)
    try:
        with new_folder(out, force=options.force) as partial:
            return _write(partial, plan, kept)
    except OSError as error:
        raise SaccadeError(
            f"{out}: cannot be written ({error.strerror}). Free some space, or choose another "
            "folder with --out."
        ) from error


repository = deploy
"""`deploy` by the name of its command."""


def plan_repository(
    folder: ArtefactFolder,
    options: RepositoryOptions,
    labelling: Labelling | None,
    policies: RouterPolicies | None = None,
) -> RepositoryPlan:
    """Return the plan of a folder's repository; `labelling` is what the options' files contain.

    Its policies are `policies` if given, otherwise those of the folder.

    Raises: SaccadeError if one router cannot serve all variants, a plan does not match its
        artefact, or the frontier has measurements of other files.
    """
    whole, folder = folder, chosen(folder, options.precisions, options.runtime)
    check_alike(folder, options.runtime)
    variants = folder.variants
    declared = variants[0].preprocessing
    preprocessing = _caps(declared, options) if declared else None
    max_images = preprocessing.max_images if preprocessing else options.max_images or MAX_BATCH
    served = served_runtime(options.runtime).component_files(folder, options, max_images)
    ops = _ops(served.values())
    measured = measurements(folder, options.device, options.runtime, ops)
    labels = labelling.labels if labelling else None
    if not options.policies:
        policies = NO_POLICIES
    elif policies is None:
        policies = served_policies(whole, variants, runtime=options.runtime, labelling=labelling)
    if policies.routes and options.on_gpu:
        note(
            "The policies were chosen by the speeds of CPUs. Their certificates are about answers, "
            "not speeds, but on a GPU another variant or chain may be faster: measure there with "
            "`saccade bench --url`. To leave the policies out, pass --no-policies."
        )
    router = RouterPlan(
        model=variants[0].main.variant.model,
        variants=variants,
        preprocessing=preprocessing,
        labels=labelling.labels if labelling else variants[0].labels,
        classes=class_vectors(folder, labelling) if labelling else {},
        measured=measured,
        run_batch={
            variant.name: _run_batch(variant, measured.get(variant.name), options, served)
            for variant in variants
        },
        instances=options.instance_count,
        routers=options.routers,
        max_images=max_images,
        policies=policies.routes,
        spaces=policies.spaces,
        adaptive=served_adaptive(
            variants, cost_shares(variants, measured), policies, options, labelled=bool(labels)
        ),
        monitor=served_monitor(policies, options),
    )
    threads = thread_rules(variants, measured, options)
    return RepositoryPlan(folder, options, router, served, threads, ops)


def _write(partial: Path, plan: RepositoryPlan, kept: Mapping[str, Sample]) -> Deployment:
    router, frontier = plan.router, plan.folder.frontier
    names = tuple(
        manifest.variant.name
        for variant in router.variants
        for manifest in variant.components.values()
    )
    for name in names:
        write_component(partial / name, plan, kept[name])
    write_router(partial / router.model, router)
    if frontier and router.measured:
        served = {policy.name for policy in router.policies}
        measured = tuple(policy for policy in frontier.policies if policy.policy in served)
        copy = replace(frontier, policies=measured)
        (partial / FRONTIER).write_bytes(json_bytes(copy.to_dict()))
    deployment = Deployment(
        folder=plan.options.out,
        model=router.model,
        variants=names,
        unmeasured=tuple(v.name for v in router.variants if v.name not in router.measured),
        runtime=plan.options.runtime,
        samples=tuple(name for name in names if kept[name].answers),
        ops=plan.ops,
        policies=tuple(policy.name for policy in router.policies),
        slo_ms=router.adaptive.slo_ms if router.adaptive else None,
        cores=served_cores(plan.options),
        threads=dict(plan.threads),
    )
    (partial / DESCRIPTION).write_bytes(
        json_bytes(description(partial, deployment, router.preprocessing))
    )
    for broken in broken_rules(partial, Target(bundled=False)):
        raise SaccadeError(f"A server would not load this repository: {broken} Export again.")
    return deployment


def _ops(served: Iterable[ServedFiles]) -> Ops:
    """Return how the deployment runs custom ops: by bodies if any component does."""
    kinds = {files.ops for files in served} - {None}
    return max(kinds, key=OPS.index, default=None)


def _caps(declared: Preprocessing, options: RepositoryOptions) -> Preprocessing:
    given = {name: getattr(options, name) for name in MOST if getattr(options, name) is not None}
    caps = replace(declared, **given)
    if absurd := next(absurd_caps(caps), None):
        raise SaccadeError(f"{absurd}. Pass a smaller value to `saccade repository`.")
    return caps


def _run_batch(
    variant: VariantFiles,
    entry: FrontierEntry | None,
    options: RepositoryOptions,
    served: Mapping[str, ServedFiles],
) -> int:
    own = [served[component.variant.name] for component in variant.components.values()]
    largest = min(files.max_batch for files in own)
    usual = min(files.usual_batch for files in own)
    measured = min(entry.best_batch, largest) if entry else usual
    chosen = measured if options.run_batch is None else options.run_batch
    if not 1 <= chosen <= min(largest, MAX_BATCH):
        raise SaccadeError(
            f"run_batch is {chosen}, expected 1 to {min(largest, MAX_BATCH)} images."
        )
    return chosen


def write_component(
    place: Path, plan: RepositoryPlan, sample: Sample, *, refer: bool = False
) -> None:
    """Write the folder of the component that `place` names; with `refer`, link to its ONNX file.

    Raises: SaccadeError if a file changes while it is copied.
    """
    name, options = place.name, plan.options
    variant, manifest = next(
        (variant, manifest)
        for variant in plan.router.variants
        for manifest in variant.components.values()
        if manifest.variant.name == name
    )
    served, run_batch = plan.served[name], plan.router.run_batch[variant.name]
    (place / "1").mkdir(parents=True)
    for file_name, file in served.files.items():
        if not (refer and _linked(file, place / file_name)):
            _store(file, place / file_name)
    # The manifest, for users who have the repository but not the artefact folder.
    (place / (name + SUFFIX)).write_bytes(json_bytes(manifest.to_dict()))
    config = variant_config(
        manifest,
        served.fields(run_batch, plan.threads[name].on(served_cores(options))),
        options,
        run_batch=run_batch,
        max_batch=served.max_batch,
        sample=sample.shapes,
    )
    (place / "config.pbtxt").write_text(config, "utf-8")
    write_labels(place, manifest.labels)
    write_sample(place, sample)


def _linked(file: StoredFile, target: Path) -> bool:
    """Link to an ONNX file, whose bytes have been checked, if the file system has links."""
    is_model = target.name == MODEL_FILE or target.name.endswith(f".onnx{DATA_SUFFIX}")
    if isinstance(file.source, bytes) or not is_model:
        return False  # a link to a plan is refused when it is opened
    try:
        target.symlink_to(file.source.resolve())
    except OSError:
        return False
    return True


def _store(file: StoredFile, target: Path) -> None:
    if isinstance(file.source, bytes):
        target.write_bytes(file.source)
        return
    copy_file(file.source, target)
    if sha256_of(target) != (file.sha256 or sha256_of(file.source)):
        raise SaccadeError(f"{file.source}: changed while it was copied. Run the command again.")
