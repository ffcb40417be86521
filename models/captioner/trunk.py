# SPDX-License-Identifier: Apache-2.0
"""The ResNet in front of a captioner, given to other models and taken from them."""

from saccade.models.captioner.config import CaptionerConfig
from saccade.models.trunks import resnet_port

TRUNK = resnet_port(CaptionerConfig, "captioner", "convolutions.")
