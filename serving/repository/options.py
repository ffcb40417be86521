# SPDX-License-Identifier: Apache-2.0
"""Options of a repository: its folder, its runtime, and how requests wait."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from saccade.core.errors import SaccadeError
from saccade.core.path_fields import PathFields
from saccade.core.schema import Range
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.serving.repository.runtimes.registry import ServedName, served_runtime

Threads = Range(0, 256)


@dataclass(frozen=True)
class RepositoryOptions(PathFields):
    """Options of a repository: its folder, its runtime, and the images its router refuses."""

    out: Path  # folder to write
    force: bool = False  # replace an existing folder
    # onnxruntime (bundled server or container), openvino (bundled server) or tensorrt (container)
    runtime: ServedName = DEFAULT
    engines: tuple[str, ...] = ()  # with tensorrt: folders of `saccade build`, one per kind of GPU
    precisions: tuple[str, ...] = ()  # such as fp32,int8; default: all precisions in the folder
    run_batch: int | None = None  # images per run; default: the fastest measured, else 8
    device: str | None = None  # device whose measurements to use, if the frontier has several
    max_image_mib: int | None = None  # largest encoded image; default: as in the checkpoint
    max_megapixels: int | None = None  # largest width times height of an image
    max_side_px: int | None = None  # largest side of an image
    min_side_px: int | None = None  # smallest side of an image
    max_images: int | None = None  # most images per request, at most 64
    labels: Path | None = None  # zero-shot: a text file with one label per line
    templates: Path | None = None  # with --labels: one prompt per line, with {} for the label
    # serve the folder's policies; --no-policies: leave them out
    policies: bool = True
    # answer requests that name no budget within this time, with less compute under load
    slo_ms: Annotated[float | None, Range(1, 60_000)] = None
    # with --slo-ms: the smallest budget under load, a number or a name; policies have their risk
    floor_budget: float | str | None = None
    # run custom ops with saccade's kernels if they can be built; --no-op-library: run custom ops
    # with their ONNX function bodies
    op_library: bool = True
    instances: Literal["cpu", "gpu"] | None = None  # default: cpu, plans gpu; gpu: container only
    instance_count: Annotated[int, Range(1, 64)] = 1  # instances of each variant
    # threads of one run; default: by --cores and the measurements (see docs/serving.md); 0: as many
    # as ONNX Runtime takes by itself
    threads: Annotated[int | None, Threads] = None
    # cores of the server; default: those of this machine
    cores: Annotated[int | None, Range(1, 4096)] = None
    inter_op_threads: Annotated[int, Threads] = 1  # threads of ONNX Runtime across nodes
    parallel_nodes: bool = False  # let ONNX Runtime run independent nodes at the same time
    # ONNX Runtime's optimization: 0 all, 1 extended, -1 basic, 2 none
    graph_level: Annotated[int, Range(-1, 2)] = 0
    # most requests waiting for one variant; default: no limit
    max_queue: Annotated[int | None, Range(1, 1_000_000)] = None
    # refuse a request that has waited longer
    queue_timeout_ms: Annotated[float | None, Range(0.001, 3_600_000)] = None
    # requests may set a priority from 1 (first) to this
    priority_levels: Annotated[int | None, Range(2, 100)] = None
    rate_limit: str | None = None  # a resource that all variants on a GPU share, such as gpu

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate_limit is not None and not self.rate_limit.isidentifier():
            raise SaccadeError(f"--rate-limit is {self.rate_limit!r}, expected a word such as gpu.")
        if self.floor_budget is not None and self.slo_ms is None:
            raise SaccadeError(
                "Found --floor-budget without --slo-ms. Pass both, or drop --floor-budget."
            )
        served_runtime(self.runtime).check_options(self)

    @property
    def on_gpu(self) -> bool:
        """True if the variants run on a GPU."""
        return runtime_named(self.runtime).gpu_only or self.instances == "gpu"
