# SPDX-License-Identifier: Apache-2.0
"""Measure how many photographs the router decodes, beside bare processes, and whom they delay.

    python benchmarks/decoding_load.py [--rounds 5 --seconds 6]

Callers send JPEG files of 12 megapixels to a variant that costs little. In turn, as many processes
as there are cores decode the same file with the router's own function, and do nothing else. Then
callers of small images are measured alone and beside one caller who sends images of 50 megapixels.
Writes results/decoding_load.json.
"""

import io
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from PIL import Image
from result_file import BUILD, options_of, spread, write_result
from served_models import under_load
from tritonclient.grpc import service_pb2

from saccade.core.machine import cores
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.export import ExportOptions, export
from saccade.models.image_decoding import ImageInput, decode
from saccade.serving.bench.load import LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.load_requests import request

PHOTOGRAPH, POSTER, SMALL = (4000, 3000), (8000, 6250), (640, 480)
SHARE, TIMES = 0.9, 1.5  # the aims
CALLERS = {1: 8, 16: 4}  # by photographs per request


def jpeg(size: tuple[int, int]) -> bytes:
    """Return a file of smooth and fine structure, about as large as a camera's."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (size[1] // 100, size[0] // 100, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.int16)
    fine = rng.integers(-12, 13, (size[1], size[0], 1), dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray((pixels + fine).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def signs_small() -> Path:
    """Return an artefact folder of a model that takes little; created once and then reused."""
    folder = BUILD / "signs-small"
    if not folder.exists():
        export("shipped:signs-small", ExportOptions(folder, gate="quick"))
    return folder


def bare(data: bytes, wanted: ImageInput, seconds: float) -> float:
    """Return images per second of one process that only decodes."""
    begun, count = time.monotonic(), 0
    while (passed := time.monotonic() - begun) < seconds:
        decode(data, wanted)
        count += 1
    return count / passed


def files_of(data: bytes, count: int) -> np.ndarray:
    """Return an input of some copies of a file."""
    return np.array([[data]] * count, dtype=object)


def rate_of(load: LoadGenerator, stream: Stream, seconds: float) -> float:
    """Return images per second of one stream."""
    result = refuse_errors(load.run([stream], seconds=seconds, warmup_s=1.0), load.url)
    return result.rate * stream.images


def p95(load: LoadGenerator, streams: list[Stream], seconds: float) -> float:
    """Return the p95 of the first stream in milliseconds, while all run."""
    result = refuse_errors(load.run(streams, seconds=seconds, warmup_s=1.0), load.url)
    return float(np.percentile(result.streams[streams[0].name].latencies_ms, 95))


def main() -> None:
    options = options_of(__doc__, "decoding_load", rounds=5, seconds=6.0).parse_args()
    artefact = ArtefactFolder(folder := signs_small())
    wanted, name = artefact.variants[0].images().wanted(), artefact.model
    photograph, poster, small = (jpeg(size) for size in (PHOTOGRAPH, POSTER, SMALL))

    def stream(name_of: str, data: bytes, images: int, callers: int) -> Stream:
        message = request(name, {"image": files_of(data, images)}, ("probabilities",))
        named = service_pb2.ModelInferRequest.FromString(message)
        named.id = f"{name_of}/1"  # another caller
        return Stream(name_of, name, callers, (named.SerializeToString(),), images)

    rounds: list[dict[str, Any]] = []
    context = get_context("spawn")
    with ProcessPoolExecutor(cores(), mp_context=context) as pool, under_load(folder) as load:
        for _ in range(options.rounds):
            own = [photograph] * cores(), [wanted] * cores(), [options.seconds] * cores()
            one = {"bare": sum(pool.map(bare, *own))}
            for images, callers in CALLERS.items():
                served = stream("photographs", photograph, images, callers)
                one[f"served, {images} per request"] = rate_of(load, served, options.seconds)
            others = stream("small", small, 1, 4)
            one["small alone, p95 ms"] = p95(load, [others], options.seconds)
            posters = stream("posters", poster, 1, 1)
            one["small beside posters, p95 ms"] = p95(load, [others, posters], options.seconds)
            rounds.append(one)
            print({key: round(value, 2) for key, value in one.items()}, flush=True)
    shares = {
        images: spread([one[f"served, {images} per request"] / one["bare"] for one in rounds])
        for images in CALLERS
    }
    times = spread(
        [one["small beside posters, p95 ms"] / one["small alone, p95 ms"] for one in rounds]
    )
    aims = {
        f"share of bare processes, at least {SHARE}": shares,
        f"p95 of the others, at most {TIMES} times": times,
    }
    write_result(options.out, {"rounds": rounds, "aims": aims})
    for aim, found in aims.items():
        print(f"{aim}: {found}")


if __name__ == "__main__":
    main()
