# SPDX-License-Identifier: Apache-2.0
"""Train for a benchmark once; resume an interrupted run."""

import time
from dataclasses import replace

from saccade.models.training.options import TrainOptions
from saccade.models.training.train import train


def trained_once(family: str, options: TrainOptions) -> None:
    """Write the checkpoint if it is missing; resume an interrupted run."""
    if not options.out.exists():
        print(f"{time.strftime('%H:%M:%S')} train {options.out.stem}", flush=True)
        train(family, replace(options, resume=options.state_path.exists()))
