# SPDX-License-Identifier: Apache-2.0
"""Memory and disk space that large models need: estimated and checked before any work.

The estimates are compared with measured peaks in benchmarks/results/memory_peaks.json.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.core.machine import available_memory_bytes
from saccade.core.sizes import size_text

_MIB = 2**20
MORE_MEMORY = (
    "Stop other programs, raise the limit of the container or of `ulimit -v`, or use a machine "
    "with more memory."
)


@dataclass(frozen=True)
class Peak:
    """Estimate of the largest resident memory of a command: fixed, and by weights in float32."""

    fixed_mib: int
    times_weights: float

    def bytes_for(self, weights_bytes: int) -> int:
        """Return the estimate for a model with these weights."""
        return self.fixed_mib * _MIB + round(self.times_weights * weights_bytes)


CONVERT = Peak(500, 1.55)
HALF_SOURCE = 0.3  # added to CONVERT for a source in half precision, which is kept beside float32
EXPORT = {
    "fp32": Peak(650, 2.3),
    "fp16": Peak(650, 2.3),
    "bf16": Peak(650, 2.3),
    "int8": Peak(700, 2.5),
}
# ONNX Runtime's quantizer needs the whole graph as one protobuf message, which ends at 2 GiB.
INT8_WEIGHTS_BYTES = 2 * 2**30
FILE_SHARE = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 0.25}  # of the weights in float32


def convert_peak(weights_bytes: int, source_bytes: int) -> int:
    """Return the estimated peak of a conversion, from the size in float32 and that of the files."""
    half = HALF_SOURCE * weights_bytes if source_bytes < 0.75 * weights_bytes else 0
    return CONVERT.bytes_for(weights_bytes) + round(half)


def check_convert(out: Path, weights_bytes: int, source_bytes: int) -> None:
    """Check that a conversion fits; `weights_bytes` are those of all tensors in float32.

    Raises: SaccadeError with what is needed and what there is.
    """
    check_memory(f"{out}: the conversion", convert_peak(weights_bytes, source_bytes))
    check_disk(out, weights_bytes)


def check_export(out: Path, precisions: Sequence[str], budgets: int, weights_bytes: int) -> None:
    """Check that an export fits: a copy of the checkpoint, and files with at most all weights.

    Raises: SaccadeError with what is needed and what there is, or for int8 of too large a model.
    """
    if "int8" in precisions and weights_bytes > INT8_WEIGHTS_BYTES:
        raise SaccadeError(
            f"{out}: the weights are {size_text(weights_bytes)} in float32, expected at most "
            f"{size_text(INT8_WEIGHTS_BYTES)} for int8, whose quantizer takes no larger graph. "
            "Leave int8 out of --precision: fp16 and bf16 have no such limit."
        )
    most = max(precisions, key=lambda name: EXPORT[name].bytes_for(weights_bytes))
    check_memory(f"{out}: the export in {most}", EXPORT[most].bytes_for(weights_bytes))
    share = 1 + budgets * sum(FILE_SHARE[name] for name in precisions)
    check_disk(out, round(share * weights_bytes))


def check_memory(what: str, needed: int) -> None:
    """Check that there is enough memory.

    Raises: SaccadeError with both numbers.
    """
    if needed > (there := available_memory_bytes()):
        raise SaccadeError(
            f"{what} needs about {size_text(needed)} of memory, found {size_text(there)} "
            f"available to this process. {MORE_MEMORY}"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """True if Python, torch or ONNX Runtime could not allocate memory, also as a cause."""
    cause = error.__cause__ or error.__context__
    return (
        isinstance(error, MemoryError)
        or any(words in str(error).lower() for words in ("allocate memory", "bad_alloc"))
        or (cause is not None and is_out_of_memory(cause))
    )


def check_disk(out: Path, needed: int) -> None:
    """Check that there is enough space where a file or folder will be written.

    Raises: SaccadeError with both numbers.
    """
    place = out.absolute().parent
    while not place.exists():
        place = place.parent
    if needed > (free := shutil.disk_usage(place).free):
        raise SaccadeError(
            f"{out}: up to {size_text(needed)} will be written, found {size_text(free)} free on "
            f"that disk. Free space there, or pass --out on another disk."
        )
