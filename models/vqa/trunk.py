# SPDX-License-Identifier: Apache-2.0
"""The ResNet in front of a VQA network, given to other models and taken from them."""

from saccade.models.trunks import resnet_port
from saccade.models.vqa.config import VQAConfig

TRUNK = resnet_port(VQAConfig, "VQA network", "cells.resnet.")
