# SPDX-License-Identifier: Apache-2.0
"""A folder as timm and OpenCLIP publish it: weights, and a JSON that says what they are."""

from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError
from saccade.models.official.given_files import object_from

# By the JSON's name, the weights beside it, the first that is there.
_WEIGHTS = {
    "config.json": ("model.safetensors", "pytorch_model.bin"),
    "open_clip_config.json": ("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
}
# What tells such a JSON from another project's of the same name.
_MARKS = {"config.json": {"architecture"}, "open_clip_config.json": {"model_cfg"}}


def weights_in(path: Path, hub_config: str | None) -> Path:
    """The file of weights where the path is a hub's folder, else the path as it is.

    Raises: SaccadeError if the folder has the JSON, but no weights.
    """
    if hub_config is None or not (path / hub_config).is_file():
        return path
    names = _WEIGHTS[hub_config]
    found = next((path / name for name in names if (path / name).is_file()), None)
    if found is None:
        raise SaccadeError(
            f"{path}: has {hub_config}, but no {' or '.join(names)}. Copy the weights beside it."
        )
    return found


def config_beside(weights: Path, hub_config: str | None) -> dict[str, Any] | None:
    """What the JSON beside the weights says, if it is there and timm's or OpenCLIP's.

    Raises: SaccadeError if it is no JSON object.
    """
    if hub_config is None or not (weights.parent / hub_config).is_file():
        return None
    found = object_from(weights.parent / hub_config, hub_config)
    return found if found and _MARKS[hub_config] <= set(found) else None
