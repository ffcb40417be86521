# SPDX-License-Identifier: Apache-2.0
"""Options of an export."""

from dataclasses import dataclass, field
from pathlib import Path

from saccade.core.options import Options
from saccade.core.schema import NonNegative
from saccade.exporter.graph.samples import GateLevel
from saccade.exporter.quantization.recipes import Target
from saccade.models.budget import BudgetLike


@dataclass(frozen=True)
class ExportOptions(Options):
    """Export a checkpoint to ONNX, one file per budget, each verified against the checkpoint."""

    out: Path  # folder to create
    name: str | None = None  # model name; default: the checkpoint's file name without .safetensors
    # 1,2/3,0.5 or t3,t1 or exact,fast; of a NAC also links per module, such as k32,k16; of any
    # model of images also their side in pixels, such as r224,r160; default: the family's
    budget: tuple[BudgetLike, ...] = ()
    # your images for the gate and the ranges of int8, instead of the checkpoint's samples: a folder
    # of images, or data as of `evaluate`
    calibrate_on: str | None = None
    outputs: tuple[str, ...] = ()  # additional outputs, such as attention
    slots: Path | None = None  # a selection of slots, written by `saccade select`
    precision: tuple[str, ...] = ("fp32",)  # any of fp32, fp16, bf16, int8: type of matrix products
    int8_for: Target = "cpu"  # where int8 is to run; gpu: symmetric scales, as TensorRT requires
    # on a CPU, write int8 only if it is so many times as fast as fp32
    int8_speedup: NonNegative = 1.2
    inline_ops: bool = False  # write custom ops as standard operators, for tools without functions
    # how much evidence: quick, standard, or thorough (320 samples in float64)
    gate: GateLevel = "standard"
    threshold: dict[str, NonNegative] = field(default_factory=dict)  # gate thresholds to override
    # accept fp16, bf16 and int8 variants far from the model: only policies use them, as early steps
    as_step: bool = False
    force: bool = False  # replace an existing folder
