# SPDX-License-Identifier: Apache-2.0
"""Options of a repository: its folder, its runtime, and how requests wait."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from saccade.core.errors import SaccadeError
from saccade.core.options import Options
from saccade.core.schema import Pattern, Range, Share
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.serving.repository.runtimes.registry import ServedName, served_runtime

MOST_THREADS, MOST_PRIORITIES, MOST_ROUTERS = 256, 100, 16
# A number outside its range is a typing mistake, and a server would accept it.
_WORD = Pattern(r"[^\W\d]\w*", "a word such as gpu")
SloMs = Annotated[float, Range(1, 60_000)]
_Threads = Annotated[int, Range(0, MOST_THREADS)]


@dataclass(frozen=True)
class RepositoryOptions(Options):
    """Options of a repository: its folder, its runtime, and the images its router refuses."""

    out: Path  # folder to write
    force: bool = False  # replace an existing folder
    # onnxruntime (bundled server or container), openvino (bundled server) or tensorrt (container)
    runtime: ServedName = DEFAULT
    engines: tuple[str, ...] = ()  # with tensorrt: folders of `saccade build`, one per kind of GPU
    # use only these, such as fp32,int8; default: all in the folder
    precisions: tuple[str, ...] = ()
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
    slo_ms: SloMs | None = None
    # with --slo-ms: the smallest budget under load, a number or a name; policies have their risk
    floor_budget: float | str | None = None
    # share of policies' answers that the full model gives too, while the router is idle: a policy
    # that loses more than its risk is withdrawn; 0: none
    monitor: Share = 0.005
    # keep the newest of these images in this folder of the serving machine, to calibrate on
    keep_samples: Path | None = None
    # run custom ops with saccade's kernels if they can be built; --no-op-library: run custom ops
    # with their ONNX function bodies
    op_library: bool = True
    instances: Literal["cpu", "gpu"] | None = None  # default: cpu, plans gpu; gpu: container only
    instance_count: Annotated[int, Range(1, 64)] = 1  # instances of each variant
    # processes of the router, each with its share of the instances; one answers about 1,000
    # requests of one small image per second
    routers: Annotated[int, Range(1, MOST_ROUTERS)] = 1
    # threads of one run; default: by --cores and the measurements (see docs/serving.md); 0: as many
    # as ONNX Runtime takes by itself
    threads: _Threads | None = None
    # cores of the server; default: those of this machine
    cores: Annotated[int, Range(1, 4096)] | None = None
    inter_op_threads: _Threads = 1  # threads of ONNX Runtime across nodes
    parallel_nodes: bool = False  # let ONNX Runtime run independent nodes at the same time
    # ONNX Runtime's optimization: 0 all, 1 extended, -1 basic, 2 none
    graph_level: Annotated[int, Range(-1, 2)] = 0
    # most requests waiting for one variant; default: no limit
    max_queue: Annotated[int, Range(1, 1_000_000)] | None = None
    # refuse a request that has waited longer
    queue_timeout_ms: Annotated[float, Range(0.001, 3_600_000)] | None = None
    # requests may set a priority from 1 (first) to this
    priority_levels: Annotated[int, Range(2, MOST_PRIORITIES)] | None = None
    # a resource that all variants on a GPU share, such as gpu
    rate_limit: Annotated[str, _WORD] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor_budget is not None and self.slo_ms is None:
            raise SaccadeError(
                "Found --floor-budget without --slo-ms. Pass both, or drop --floor-budget."
            )
        if self.routers > self.instance_count:
            raise SaccadeError(
                f"Found --routers {self.routers} with --instance-count {self.instance_count}: each "
                "router needs an instance of each variant. Pass fewer routers, or more instances."
            )
        served_runtime(self.runtime).check_options(self)

    @property
    def on_gpu(self) -> bool:
        """True if the variants run on a GPU."""
        return runtime_named(self.runtime).gpu_only or self.instances == "gpu"
