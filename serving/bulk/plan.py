# SPDX-License-Identifier: Apache-2.0
"""Plan of a job, written once: every input in order, the request, and the variants that answer.

A shard is a row group of the listing. It is finished when its file of answers exists.
"""

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes
from saccade.core.json_text import parse_json
from saccade.core.leftovers import is_leftover
from saccade.core.schema import typed
from saccade.serving.bulk.answers import AnswerForm
from saccade.serving.bulk.place import Place

SCHEMA, VERSION = "saccade.bulk", 1
ANSWERS, ERRORS, CSV = "answers", "errors", "csv"
MANIFEST, SUCCESS = "manifest.json", "_SUCCESS"
REPOSITORY = "_plan/repository.tar"  # for workers on other machines
_PLAN, _LISTING = "_plan/plan.json", "_plan/listing.parquet"


@dataclass(frozen=True)
class Columns:
    """Names of columns. Defaults: `id`, `question`, and the first usual name for images."""

    image: str | None = None
    id: str | None = None
    question: str | None = None


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of the model: for encoded images, for numbers, and for a question."""

    encoded: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    question: bool = False
    max_image_mib: int = 16

    @property
    def images_alone(self) -> bool:
        """True if a request consists of one image."""
        return len(self.encoded) == 1 and not self.numbers and not self.question


@dataclass(frozen=True)
class BulkPlan:
    """Everything that the answers depend on."""

    schema: str
    version: int
    model: str
    variant: str
    sha256: dict[str, str]  # SHA-256 of each variant of the model, by name
    runtime: str
    processor: str  # cpu or gpu
    engines: dict[str, str]  # SHA-256 of each TensorRT plan, by variant and compute capability
    policies_sha256: str  # hash of the repository's policies; empty: none
    input: str
    listing_sha256: str
    inputs: int
    shard: int  # inputs per shard
    batch: int
    parameters: dict[str, str]  # parameters of each request
    form: AnswerForm
    columns: Columns
    wanted: ModelInputs
    data_root: str | None = None

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-self.inputs // self.shard)


def hash_of(listing: Any) -> str:
    """Return the SHA-256 of a listing's rows in their order, in hexadecimal."""
    digest = hashlib.sha256()
    for batch in listing.combine_chunks().to_batches(max_chunksize=65_536):
        for column in batch.columns:
            digest.update(repr(column.to_pylist()).encode())
    return digest.hexdigest()


def write_plan(out: Place, plan: BulkPlan, listing: Any) -> None:
    """Write the listing, then the plan: a folder without a plan is not a job."""
    import pyarrow.parquet as pq

    data = io.BytesIO()
    pq.write_table(listing, data, compression="zstd", row_group_size=plan.shard)
    out.join(_LISTING).write(data.getvalue())
    out.join(_PLAN).write(json_bytes(asdict(plan)))


def read_plan(out: Place) -> BulkPlan | None:
    """Return the plan at `out`, or None if there is nothing.

    Raises: SaccadeError if `out` has other content.
    """
    try:
        content = parse_json(out.join(_PLAN).read())
    except FileNotFoundError:
        if not all(_is_begun(name) for name, _ in out.files(recursive=True)):
            raise SaccadeError(
                f"{out}: exists already and is not a bulk job (it has no {_PLAN}). Choose another "
                "--out."
            ) from None
        return None
    if not isinstance(content, dict) or (content.get("schema"), content.get("version")) != (
        SCHEMA,
        VERSION,
    ):
        raise SaccadeError(
            f"{out.join(_PLAN)}: is not a plan of this release of saccade. Choose another --out."
        )
    if isinstance(form := content.get("form"), dict):
        form.setdefault("csv", False)  # earlier releases wrote none
    return typed(BulkPlan, content, f"{out.join(_PLAN)}: ")


def check_same(out: Place, old: BulkPlan, new: BulkPlan) -> None:
    """Check that a job is resumed with the options that it was started with.

    Raises: SaccadeError that names the difference.
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
        f"{out}: contains a different job: the {words.get(first, first)} changed from "
        f"{_short(before[first])} to {_short(now[first])}. Resume it with its original options, or "
        "choose another --out."
    )


def read_shard(out: Place, index: int) -> list[dict[str, Any]]:
    """Return the entries of one shard."""
    import pyarrow.parquet as pq

    with out.join(_LISTING).open() as file:
        entries: list[dict[str, Any]] = pq.ParquetFile(file).read_row_group(index).to_pylist()
    return entries


def part_name(index: int) -> str:
    """Return the name of a shard's file of answers and of its file of errors."""
    return f"part-{index:06}.parquet"


def index_of(name: str) -> int:
    """Return the shard that a file name from `part_name` belongs to."""
    return int(name.removeprefix("part-").removesuffix(".parquet"))


def _is_begun(name: str) -> bool:
    """Return whether a file may remain from a job that was killed before its plan was written."""
    return name == _LISTING or (name.startswith("_plan/") and is_leftover(Path(name)))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
