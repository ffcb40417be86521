# SPDX-License-Identifier: Apache-2.0
"""Residual networks with the names of torchvision, so that its weights load from a local file."""

from collections.abc import Mapping
from copy import copy, deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from saccade import limits
from saccade.errors import SaccadeError
from saccade.files import read_regular
from saccade.models.checkpoint_format import EntriesRefused, check_entries, header_text, unpack
from saccade.models.layers.pixels import ImageFields, PixelScale
from saccade.models.resnet_sizes import BASIC, BLOCKS, EXPANSION, WIDTHS, ResNetSizes
from saccade.models.torch_file import TorchFileRefused, load_torch

_PREFIXES = ("", "module.", "backbone.", "resnet.")


class _Block(nn.Module):
    """Convolutions with batch norms, added to their input; `downsample` gives it their shape.

    The stride is that of the 3x3 convolution (ResNet V1.5), as in torchvision.
    """

    def __init__(self, before: int, width: int, stride: int, *, basic: bool) -> None:
        super().__init__()
        # Kernel size, channels and stride of each convolution.
        shapes = [(3, width, stride), (3, width, 1)]
        if not basic:
            shapes = [(1, width, 1), (3, width, stride), (1, EXPANSION * width, 1)]
        channels = before
        for place, (size, wide, step) in enumerate(shapes, start=1):
            self.add_module(f"conv{place}", _convolution(channels, wide, size, step))
            self.add_module(f"bn{place}", nn.BatchNorm2d(wide))
            channels = wide
        self.count = len(shapes)
        self.downsample: nn.Module | None = None
        if stride > 1 or before != channels:
            self.downsample = nn.Sequential(
                _convolution(before, channels, 1, stride), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for place in range(1, self.count + 1):
            y = self.get_submodule(f"bn{place}")(self.get_submodule(f"conv{place}")(y))
            y = y if place == self.count else torch.relu(y)
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """A residual network down to its grid of features; with `classes`, it also has their layer.

    Shapes: [b channels h w] -> [b width H W], one cell per 32 pixels, rounded up.
    Source: He et al. 2016 (Deep Residual Learning), table 1.
    """

    def __init__(self, sizes: ResNetSizes, *, channels: int = 3, classes: int = 0) -> None:
        super().__init__()
        self.name = sizes.name
        before = sizes.widths[0]
        self.conv1 = _convolution(channels, before, 7, 2)
        self.bn1 = nn.BatchNorm2d(before)
        for stage, (width, count) in enumerate(zip(sizes.widths, sizes.blocks, strict=True)):
            blocks = []
            for block in range(count):
                stride = 2 if stage and not block else 1
                blocks.append(_Block(before, width, stride, basic=sizes.basic))
                before = width * (1 if sizes.basic else EXPANSION)
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.blocks = sizes.blocks
        self.fc = nn.Linear(before, classes) if classes else None
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = nn.functional.max_pool2d(x, 3, 2, 1)
        for stage in range(1, len(self.blocks) + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return x

    def folded(self) -> "ResNet":
        """Return a copy for evaluation, each batch norm folded into its convolution."""
        made = deepcopy(self).eval()
        for module in [made, *made.modules()]:
            _fold_norms(module)
        return made.requires_grad_(False)


class ResNetCells(nn.Module):
    """The features of a ResNet's cells, row by row.

    Shapes: image [b h w c], values 0 to 255 of any type -> `content` [b (H W) width].
    """

    def __init__(self, config: ImageFields, sizes: ResNetSizes) -> None:
        super().__init__()
        # It only reads the image's size, mean and std.
        self.scale = PixelScale(config)
        self.resnet = ResNet(sizes, channels=config.channels)

    def content(self, image: Tensor) -> Tensor:
        """Return the cells' features, and nothing about their places."""
        return self.resnet(self.scale(image).permute(0, 3, 1, 2)).flatten(2).mT

    def folded(self) -> Self:
        """Return a copy with folded batch norms."""
        made = copy(self)
        made._modules = {**self._modules, "resnet": self.resnet.folded()}
        return made


def _convolution(before: int, width: int, size: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(before, width, size, stride, size // 2, bias=False)


def _fold_norms(module: nn.Module) -> None:
    """Fold each batch norm of a module's children into the convolution before it."""
    children = list(module.named_children())
    for (name, layer), (norm_name, norm) in pairwise(children):
        if isinstance(layer, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            setattr(module, name, nn.utils.fuse_conv_bn_eval(layer, norm))
            setattr(module, norm_name, nn.Identity())


def load_resnet(network: ResNet, path: Path) -> None:
    """Load weights with torchvision's names, from a .safetensors file or one of torch.save.

    The layer of the classes is left out if the network has none. Nothing in a file is executed.

    Raises: SaccadeError if the file cannot be read, or a tensor is missing or has another shape.
    """
    found = _named(path, _tensors(path))
    own = network.state_dict()
    if network.fc is None:
        found = {key: value for key, value in found.items() if not key.startswith("fc.")}
    likely = _likely(found)
    hint = f" The file may be of {likely}." if likely not in ("", network.name) else ""
    # Files from before PyTorch 0.4.1 do not count batches, which only training reads.
    counted = {key: value for key, value in own.items() if key.endswith("num_batches_tracked")}
    found = counted | found
    for key in sorted(own.keys() | found.keys()):
        before, now = (tuple(state[key].shape) if key in state else None for state in (found, own))
        if before != now:
            raise SaccadeError(
                f"{path}: {key}: found {before or 'no such tensor'}, expected "
                f"{now or 'no such tensor'} of {network.name} with torchvision's names.{hint} "
                "Pass the weights of this network, or choose another one."
            )
        if not bool(found[key].isfinite().all()):
            raise SaccadeError(f"{path}: {key} contains NaN or infinity. Copy the file again.")
    network.load_state_dict(found)


def _named(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by torchvision's names, without what a wrapper put in front of all."""
    for prefix in _PREFIXES:
        if f"{prefix}conv1.weight" in tensors and f"{prefix}layer1.0.conv1.weight" in tensors:
            return {
                key.removeprefix(prefix): value
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
    shown = ", ".join(sorted(tensors)[:3])
    raise SaccadeError(
        f"{path}: found the tensors {shown}, expected conv1.weight, layer1.0.conv1.weight and so "
        "on, as torchvision and timm name them. Pass the weights of a ResNet."
    )


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        data = read_regular(path, limits.WEIGHTS_BYTES)
        if data[:4] == b"PK\x03\x04" or data[:1] == b"\x80":
            content: Any = load_torch(path)
        else:
            check_entries(header_text(data))
            content = unpack(path, data)
    except (TorchFileRefused, EntriesRefused, OSError) as error:
        raise SaccadeError(
            f"{path}: cannot be read ({error}), expected the weights of a ResNet: .safetensors, or "
            "a state dict that torch.save wrote. Copy the file again."
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        content = {}
    return {
        str(key): value.float() if value.is_floating_point() else value
        for key, value in content.items()
        if isinstance(value, Tensor)
    }


def _likely(found: Mapping[str, Tensor]) -> str:
    """Return the name of the network whose blocks these are, or nothing."""
    counts = tuple(
        len({key.split(".")[1] for key in found if key.startswith(f"layer{stage}.")})
        for stage in range(1, len(WIDTHS) + 1)
    )
    basic = "layer1.0.conv3.weight" not in found
    names = (name for name, blocks in BLOCKS.items() if blocks == counts)
    return next((name for name in names if (name in BASIC) == basic), "")
