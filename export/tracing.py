# SPDX-License-Identifier: Apache-2.0
"""A torch model to an ONNX graph, by torch's own exporter."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import torch
from torch import nn

from saccade.export.onnx_graph import IR_VERSION, OPSET, clean
from saccade.models.preprocessing import Preprocessing

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
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            _Served(model).eval(),
            (example,),
            dynamo=True,
            opset_version=OPSET,
            input_names=["image"],
            output_names=list(OUTPUTS),
            dynamic_shapes=({0: torch.export.Dim("b", min=1)},),
            verbose=False,
        )
    assert program is not None
    proto = clean(program.model_proto, root="model")
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
