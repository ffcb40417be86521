# SPDX-License-Identifier: Apache-2.0
"""Residual networks against what torchvision documents, and their folding."""

from functools import cache

import pytest
import torch
from torch import nn

from saccade.models.layers.resnet import ResNet
from saccade.models.resnet_sizes import BLOCKS, ResNetSizes, sizes_of

# Parameters with 1,000 classes, and tensors of the state dict, as torchvision documents them.
DOCUMENTED = {
    "resnet18": (11_689_512, 122),
    "resnet34": (21_797_672, 218),
    "resnet50": (25_557_032, 320),
    "resnet101": (44_549_160, 626),
    "resnet152": (60_192_808, 932),
}
NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


@cache
def outline(name: str, classes: int = 0) -> ResNet:
    with torch.device("meta"):
        return ResNet(sizes_of(name), classes=classes)


def narrow() -> ResNet:
    """A ResNet-18 with few channels."""
    return ResNet(ResNetSizes(BLOCKS["resnet18"], (8, 8, 16, 16), basic=True))


@cache
def drawn() -> ResNet:
    """A narrow network whose batch norms are not those of a new one."""
    torch.manual_seed(0)
    network = narrow()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.weight.data, module.bias.data):
                tensor.uniform_(-0.5, 1)
            module.running_var.uniform_(0.5, 2)
    return network.eval()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_sizes_are_torchvisions(name):
    network = outline(name, 1000)
    assert (sum(p.numel() for p in network.parameters()), len(network.state_dict())) == DOCUMENTED[
        name
    ]
    assert network.fc.in_features == sizes_of(name).features


def test_names_and_shapes_of_basic_blocks_are_torchvisions():
    shapes = {key: tuple(value.shape) for key, value in outline("resnet18").state_dict().items()}
    assert list(shapes)[:6] == ["conv1.weight", *(f"bn1.{name}" for name in NORM)]
    block = ("conv1.weight", *(f"bn1.{n}" for n in NORM), "conv2.weight")
    below = ("downsample.0.weight", *(f"downsample.1.{n}" for n in NORM))
    block = (*block, *(f"bn2.{n}" for n in NORM))
    assert [k for k in shapes if k.startswith("layer1.0.")] == [f"layer1.0.{k}" for k in block]
    second = [f"layer2.0.{k}" for k in (*block, *below)]
    assert [k for k in shapes if k.startswith("layer2.0.")] == second
    assert shapes["conv1.weight"] == (64, 3, 7, 7)
    assert shapes["layer2.0.downsample.0.weight"] == (128, 64, 1, 1)


def test_bottlenecks_have_the_stride_in_the_middle():
    network = outline("resnet50")
    shapes = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    assert shapes["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert shapes["layer4.2.conv3.weight"] == (2048, 512, 1, 1)
    block = network.get_submodule("layer3.0")
    strides = [block.get_submodule(f"conv{place}").stride for place in (1, 2, 3)]
    assert strides == [(1, 1), (2, 2), (1, 1)]
    assert "layer3.1.downsample.0.weight" not in shapes


def test_a_cell_per_32_pixels():
    assert drawn()(torch.zeros(1, 3, 64, 70)).shape == (1, 16, 2, 3)


def test_folding_changes_nothing():
    network = narrow()
    network.load_state_dict(drawn().state_dict())
    network = network.double().eval()
    image = torch.randn(2, 3, 64, 32, dtype=torch.float64)
    folded = network.folded()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    torch.testing.assert_close(folded(image), network(image), rtol=1e-10, atol=1e-10)


def test_every_size_is_documented():
    assert DOCUMENTED.keys() == BLOCKS.keys()
