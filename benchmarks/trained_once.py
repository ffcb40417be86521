# SPDX-License-Identifier: Apache-2.0
"""A training run of a benchmark: done once, and resumed where it was interrupted."""

import time
from dataclasses import replace

from saccade.models.training.options import TrainOptions
from saccade.models.training.train import train


def trained_once(family: str, options: TrainOptions) -> None:
    """Write the checkpoint if it is not there; an interrupted run goes on."""
    if not options.out.exists():
        print(f"{time.strftime('%H:%M:%S')} train {options.out.stem}", flush=True)
        train(family, replace(options, resume=options.state_path.exists()))
