# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU time that a request costs in each process of the service, and in its caller.

    python benchmarks/request_cost.py [--rounds 3 --seconds 5]

Callers wait for their answers: 16 with one image per request, 4 with 16. Images are small PNG
files, or JPEG files of 640 x 480. The model is `signs-small`, which takes little. In each round,
all kinds of requests are measured in turn. Writes results/request_cost.json.
"""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from decoding_load import SMALL, files_of, jpeg, signs_small
from result_file import options_of, spread, table, write_result
from served_models import random_images, under_load

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.serving.bench.load import LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.load_requests import png_files, request
from saccade.serving.server.process import stubs_in

CALLERS = {1: 16, 16: 4}  # by images per request


def streams_of(folder: Path, model: str) -> list[Stream]:
    """Return callers with small images and with larger ones, one and 16 in a request."""
    small = png_files(random_images(folder, 16))
    files = {"small": small, "640 x 480": files_of(jpeg(SMALL), 16)}
    return [
        Stream(
            f"{name}, {images} per request",
            model,
            callers,
            tuple(
                request(model, {"image": rows[at : at + images]}, ("probabilities",))
                for at in range(0, 16, images)
            ),
            images,
        )
        for name, rows in files.items()
        for images, callers in CALLERS.items()
    ]


def cost_ms(load: LoadGenerator, stream: Stream, seconds: float) -> dict[str, float]:
    """Return the CPU time per request in milliseconds, by kind of process, and the rate."""
    result = refuse_errors(load.run([stream], seconds=seconds, warmup_s=1.0), load.url)
    kinds = {stub.pid: stub.model for stub in stubs_in(load.server_pid)}
    kinds = {pid: "router" if of == stream.model else "model" for pid, of in kinds.items()}
    spent = {"server": 0.0, "router": 0.0, "model": 0.0, "callers": result.client_cpu_s}
    for process, used_s in result.server_cpu_s.items():
        spent[kinds.get(int(process.split()[0]), "server")] += used_s
    costs = {kind: 1e3 * used_s / len(result.only.latencies_ms) for kind, used_s in spent.items()}
    service = sum(costs.values()) - costs["callers"]
    return {**costs, "service": service, "requests_per_s": result.rate}


def main() -> None:
    options = options_of(__doc__, "request_cost", rounds=3, seconds=5.0).parse_args()
    folder = signs_small()
    streams = streams_of(folder, ArtefactFolder(folder).model)
    found: dict[str, list[dict[str, float]]] = {stream.name: [] for stream in streams}
    with under_load(folder) as load:
        for _ in range(options.rounds):
            for stream in streams:
                found[stream.name].append(cost_ms(load, stream, options.seconds))
    costs = {
        name: {kind: spread([one[kind] for one in rounds]) for kind in rounds[0]}
        for name, rounds in found.items()
    }
    described = {"unit": "milliseconds of CPU time per request", "callers": CALLERS}
    write_result(options.out, {**described, "costs": costs})
    kinds = [*next(iter(costs.values()))]
    rows = [
        [name, *(f"{by_kind[kind]['median']:.3g}" for kind in kinds)]
        for name, by_kind in costs.items()
    ]
    print(table(["request", *kinds], rows))


if __name__ == "__main__":
    main()
