# SPDX-License-Identifier: Apache-2.0
"""Plan of a job, written once: every input in its order, what is asked, and by which variants.

A shard is a row group of the listing. It is done when its file of answers is there.
"""

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError
from saccade.exporter.runtimes.runtime import DEFAULT
from saccade.files import json_bytes
from saccade.json_text import parse_json
from saccade.leftovers import is_leftover
from saccade.schema import typed
from saccade.serving.bulk.answers import Form
from saccade.serving.bulk.place import Place
from saccade.serving.bulk.sources import Columns, Wanted

SCHEMA, VERSION = "saccade.bulk", 1
ANSWERS, ERRORS = "answers", "errors"
MANIFEST, SUCCESS = "manifest.json", "_SUCCESS"
REPOSITORY = "_plan/repository.tar"  # for workers of other machines
_PLAN, _LISTING = "_plan/plan.json", "_plan/listing.parquet"
# What a plan means that does not contain them: all jobs were done so.
_BEFORE: dict[str, Any] = {
    "runtime": DEFAULT,
    "processor": "cpu",
    "engines": {},
    "policies_sha256": "",
}


@dataclass(frozen=True)
class Plan:
    """Everything that the answers depend on."""

    schema: str
    version: int
    model: str
    variant: str
    sha256: dict[str, str]  # of each variant of the model, by name
    runtime: str
    processor: str  # cpu or gpu
    engines: dict[str, str]  # SHA-256 of each TensorRT plan, by variant and compute capability
    policies_sha256: str  # of those that the repository has; empty: none
    input: str
    listing_sha256: str
    inputs: int
    shard: int  # inputs of one
    batch: int
    parameters: dict[str, str]  # of each request
    form: Form
    columns: Columns
    wanted: Wanted

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.inputs // self.shard)


def write_plan(out: Place, plan: Plan, listing: Any) -> None:
    """Write the listing, then the plan: without that there is no job."""
    import pyarrow.parquet as pq

    data = io.BytesIO()
    pq.write_table(listing, data, compression="zstd", row_group_size=plan.shard)
    out.join(_LISTING).write(data.getvalue())
    out.join(_PLAN).write(json_bytes(asdict(plan)))


def read_plan(out: Place) -> Plan | None:
    """The plan that stands at `out`; none where there is nothing.

    Raises: SaccadeError if something else stands there.
    """
    try:
        content = parse_json(out.join(_PLAN).read())
    except FileNotFoundError:
        if not all(_is_begun(name) for name, _ in out.files(recursive=True)):
            raise SaccadeError(
                f"{out}: exists already and holds no bulk job ({_PLAN} is missing). Choose another "
                "place with --out."
            ) from None
        return None
    if not isinstance(content, dict) or (content.get("schema"), content.get("version")) != (
        SCHEMA,
        VERSION,
    ):
        raise SaccadeError(
            f"{out.join(_PLAN)}: is no plan of this release of saccade. Choose another place with "
            "--out."
        )
    return typed(Plan, _BEFORE | content, f"{out.join(_PLAN)}: ")


def check_same(out: Place, old: Plan, new: Plan) -> None:
    """A job is gone on with as it was begun.

    Raises: SaccadeError naming what is another.
    """
    before, now = asdict(old), asdict(new)
    changed = [key for key in before if before[key] != now[key]]
    if not changed:
        return
    words = {
        "listing_sha256": "inputs",
        "inputs": "number of inputs",
        "sha256": "model's files",
        "engines": "plans",
        "policies_sha256": "policies",
    }
    first = changed[0]
    raise SaccadeError(
        f"{out}: holds another job: its {words.get(first, first)} was {_short(before[first])}, now "
        f"it is {_short(now[first])}. Go on with what it was begun with, or choose another place "
        "with --out."
    )


def read_shard(out: Place, index: int) -> list[dict[str, Any]]:
    """The entries of one shard."""
    import pyarrow.parquet as pq

    with out.join(_LISTING).open() as file:
        entries: list[dict[str, Any]] = pq.ParquetFile(file).read_row_group(index).to_pylist()
    return entries


def part_name(index: int) -> str:
    """The name of a shard's file of answers, and of its file of errors."""
    return f"part-{index:06}.parquet"


def index_of(name: str) -> int:
    """The shard of such a file."""
    return int(name.removeprefix("part-").removesuffix(".parquet"))


def _is_begun(name: str) -> bool:
    """True for what a job leaves that was ended before its plan was written."""
    return name == _LISTING or (name.startswith("_plan/") and is_leftover(Path(name)))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
