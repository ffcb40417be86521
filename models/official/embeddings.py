# SPDX-License-Identifier: Apache-2.0
"""A trunk without a classifier as an embedding of images, family 'sparo' without a text tower."""

from saccade.models.official.conversion import Reading
from saccade.models.sparo.config import Pooling, SparoConfig
from saccade.models.sparo.trunk import TRUNK as SPARO_TRUNK
from saccade.models.trunks import PretrainedTrunk, TrunkShape

NOTES: dict[Pooling, str] = {
    "cls": "no classifier: the embedding is the class token, brought to length 1",
    "map": "the embedding is what the attention pooling reads, brought to length 1",
    "mean": "no classifier: the embedding is the mean of the patches, brought to length 1",
}
_PREFIX = "trunk."  # SoT's, before the names of a trunk


def embedding_of(reading: Reading, shape: TrunkShape, pooling: Pooling) -> SparoConfig:
    """Rename the tensors of a trunk from SoT's names to SPARO's; return their configuration.

    Tensors without that prefix keep their names.
    """
    import torch

    config = SparoConfig(
        **SPARO_TRUNK.fields(shape), text=False, pooling=pooling, embed_dim=shape.width
    )
    # A tensor that the file lacks is renamed, too, so that the report names it.
    absent = {name: torch.empty(0) for name in reading.names.keys() - reading.weights.keys()}
    given, names = reading.weights | absent, reading.names
    of_trunk = {name for name in given if name.startswith(_PREFIX)}
    trunk = {name.removeprefix(_PREFIX): given[name] for name in of_trunk}
    state = SPARO_TRUNK.state(PretrainedTrunk(shape, trunk), config)
    state |= {name: value for name, value in given.items() if name not in of_trunk}
    by_object = {id(value): names[name] for name, value in given.items()}
    by_place = {value.data_ptr(): names[name] for name, value in reading.weights.items()}
    reading.names = {
        # Class token and registers are parts of one tensor.
        name: by_object.get(id(value), by_place.get(value.data_ptr(), "cls_token, reg_token"))
        for name, value in state.items()
    }
    lacking = {id(value) for value in absent.values()}
    reading.weights = {name: value for name, value in state.items() if id(value) not in lacking}
    if pooling == "cls":
        reading.put("image_pool.project.weight", torch.eye(shape.width))
    return config
