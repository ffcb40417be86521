# SPDX-License-Identifier: Apache-2.0
"""Shards of a job: a function turns one shard into a file of answers, and may be run again.

It writes the same bytes in every worker and every time: first the errors, then the answers, each
file atomically. A process runs it for one job only.
"""

import atexit
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.worker import say
from saccade.models.data.samples.source import RowUnreadable
from saccade.serving.bulk.place import Place
from saccade.serving.bulk.plan import (
    ANSWERS,
    CSV,
    ERRORS,
    BulkPlan,
    part_name,
    read_plan,
    read_shard,
)
from saccade.serving.bulk.sources import BulkSource
from saccade.serving.client.answers import answers_csv
from saccade.serving.client.operations import as_arrays
from saccade.serving.client.texts import question_tokens
from saccade.serving.local.in_process import (
    InProcessRouter,
    InputRefused,
    labels_in,
    models_of,
    view_in,
)

QUESTION = "question"
Answered = tuple[list[str], dict[str, list[Any]]]


@dataclass(frozen=True)
class BulkJob:
    """The folders of a job, for its workers."""

    out: str
    repository: str  # a folder on the worker's machine


@dataclass(frozen=True)
class ShardRequest:
    """One shard of a job."""

    job: BulkJob
    shard: int


@dataclass(frozen=True)
class FinishedShard:
    """One finished shard."""

    shard: int
    answers: int
    errors: int


@dataclass(frozen=True)
class Begun:
    """One shard that is being run, and how many of its inputs are done."""

    shard: int
    inputs: int


class JobShards:
    """The shards of one job, run one after the other in this process."""

    def __init__(self, job: BulkJob) -> None:
        self._out, repository = Place(job.out), Path(job.repository)
        plan = read_plan(self._out)
        assert plan is not None, "the plan is written before workers start"
        self._plan: BulkPlan = plan
        self._source = BulkSource(Place(plan.input), plan.columns, plan.wanted, plan.data_root)
        router = repository / plan.model
        self._view = view_in(router)
        self._labels = labels_in(router)
        self._model = InProcessRouter(router, models_of(repository))

    def run(self, shard: int) -> FinishedShard:
        """Write the answers of a shard.

        Raises: SaccadeError if the model fails, or the answers cannot be written.
        """
        errors: list[tuple[str, str]] = []
        found = list(self._answers(read_shard(self._out, shard), errors))
        ids = [one for part, _ in found for one in part]
        schema = self._plan.form.schema()
        columns = {
            name: [value for _, part in found for value in part[name]] for name in schema.names[1:]
        }
        self._write_errors(shard, errors)
        if self._plan.form.csv:  # before the answers, with which a shard is finished
            rows = self._plan.form.csv_rows({"id": ids} | columns)
            name = Path(part_name(shard)).with_suffix(".csv").name
            self._out.join(f"{CSV}/{name}").write(answers_csv(rows))
        self._out.join(f"{ANSWERS}/{part_name(shard)}").write(
            _parquet({"id": ids} | columns, schema)
        )
        return FinishedShard(shard, len(ids), len(errors))

    def close(self) -> None:
        """Close the files and the model before the process exits."""
        self._source.close()
        self._model.close()

    def _answers(
        self, entries: Sequence[Mapping[str, Any]], errors: list[tuple[str, str]]
    ) -> Iterator[Answered]:
        for at in range(0, len(entries), self._plan.batch):
            say(at)
            ids, values = [], []
            for entry in entries[at : at + self._plan.batch]:
                try:
                    values.append(self._values(entry))
                    ids.append(entry["id"])
                except RowUnreadable as error:
                    errors.append((entry["id"], str(error)))
            if ids:
                yield from self._answered(ids, values, errors)

    def _values(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        values = self._source.read(entry)
        if self._plan.wanted.question:
            metadata = self._view.runtime_metadata(self._plan.variant)
            try:
                values[QUESTION] = question_tokens([entry["text"] or ""], metadata)[0]
            except SaccadeError as error:
                raise RowUnreadable(str(error)) from error
        return values

    def _answered(
        self,
        ids: list[str],
        values: list[dict[str, Any]],
        errors: list[tuple[str, str]],
        first: int = 0,
    ) -> Iterator[Answered]:
        """Yield the answers. If a batch is refused, each half is tried alone.

        `first` is the index of the first input in the batch.
        """
        form = self._plan.form
        place = {self._view.first_row: str(first)} if self._view.first_row and first else {}
        try:
            arrays = self._model.ask(
                self._inputs(values), form.outputs, {**self._plan.parameters, **place}
            )
        except InputRefused as refused:
            if len(ids) == 1:
                errors.append((ids[0], str(refused)))
                return
            middle = len(ids) // 2
            yield from self._answered(ids[:middle], values[:middle], errors, first)
            yield from self._answered(ids[middle:], values[middle:], errors, first + middle)
            return
        yield ids, form.columns(arrays, self._labels)

    def _inputs(self, values: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        try:
            return as_arrays(
                {name: [one[name] for one in values] for name in values[0]}, self._view
            )
        except (SaccadeError, ValueError) as error:  # wrong types, or shapes that differ
            raise InputRefused(str(error)) from error

    def _write_errors(self, shard: int, errors: Sequence[tuple[str, str]]) -> None:
        import pyarrow as pa

        place = self._out.join(f"{ERRORS}/{part_name(shard)}")
        if not errors:
            place.remove()  # of an earlier try that could not read these inputs
            return
        ids, reasons = zip(*errors, strict=True)
        schema = pa.schema([("id", pa.string()), ("reason", pa.string())])
        place.write(_parquet({"id": list(ids), "reason": list(reasons)}, schema))


_here: dict[BulkJob, JobShards] = {}


def main(request: ShardRequest) -> FinishedShard:
    """Run one shard. The job stays open for the next one."""
    if request.job not in _here:
        _here[request.job] = JobShards(request.job)
        atexit.register(_here[request.job].close)
    return _here[request.job].run(request.shard)


def _parquet(columns: Mapping[str, list[Any]], schema: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = io.BytesIO()
    pq.write_table(pa.table(dict(columns), schema=schema), data, compression="zstd")
    return data.getvalue()
