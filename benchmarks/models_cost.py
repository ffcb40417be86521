# SPDX-License-Identifier: Apache-2.0
"""Write what `saccade models` shows of every named size, so that it needs no torch to show it.

    python benchmarks/models_cost.py                  # all of them, into catalogue.json
    python benchmarks/models_cost.py sot/sot-tiny     # only these; the others do not change

Each is traced with random weights and counted from the graph. Nothing is timed, so a busy machine
does not matter. The largest need a few GB and some minutes.
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from saccade.core.files import json_bytes, write_atomically
from saccade.exporter.graph.cost import cost_of_size
from saccade.models.catalogue import KNOWN, known_sizes, presets, row
from saccade.models.families import FAMILIES

# What a row has beside its own name and its family's.
KEPT = ("parameters", "multiply_adds", "inputs", "outputs", "optional", "settings", "unit")


def main() -> None:
    """Count and write after each size, so that an interrupted run can be resumed."""
    torch.set_num_threads(1)
    sizes = [(family, name) for family in FAMILIES for name in presets(family)]
    wanted = [tuple(text.split("/")) for text in sys.argv[1:]] or sizes
    for family, name in wanted:
        counted = cost_of_size(family, name)["multiply_adds"]
        found = row(family, name, counted).to_dict()
        known = known_sizes()
        known.setdefault(family, {})[name] = {key: found[key] for key in KEPT}
        kept = {
            family: {name: size for name, size in rows.items() if (family, name) in sizes}
            for family, rows in known.items()
        }
        write_atomically(KNOWN, json_bytes(kept))
        print(f"{family}/{name}: {counted}", flush=True)


if __name__ == "__main__":
    main()
