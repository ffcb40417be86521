# SPDX-License-Identifier: Apache-2.0
"""A torch model to an ONNX graph, by torch's own exporter."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx
import torch
from torch import nn

from saccade.export.onnx_graph import clean
from saccade.export.translation import translations
from saccade.models.preprocessing import Preprocessing
from saccade.plugins.onnx_model import IR_VERSION, OPSET, attach_bodies

OUTPUTS = ("logits", "probabilities", "embedding")
_EXAMPLE_IMAGES = 3  # neither 0 nor 1, which torch would take for constants


class _Served(nn.Module):
    """What the file computes: the model's named outputs, in a fixed order."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self.model.outputs(image)
        return tuple(outputs[name] for name in OUTPUTS)


def trace(model: nn.Module, preprocessing: Preprocessing) -> onnx.ModelProto:
    """The cleaned graph of a model whose input is an image.

    Shapes: image [b h w c] uint8 -> logits [b k], probabilities [b k], embedding [b d].
    """
    shape = (preprocessing.height_px, preprocessing.width_px, preprocessing.channels)
    example = torch.zeros(_EXAMPLE_IMAGES, *shape, dtype=torch.uint8)
    return trace_module(_Served(model), {"image": example}, OUTPUTS)


def trace_module(
    module: nn.Module, examples: dict[str, torch.Tensor], outputs: Sequence[str]
) -> onnx.ModelProto:
    """The cleaned graph of any module whose inputs share a batch as their first axis.

    Each of saccade's ops becomes one node with its function body beside it: a runtime that has
    the kernel takes the kernel, another one computes the body.
    Shapes: examples [b ...] with one b that is neither 0 nor 1.
    """
    batch = torch.export.Dim("b", min=1)
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            module.eval(),
            tuple(examples.values()),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(examples),
            output_names=list(outputs),
            dynamic_shapes=tuple({0: batch} for _ in examples),
            custom_translation_table=translations(),
            verbose=False,
        )
    assert program is not None
    proto = clean(program.model_proto, root="model")
    attach_bodies(proto)
    assert proto.ir_version == IR_VERSION, proto.ir_version
    return proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's words on torchvision, which is not used, and its own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
