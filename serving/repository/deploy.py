# SPDX-License-Identifier: Apache-2.0
"""Write the model repository of an artefact folder: one folder that a server loads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes, new_folder, refuse_existing
from saccade.core.verbosity import note
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FILE_NAME as FRONTIER
from saccade.exporter.artefact.frontier import FrontierEntry
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.graph.trial import refuse_untried
from saccade.models.preprocessing import Preprocessing
from saccade.plugins.execution import OPS, Ops
from saccade.serving.client.zero_shot import Labelling, class_vectors, read_labelling
from saccade.serving.repository.adaptive import served_adaptive
from saccade.serving.repository.checks import check_alike, chosen, measurements
from saccade.serving.repository.components import ComponentPlan, write_component
from saccade.serving.repository.description import DESCRIPTION, Deployment, description
from saccade.serving.repository.image_caps import absurd_caps
from saccade.serving.repository.model_config import MAX_BATCH
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.policies import ServedPolicy, served_policies
from saccade.serving.repository.preflight.examine import broken_rules
from saccade.serving.repository.preflight.target import Target
from saccade.serving.repository.router_folder import RouterPlan, write_router
from saccade.serving.repository.runtimes.registry import served_runtime
from saccade.serving.repository.runtimes.served_runtime import ServedFiles
from saccade.serving.repository.stored_sample import Sample, samples
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

    def component(self, manifest: Manifest, sample: Sample) -> ComponentPlan:
        """Return the plan of one component, with the sample to store."""
        (variant,) = (
            variant for variant in self.router.variants if manifest in variant.components.values()
        )
        return ComponentPlan(
            manifest,
            run_batch=self.router.run_batch[variant.name],
            threads=self.threads[manifest.variant.name].on(served_cores(self.options)),
            sample=sample,
            options=self.options,
            served=self.served[manifest.variant.name],
        )


def deploy(
    folder: ArtefactFolder | Path | str,
    options: RepositoryOptions,
    *,
    labelling: Labelling | None = None,
    policies: tuple[ServedPolicy, ...] | None = None,
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
    components = [
        plan.component(manifest, kept[manifest.variant.name])
        for variant in plan.router.variants
        for manifest in variant.components.values()
    ]
    try:
        with new_folder(out, force=options.force) as partial:
            return _write(partial, components, plan)
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
    policies: tuple[ServedPolicy, ...] | None = None,
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
    measured = _measurements(folder, options, ops)
    labels = labelling.labels if labelling else None
    if not options.policies:
        policies = ()
    elif policies is None:
        policies = served_policies(whole, variants, runtime=options.runtime, labelling=labelling)
    if policies and options.on_gpu:
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
        max_images=max_images,
        policies=policies,
        adaptive=served_adaptive(whole, variants, policies, options, labelled=bool(labels)),
    )
    threads = thread_rules(variants, measured, options)
    return RepositoryPlan(folder, options, router, served, threads, ops)


def _write(partial: Path, components: Sequence[ComponentPlan], plan: RepositoryPlan) -> Deployment:
    router, frontier = plan.router, plan.folder.frontier
    for component in components:
        write_component(partial / component.name, component)
    write_router(partial / router.model, router)
    if frontier and router.measured:
        served = {policy.name for policy in router.policies}
        measured = tuple(policy for policy in frontier.policies if policy.policy in served)
        copy = replace(frontier, policies=measured)
        (partial / FRONTIER).write_bytes(json_bytes(copy.to_dict()))
    deployment = Deployment(
        folder=components[0].options.out,
        model=router.model,
        variants=tuple(component.name for component in components),
        unmeasured=tuple(v.name for v in router.variants if v.name not in router.measured),
        runtime=components[0].options.runtime,
        samples=tuple(component.name for component in components if component.sample.answers),
        ops=plan.ops,
        policies=tuple(policy.name for policy in router.policies),
        slo_ms=router.adaptive.slo_ms if router.adaptive else None,
        cores=served_cores(plan.options),
        threads=dict(plan.threads),
    )
    (partial / DESCRIPTION).write_bytes(
        json_bytes(description(partial, deployment, router.preprocessing))
    )
    _hold_to_rules(partial)
    return deployment


def _hold_to_rules(folder: Path) -> None:
    if broken := broken_rules(folder, Target(bundled=False)):
        raise SaccadeError(f"A server would not load this repository: {broken[0]} Export again.")


def _measurements(
    folder: ArtefactFolder, options: RepositoryOptions, ops: Ops
) -> dict[str, FrontierEntry]:
    """Return the measurements to route by; note if those of custom ops do not apply."""
    entries, every = (
        measurements(folder, options.device, options.runtime, wanted) for wanted in (ops, None)
    )
    otherwise = {entry.ops for entry in every.values() if entry.ops} - {ops}
    if ops and otherwise and ops not in {value.ops for value in entries.values()}:
        note(
            f"{folder.path / FRONTIER}: was measured with custom ops run by {otherwise.pop()}, but "
            f"the repository runs them by {ops}. The router chooses among these variants by budget "
            f"only. To measure them again, run: saccade bench {folder} --out REPORT"
        )
    return entries


def _ops(served: Iterable[ServedFiles]) -> Ops:
    """Return how the deployment runs custom ops: by bodies if any component does."""
    kinds = {files.ops for files in served} - {None}
    return max(kinds, key=OPS.index, default=None)


def _caps(declared: Preprocessing, options: RepositoryOptions) -> Preprocessing:
    names = ("max_image_mib", "max_megapixels", "max_side_px", "max_images", "min_side_px")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    caps = replace(declared, **given)
    if caps.max_images > MAX_BATCH:
        raise SaccadeError(
            f"max_images is {caps.max_images}, expected at most {MAX_BATCH}, the largest batch of "
            "a variant. Pass a smaller --max-images; the client splits larger lists into requests."
        )
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
