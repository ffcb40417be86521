# SPDX-License-Identifier: Apache-2.0
"""Options of a bulk job: its inputs, the request, the workers, and the output."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from saccade.core.errors import SaccadeError
from saccade.core.options import Options
from saccade.core.schema import Natural, Range
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.serving.bulk.answers import Ask, Precision
from saccade.serving.client.call_options import Top
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.runtimes.registry import ServedName

MOST_WORKERS = 4096
_OF_REPOSITORY = ("runtime", "engines", "instances", "device", "labels", "templates")
_RANGE = re.compile(r"([0-9]{1,4})(?::([0-9]{1,4}))?")


@dataclass(frozen=True)
class BulkOptions(Options):
    """Options of a bulk job. If `out` contains the same job already, it is resumed."""

    # a folder of images, or .parquet, .csv, .jsonl, .tar or .npz files; a path or an address
    input: str
    out: str  # folder or address, such as s3://bucket/prefix
    ask: Ask | None = None  # kind of answer; default: the model's main one
    budget: float | str | None = None  # 0.5, 2/3, or a name such as fast; default: the largest
    policy: str | None = None  # instead of a budget: the policy of this name
    max_risk: float | None = None  # cheapest policy certified for at most this risk; 0: full model
    runner: Literal["local", "ray"] = "local"  # processes on this machine, or Ray Data's actors
    # processes, or MIN:MAX with --runner ray; default: one per core, on GPUs one per GPU
    workers: str | None = None
    # address of a Ray cluster: auto, or ray://HOST:PORT; default: a new one on this machine
    address: str | None = None
    # onnxruntime or openvino, or tensorrt, whose plans run on GPUs
    runtime: ServedName = DEFAULT
    engines: tuple[str, ...] = ()  # with tensorrt: folders of `saccade build`, one per kind of GPU
    # gpu: ONNX Runtime's CUDA provider; default: cpu, for plans gpu
    instances: Literal["cpu", "gpu"] | None = None
    device: str | None = None  # device whose measurements to use, if the artefact has several
    batch: Annotated[int, Range(1, 64)] = 64  # inputs per request
    shard: Annotated[int, Range(1, 1_000_000)] = 1024  # inputs per file of answers
    column: str | None = None  # in tables: images or their paths; in tars: suffix of the images
    id_column: str | None = None  # column of ids; default: id if it exists, else file and row
    question_column: str | None = None  # column of questions; default: question
    # folder or address that contains the images which tables name; default: --input, or its folder
    data_root: str | None = None
    top: Top = 3  # labels per input
    dtype: Precision = "float32"  # type of embeddings
    csv: bool = False  # also write labels or captions as CSV, a file beside each Parquet file
    labels: Path | None = None  # zero-shot: a text file with one label per line
    templates: Path | None = None  # with --labels: one prompt per line, with {} for the label
    beam: int | None = None  # width of a captioner's beam search
    max_length: int | None = None  # most words in a caption
    slots: int | None = None  # number of slots of slot attention
    seed: int | None = None  # seed for the initial slots
    # threads of ONNX Runtime per worker; default: cores over workers
    threads: Annotated[int, Range(1, 256)] | None = None
    max_errors: Natural | None = None  # most inputs without an answer; default: no limit

    def __post_init__(self) -> None:
        super().__post_init__()
        least, most = self.worker_range()
        if least != most and self.runner == "local":
            raise SaccadeError(
                f"--workers is {self.workers}, expected one number: the number of processes on "
                "this machine cannot change. Pass one number, or pass --runner ray."
            )
        if self.address is not None and self.runner != "ray":
            raise SaccadeError(
                f"--address is {self.address}, but --runner is local. Pass --runner ray as well."
            )
        self.repository(Path())  # refuses options that the runtime does not have

    @property
    def on_gpu(self) -> bool:
        """True if each worker needs a GPU."""
        return self.repository(Path()).on_gpu

    def repository(self, out: Path, threads: int | None = None) -> RepositoryOptions:
        """Return the options of the repository that answers."""
        plans = runtime_named(self.runtime).gpu_only  # they have no threads
        return RepositoryOptions(
            out=out,
            **{name: getattr(self, name) for name in _OF_REPOSITORY},
            max_images=self.batch,
            threads=self.threads if plans else threads or self.threads or 1,
            policies=self.policy is not None or self.max_risk is not None,
        )

    def worker_range(self) -> tuple[int | None, int | None]:
        """Return the smallest and largest number of workers, or None for both by default.

        Raises: SaccadeError if they are not numbers, or in the wrong order.
        """
        if self.workers is None:
            return None, None
        found = _RANGE.fullmatch(self.workers)
        least = int(found[1]) if found else 0
        most = int(found[2] or found[1]) if found else 0
        if not 1 <= least <= most <= MOST_WORKERS:
            raise SaccadeError(
                f"--workers is {self.workers!r:.60}, expected 1 to {MOST_WORKERS}, or two such "
                "numbers as MIN:MAX."
            )
        return least, most
