# SPDX-License-Identifier: Apache-2.0
"""Count the multiply-adds of every named size, which `saccade models` shows.

    python benchmarks/models_cost.py                  # all of them, into model_costs.json
    python benchmarks/models_cost.py sot/sot-tiny     # only these; the others do not change

Each is traced with random weights and counted from the graph. Nothing is timed, so a busy machine
does not matter. The largest need a few GB and some minutes.
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from saccade.exporter.graph.catalogue_cost import cost_of_size
from saccade.files import json_bytes, write_atomically
from saccade.models.catalogue import COSTS, known_costs, presets
from saccade.models.families import FAMILIES


def main() -> None:
    """Count and write after each size, so that an interrupted run can be resumed."""
    torch.set_num_threads(1)
    sizes = [(family, name) for family in FAMILIES for name in presets(family)]
    wanted = [tuple(text.split("/")) for text in sys.argv[1:]] or sizes
    for family, name in wanted:
        cost = cost_of_size(family, name)
        costs = known_costs()
        costs.setdefault(family, {})[name] = cost
        kept = {
            family: {name: row for name, row in rows.items() if (family, name) in sizes}
            for family, rows in costs.items()
        }
        write_atomically(COSTS, json_bytes(kept))
        print(f"{family}/{name}: {cost}", flush=True)


if __name__ == "__main__":
    main()
