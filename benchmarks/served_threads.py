# SPDX-License-Identifier: Apache-2.0
"""Measure what threads are worth, in process and served: requests of eight images.

    python benchmarks/served_threads.py ARTEFACTS [--variant NAME] [--rounds 5 --seconds 5]

In each round, in turn: ONNX Runtime in process with 1, 2, 4, ... threads up to all cores, without
and with spinning, then the variant alone in a repository as `saccade repository` writes it by
default, called directly with raw tensors and through the router with PNG files. The aim is 0.95 of
the best throughput in process. Writes benchmarks/results/served_threads.json.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from bench_folder import random_images
from result_file import write_result

from saccade.core.machine import this_machine
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.runtimes.runners import onnx_runner, onnx_session
from saccade.exporter.runtimes.runtime import DEFAULT, runtime_named
from saccade.serving.bench.in_process import Calls, sample
from saccade.serving.bench.load import LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.served import encoded_request, tensor_request
from saccade.serving.bench.work import counts
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import Server

HERE = Path(__file__).parent
IMAGES, BATCH, AIM = 32, 8, 0.95
CLIENTS = (1, 2, 4)  # one waits for each answer; with two, one request waits while another runs
QUIET = ServeOptions(
    grpc_port=0, http_port=0, metrics_port=0, ready_port=0, probe_interval_s=600, restart=False
)


def main() -> None:
    """Measure in turn, and print each median beside the best in process."""
    options = _options()
    folder = ArtefactFolder(options.folder)
    names = [variant.name for variant in folder.variants]
    variant = folder.variants[names.index(options.variant) if options.variant else 0]
    with tempfile.TemporaryDirectory() as place:
        result = measured(folder, variant, Path(place) / "repository", options)
    write_result(
        options.out, {"benchmark": "threads", "machine": this_machine().to_dict(), **result}
    )
    for name, rates in result["images_per_second"].items():
        share = result["share_of_best_in_process"][name]
        print(f"{name}: {statistics.median(rates):.2f} images/s, {share:.2f} of the best")
    found = max(share for name, share in result["share_of_best_in_process"].items() if "," in name)
    print(f"served: {found:.2f} of the best in process, {'met' if found >= AIM else 'MISSED'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="artefacts of a model of images")
    parser.add_argument("--variant", help="the variant to measure; default: the first")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each window")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "served_threads.json")
    return parser.parse_args()


def measured(
    folder: ArtefactFolder, variant: VariantFiles, repository: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return images per second of each round, and each median over the best one in process."""
    images = random_images(folder.path, IMAGES)
    path = folder.file(variant.main)
    numbers = sorted(counts(runtime_named(DEFAULT), 1))
    runs = {
        f"{count} threads{' spinning' if spinning else ''}": onnx_runner(
            onnx_session(path, threads=count, spinning=spinning)
        )
        for count in numbers
        for spinning in ((False, True) if count > 1 else (False,))
    }
    deploy(folder.only([variant], []), RepositoryOptions(repository))
    rates: dict[str, list[float]] = {}
    busy: dict[str, list[dict[str, float]]] = {}
    with (
        Server(repository, QUIET) as server,
        LoadGenerator(server.url, server_pid=server.pid) as load,
    ):
        for _ in range(options.rounds):
            for name, run in runs.items():
                calls = Calls(BATCH)
                sample(run, {"image": images}, calls, seconds=options.seconds)
                rates.setdefault(name, []).append(calls.inferences_per_second)
            fastest = max(own[-1] for own in rates.values())
            for stream in _streams(folder.model, variant, images):
                # Each client waits for its answer, so their number over the mean time is the rate
                # as soon as all of them wait. A count would leave out the last, unfinished request:
                # much of a window in which a large model answers ten.
                fill_s = 1 + stream.concurrency * BATCH / fastest
                found = load.run([stream], seconds=options.seconds, warmup_s=fill_s)
                took_ms = refuse_errors(found, load.url).streams[stream.name].latencies_ms
                rate = 1e3 * stream.concurrency * BATCH / statistics.fmean(took_ms)
                rates.setdefault(stream.name, []).append(rate)
                cores = {name: used / found.seconds for name, used in found.server_cpu_s.items()}
                cores["client"] = found.client_cpu_s / found.seconds
                busy.setdefault(stream.name, []).append(cores)
    medians = {name: statistics.median(own) for name, own in rates.items()}
    best = max(medians[name] for name in runs)
    return {
        "variant": variant.name,
        "options": {"rounds": options.rounds, "seconds": options.seconds, "batch": BATCH},
        "chosen": read_repository(repository).to_dict()["threads"],
        "images_per_second": rates,
        "share_of_best_in_process": {name: rate / best for name, rate in medians.items()},
        "busy_cores": busy,
        "aim": AIM,
    }


def _streams(router: str, variant: VariantFiles, images: Any) -> list[Stream]:
    batches = [images[start : start + BATCH] for start in range(0, len(images), BATCH)]
    budget = float(variant.main.variant.budget)
    direct = tuple(tensor_request(variant.name, batch, "logits") for batch in batches)
    routed = tuple(encoded_request(router, batch, budget, "logits") for batch in batches)
    return [
        Stream(f"{kind}, {count} clients", model, count, requests, BATCH)
        for kind, model, requests in (("direct", variant.name, direct), ("router", router, routed))
        for count in CLIENTS
    ]


if __name__ == "__main__":
    main()
