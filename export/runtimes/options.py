# SPDX-License-Identifier: Apache-2.0
"""Options of a build, common to all runtimes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from saccade.core.options import Options, choice_of
from saccade.core.schema import Range

_MOST_MIB = 2**20
if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = choice_of("saccade.exporter.runtimes.runtime:engine_names")


@dataclass(frozen=True)
class BuildOptions(Options):
    """Build an engine for each variant of an artefact folder, after verifying its types."""

    # tensorrt or tensorrt-rtx; default: the first one that is installed
    engine: EngineName | None = None
    variant: tuple[str, ...] = ()  # names of variants to build; default: all
    batch: str = "1:8:64"  # smallest, usual and largest number of samples
    axis: tuple[str, ...] = ()  # ranges of other dynamic axes, such as k=1:7:16
    # scratch memory of an engine; default: TensorRT's
    workspace_mib: Annotated[int, Range(1, _MOST_MIB)] | None = None
    timing_cache: Path | None = None  # reused and extended; TensorRT only
    compute_capability: tuple[str, ...] = ()  # such as 8.9,12.0; default: the GPU's, else 8.9
    out: Path | None = None  # default: ARTEFACT/engines/ENGINE-CAPABILITIES
    force: bool = False  # replace an existing folder
