# SPDX-License-Identifier: Apache-2.0
"""Check a repository's files and configurations, this machine, and the router.

A configuration and the files of a model must be those that `saccade repository` writes. A list of
forbidden fields would be out of date with the server's next release: `EXECUTION_ENV_PATH`, an agent
or a warm-up of four billion rounds take one line of a configuration each. A server also reads files
that the configuration does not mention: it finds a library `libtriton_*.so`, a `model.py`, a stub
of the Python backend, a second version or `configs/` next to a model by name.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import util
from itertools import zip_longest
from pathlib import Path

import numpy as np

from saccade.core.errors import Damaged, SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.frontier import FILE_NAME as FRONTIER
from saccade.models.preprocessing import Preprocessing
from saccade.serving.repository.description import DESCRIPTION, WRITER, entries, fault_of
from saccade.serving.repository.installation import check_installation, find_installation
from saccade.serving.repository.model_config import LABELS_FILE, RUN_BATCH
from saccade.serving.repository.policies import (
    adaptive_faults,
    adaptive_of,
    monitor_faults,
    monitor_of,
    policies_of,
    policy_faults,
)
from saccade.serving.repository.preflight.rendered import (
    FREE_OF_GROUPS,
    FREE_OF_ROUTES,
    differences,
    free_fields,
    free_of_router,
    rendered_config,
    rendered_files,
    rendered_router,
    rendered_router_files,
    rendered_routes,
    variants_of,
    zero_shot,
)
from saccade.serving.repository.preflight.repository import (
    NotChecked,
    Repository,
    RepositoryModel,
    Target,
)
from saccade.serving.repository.router_folder import absurd_caps
from saccade.serving.repository.runtimes.registry import served_runtime

MOST_MODELS = 512
_MIB = 2**20
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


def check_files(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the files are those of the description, unchanged, and that none is a link."""
    present = {entry.name: entry for entry in entries(repository.folder)}
    for name, entry in present.items():
        if entry.kind != "file":
            yield f"{name} {fault_of(entry)}"
    for name in sorted(set(present) - set(repository.files) - {DESCRIPTION}):
        if present[name].kind == "file":
            yield f"{name} was not written by saccade. Remove it."
    for name, digest in sorted(repository.files.items()):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            yield f"{name} leads out of the repository."
        elif name not in present:
            yield str(Damaged(name, "is missing or not a file", WRITER))
        elif present[name].kind == "file":
            yield from _content(present[name].path, name, digest)


def _content(path: Path, name: str, digest: str) -> Iterator[str]:
    if not path.stat().st_size and path.name != LABELS_FILE:
        yield f"{name} is empty."
        return
    try:
        actual = sha256_of(path)
    except OSError as error:
        yield f"{name} cannot be read ({error.strerror})."
        return
    if actual != digest:
        why = f"SHA-256 {actual[:12]}..., expected {digest[:12]}..."
        yield str(Damaged(name, f"was changed after it was written ({why})", WRITER))


def check_models(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the model folders are those of the description: a server loads every folder."""
    said = [repository.deployment.model, *repository.deployment.variants]
    if len(said) > MOST_MODELS:
        yield (
            f"the description names {len(said)} models, expected at most {MOST_MODELS}: each runs "
            "in its own process."
        )
    folders = sorted(path.name for path in repository.folder.iterdir() if path.is_dir())
    for name in said:
        if not _NAME.fullmatch(name):
            yield (
                f"{name!r} is not a model name, expected lower-case letters, digits and hyphens."
            )
    for name, count in Counter(said).items():
        if count > 1:
            yield f"the description names {name} {count} times, expected once."
    for name in sorted(set(said) - set(folders)):
        yield f"{name} has no folder."
    for name in sorted(set(folders) - set(said)):
        # A server loads every folder; on some file systems the twin is even the same folder.
        twin = next((folder for folder in said if folder.lower() == name.lower()), None)
        differs = f", which differs from {twin} in case only" if twin else ""
        yield f"folder {name} is not a model of this repository{differs}. Remove it."


def check_top(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the top folder has only the description and the measurements besides models."""
    for path in sorted(repository.folder.iterdir()):
        if not path.is_dir() and path.name not in (DESCRIPTION, FRONTIER):
            yield f"{path.name} is not a file that saccade writes. Remove it."


def check_machine(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the bundled server finds its libraries, a supported Python, and its packages."""
    if not target.bundled:
        if why := served_runtime(repository.deployment.runtime).only_bundled:
            yield f"{target.title} does not run its models: {why}"
            return
        raise NotChecked(f"{target.title} brings its own Python and libraries")
    try:
        check_installation(find_installation(), repository.deployment.runtime)
    except SaccadeError as error:
        yield str(error)
    if util.find_spec("PIL") is None:
        yield (
            "pillow is not installed, but the router needs it to decode images. Run: pip install "
            "pillow"
        )


def check_memory(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the weights and activations of all instances fit into memory.

    The memory that the runtime itself needs is not counted.
    """
    if not repository.models:
        raise NotChecked("no model could be opened")
    sizes = [(needed_bytes(model), model) for model in repository.models]
    on_gpu = any(
        group.kind == group.KIND_GPU for _, m in sizes for group in m.config.instance_group
    )
    if on_gpu and not target.gpus:
        raise NotChecked("its instances run on a GPU, and this machine has none")
    total = min(gpu.memory_bytes for gpu in target.gpus) if on_gpu else target.memory_bytes
    if total is None:
        raise NotChecked("the size of the memory is unknown. Pass --memory-mib")
    needed = sum(size for size, _ in sizes)
    if needed > total:
        largest, model = max(sizes, key=lambda pair: pair[0])
        yield (
            f"the models need at least {needed // _MIB} MiB ({model.name} alone needs "
            f"{largest // _MIB} MiB), but there are {total // _MIB} MiB."
        )


def needed_bytes(model: RepositoryModel) -> int:
    """Estimate a model's memory from its manifest and file size.

    It counts weights and peak activations of every instance.

    Units: bytes.
    """
    config = model.config
    said = config.parameters[RUN_BATCH].string_value if RUN_BATCH in config.parameters else ""
    batch = int(said) if said.isdecimal() and int(said) else config.max_batch_size
    instances = sum(group.count for group in config.instance_group)
    weights = model.served.weights_bytes(model)
    return int(instances * (weights + batch * model.manifest.cost.peak_activation_bytes))


def check_router_fields(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the router's configuration is the one that saccade writes for these models."""
    free = free_of_router(repository)
    yield from differences(repository.router.fields, rendered_router(repository), free)


def check_router_content(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the folder has the routes, the labels, and this release's code, which is run."""
    yield from departing_files(repository.router.folder, rendered_router_files(repository))


def check_router(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the server can pass on the router's answers, and its variants take its batches."""
    config = repository.router.config
    for model in repository.models:
        if config.max_batch_size > model.config.max_batch_size:
            yield (
                f"its max_batch_size is {config.max_batch_size}, but {model.name} takes at most "
                f"{model.config.max_batch_size}."
            )


def check_routes(repository: Repository, target: Target) -> Iterator[str]:
    """Check that routes.json is what saccade writes for these models, with sensible caps."""
    try:
        content = repository.routes
    except NotChecked as error:
        yield f"{error}."
        return
    yield from (f"routes.json: {reason}" for reason in _caps(content["preprocessing"]))
    hashes = {variant.name: variant.sha256 for variant in variants_of(repository)}
    yield from (f"routes.json: {reason}" for reason in policy_faults(policies_of(content), hashes))
    variants = variants_of(repository)
    budgets = [float(variant.main.variant.budget) for variant in variants]
    in_group = variants[0].in_group
    if (adaptive := adaptive_of(content)) is not None:
        routed = [float(route["budget"]) for route in content["variants"]] if in_group else budgets
        reasons = adaptive_faults(adaptive, policies_of(content), routed)
        yield from (f"routes.json: adaptive: {reason}" for reason in reasons)
    if (monitor := monitor_of(content)) is not None:
        reasons = monitor_faults(monitor, policies_of(content))
        yield from (f"routes.json: monitor: {reason}" for reason in reasons)
    free = {**FREE_OF_ROUTES, **(FREE_OF_GROUPS if in_group else {})}
    for reason in differences(content, rendered_routes(repository), free):
        yield f"routes.json: {reason}"
    if budgets != sorted(budgets, reverse=True):
        yield f"budgets are in the order {budgets}, expected largest first."
    for name in zero_shot(repository):
        yield from _vectors(repository, f"{name}.npy")


def _caps(declared: object) -> Iterator[str]:
    if isinstance(declared, dict):
        try:
            yield from (f"{reason}." for reason in absurd_caps(Preprocessing.from_dict(declared)))
        except SaccadeError as error:
            yield str(error)


def _vectors(repository: Repository, name: str) -> Iterator[str]:
    try:
        # Memory-mapped: a header that claims more than the file has is refused, not allocated.
        path = repository.router.version / name
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        yield f"the vectors of labels in {name} cannot be read ({error})."
        return
    count = len(repository.router.labels)
    if vectors.ndim != 2 or len(vectors) != count or not np.isfinite(vectors).all():
        yield (
            f"{name} has vectors of shape {vectors.shape} for {count} labels, expected one finite "
            "vector per label."
        )


def check_config(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the configuration can be parsed."""
    model.parsed_config()
    return iter(())


def check_fields(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that saccade would write this configuration for the model with some options."""
    yield from differences(model.fields, rendered_config(model), free_fields(model.served))


def check_content(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the folder contains exactly the files that saccade writes for this model."""
    yield from departing_files(model.folder, rendered_files(model))


def departing_files(folder: Path, written: Mapping[str, bytes | None]) -> Iterator[str]:
    """Report files that are missing from a folder, do not belong there, or were changed."""
    present = {entry.name: entry.path for entry in entries(folder)}
    for name in sorted(set(written) - set(present)):
        yield f"{name} is missing. Write the repository again."
    for name in sorted(set(present) - set(written)):
        yield f"{name} is not a file that saccade writes. A server may run it: remove it."
    for name in sorted(set(present) & set(written)):
        content = written[name]
        if content is not None and (found := present[name].read_bytes()) != content:
            yield (
                f"{name} is not what this release of saccade writes: "
                f"{_departure(found, content)}. Write the repository again."
            )


def _departure(content: bytes, expected: bytes) -> str:
    texts = (each.decode("utf-8", "surrogateescape") for each in (content, expected))
    lines = zip_longest(*(text.splitlines(keepends=True) for text in texts), fillvalue="")
    pairs = enumerate(lines, start=1)
    number, (here, there) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"line {number} is {here!r:.60}, expected {there!r:.60}"


def check_versions(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that `1` is the only version folder."""
    # The server reads the number at the start of a folder's name: `1.old` is also version 1.
    versions = sorted(
        path.name for path in model.folder.iterdir() if path.is_dir() and path.name[:1].isdigit()
    )
    if versions != ["1"]:
        yield f"its version folders are {', '.join(versions) or 'none'}, expected 1 only."


def check_instances(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that instances are on a device that the server and this machine have."""
    if all(group.kind != group.KIND_GPU for group in model.config.instance_group):
        return
    if target.bundled:
        yield (
            "instance kind is KIND_GPU, but the backend of the bundled server runs on KIND_CPU. "
            "Write the repository with --instances cpu, or use a container of the server."
        )
    elif not target.gpus:
        raise NotChecked("its instances run on a GPU, and this machine has none")


def check_labels(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that there is one label per class."""
    for tensor in model.config.output:
        count = len(model.manifest.labels)
        if tensor.label_filename and list(tensor.dims) != [-1] and count != tensor.dims[-1]:
            classes = tensor.dims[-1]
            yield f"{LABELS_FILE} has {count} labels, but {tensor.name} has {classes} classes."
