# SPDX-License-Identifier: Apache-2.0
"""Options of a bulk job: what is asked of which inputs, who works, and where answers go."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from saccade.errors import SaccadeError
from saccade.exporter.runtimes.runtime import DEFAULT
from saccade.path_fields import PathFields
from saccade.serving.bulk.answers import Ask, Precision
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.runtimes.registry import ServedName

MOST_WORKERS = 4096
_RANGE = re.compile(r"([0-9]{1,4})(?::([0-9]{1,4}))?")


@dataclass(frozen=True)
class BulkOptions(PathFields):
    """Options of a bulk job. A job whose folder stands there already is gone on with."""

    # a folder of images, or .parquet, .csv, .jsonl, .tar or .npz files; a path or an address
    input: str
    out: str  # folder or address, such as s3://bucket/prefix
    ask: Ask | None = None  # default: what the model is for
    budget: float | str | None = None  # 0.5, 2/3, or a name such as fast; default: the largest
    policy: str | None = None  # in place of a budget: the chain of variants of that name
    max_risk: float | None = None  # the cheapest policy certified for at most this; 0: full model
    runner: Literal["local", "ray"] = "local"  # processes of this machine, or Ray Data's actors
    # processes, or MIN:MAX with --runner ray; default: one per core, on GPUs one per GPU
    workers: str | None = None
    # of a Ray cluster: auto, or ray://HOST:PORT; default: one of its own, on this machine
    address: str | None = None
    runtime: ServedName = DEFAULT  # onnxruntime, or tensorrt, whose plans run on GPUs
    engines: tuple[str, ...] = ()  # with tensorrt: folders of `saccade build`, one per kind of GPU
    # gpu: ONNX Runtime's CUDA provider; default: cpu, of plans gpu
    instances: Literal["cpu", "gpu"] | None = None
    device: str | None = None  # whose measurements count, if the artefact has several machines'
    batch: int = 64  # inputs of one request
    shard: int = 1024  # inputs of one file of answers
    column: str | None = None  # of images, or their paths, in tables; in tars the suffix
    id_column: str | None = None  # default: id where there is one, else file and row
    question_column: str | None = None  # default: question
    top: int = 3  # labels of each input
    dtype: Precision = "float32"  # of embeddings
    labels: Path | None = None  # zero-shot: a text file with a label a line
    templates: Path | None = None  # with --labels: a line a prompt, with {} for the label
    beam: int | None = None  # of a captioner's search
    max_length: int | None = None  # words of a caption, at most
    slots: int | None = None  # of slot attention
    seed: int | None = None  # from which slots begin
    threads: int | None = None  # of ONNX Runtime in each worker; default: cores over workers
    max_errors: int | None = None  # inputs that cannot be read before the job ends; default: any

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low, high in (
            ("batch", 1, 64),
            ("shard", 1, 1_000_000),
            ("top", 1, 100_000),
            ("threads", 1, 256),
            ("max_errors", 0, 2**62),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise SaccadeError(
                    f"--{name.replace('_', '-')} is {value}, expected {low} to {high:,}."
                )
        least, most = self.worker_range()
        if least != most and self.runner == "local":
            raise SaccadeError(
                f"--workers is {self.workers}: processes of this machine are as many from first to "
                "last. Give one number, or pass --runner ray."
            )
        if self.address is not None and self.runner != "ray":
            raise SaccadeError(f"--address is {self.address}, but --runner is local. Pass ray.")
        self.repository(Path())  # which refuses options that the runtime does not have

    @property
    def on_gpu(self) -> bool:
        """True if each worker needs a GPU."""
        return self.repository(Path()).on_gpu

    def repository(self, out: Path, threads: int | None = None) -> RepositoryOptions:
        """Options of the repository that answers."""
        return RepositoryOptions(
            out=out,
            runtime=self.runtime,
            engines=self.engines,
            instances=self.instances,
            device=self.device,
            labels=self.labels,
            templates=self.templates,
            max_images=self.batch,
            threads=threads or self.threads or 1,
            policies=self.policy is not None or self.max_risk is not None,
        )

    def worker_range(self) -> tuple[int | None, int | None]:
        """The smallest and largest number of workers, where they are given.

        Raises: SaccadeError if they are no numbers, or the wrong way round.
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
