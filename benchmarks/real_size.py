# SPDX-License-Identifier: Apache-2.0
"""Take models of the sizes that people have from their folder to a server, and measure each step.

    pip install -c constraints.txt transformers
    python benchmarks/real_size.py                          # every model that is not in the file
    python benchmarks/real_size.py vit-b nac-imagenet --again

Weights are random, so nothing is scored. A row is written to results/real_size.json as soon as it
is measured, with commit and date, and is kept until `--again` names its model. Each command runs in
its own process: seconds, and the largest resident memory. Beside the export, in the same run, what
a user would write instead: torch.onnx.export, and a comparison of 16 images in ONNX Runtime.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from memory_peaks import child, measured
from real_models import MODELS, write_model
from result_file import write_result
from served_threads import QUIET

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.graph.samples import random_inputs
from saccade.exporter.runtimes.runners import onnx_runner, onnx_session, torch_runner
from saccade.machine import cores, this_machine
from saccade.models.checkpoint import load, save
from saccade.models.entry import imported
from saccade.models.families import build, entry_of
from saccade.models.preprocessing import Preprocessing
from saccade.serving.bench.load import LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.served import encoded_request
from saccade.serving.server.server import Server

HERE = Path(__file__).parent
RESULT = HERE / "results" / "real_size.json"
# Named sizes of saccade's own families: family, size, options of the export.
PRESETS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "nac-imagenet": ("nac", "imagenet", ("--budget", "1,0.5,0.25,0.125,0.0625")),
    "nac-tiny-imagenet": ("nac", "tiny-imagenet", ("--budget", "1,0.5,0.25,0.125,0.0625")),
    "sot-tiny": ("sot", "sot-tiny", ("--budget", "fast,class")),
}
_SAMPLES, _PEER_IMAGES, _ROUNDS, _BATCH = 256, 16, 5, 8
_SERVED_S = 20.0


def checkpoint_of(name: str, place: Path) -> dict[str, Any]:
    """Write the checkpoint of a model, and return what its conversion took."""
    path = place / f"{name}.safetensors"
    if name in PRESETS:
        _write_preset(name, path)
        return {}
    source = write_model(name, place / name)
    return {"convert": measured(["convert", str(source), "--out", str(path), "--force"])}


def _write_preset(name: str, path: Path) -> None:
    family, size, _ = PRESETS[name]
    config = imported(entry_of(family).presets)[size]
    model: Any = build(family, config.to_dict()).eval()
    rng = np.random.default_rng(0)
    calibration: dict[str, np.ndarray] = {}
    for component in model.components():
        calibration |= random_inputs(component, rng, _SAMPLES)
    height, width, channels = calibration["image"].shape[1:]
    save(
        path,
        family=family,
        config=config.to_dict(),
        weights=model.state_dict(),
        preprocessing=Preprocessing(height, width, channels, config.mean, config.std),
        labels=tuple(f"class {index}" for index in range(config.classes)),
        calibration=calibration,
        card={"data": "random", "seed": 0},
    )


def peer_export(path: str, out: str) -> None:
    """Export with torch alone and compare with ONNX Runtime, as a user would without saccade."""
    import torch

    checkpoint = load(path)
    model: Any = checkpoint.build()
    component = model.components()[0]
    (spec,) = component.inputs
    images = checkpoint.calibration[spec.name][:_PEER_IMAGES]

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model.components()[0].run(**{spec.name: x})[component.outputs[0]]

    torch.onnx.export(
        Whole().eval(),
        (torch.from_numpy(images[:2].copy()),),
        out,
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("b", min=1)},),
        external_data=True,
        verbose=False,
    )
    (answer,) = onnx_session(out, threads=cores()).run(None, {"x": images})
    expected = torch_runner(model)({spec.name: images})[component.outputs[0]]
    print(float(np.abs(answer - expected).max() / np.abs(expected).max()))


def _peer(path: Path, place: Path) -> dict[str, Any]:
    script = [sys.executable, __file__, "--peer", str(path), str(place / "peer.onnx")]
    started = time.perf_counter()
    done = subprocess.run(script, capture_output=True, text=True)
    if done.returncode:
        return {"failed": done.stderr.strip()[-300:]}
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "peak_mib": int(done.stdout.splitlines()[-1])}


def in_process(folder: ArtefactFolder, path: Path) -> dict[str, Any]:
    """Return images per second of each file with all cores, beside torch, in interleaved rounds."""
    checkpoint = load(path)
    images = {name: array[:_BATCH] for name, array in checkpoint.calibration.items()}
    runs: dict[str, Callable[[], Any]] = {}
    for variant in folder.variants:
        main = variant.main
        given = {spec.name: images[spec.name] for spec in main.inputs}
        run = onnx_runner(onnx_session(folder.file(main), threads=cores()))
        runs[variant.name] = lambda run=run, given=given: run(given)
        runs.setdefault("torch, whole model", _torch(checkpoint.build(), main.variant.role, given))
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(_ROUNDS + 1):
        for name, call in runs.items():
            started = time.perf_counter()
            call()
            if round_number:  # the first one is a warm-up
                rates[name].append(_BATCH / (time.perf_counter() - started))
    return {
        name: {"median": statistics.median(own), "lowest": min(own), "highest": max(own)}
        for name, own in rates.items()
    }


def _torch(model: Any, role: str, given: dict[str, np.ndarray]) -> Callable[[], Any]:
    run = torch_runner(model, role)
    return lambda: run(given)


def served(folder: ArtefactFolder, place: Path) -> dict[str, Any]:
    """Serve the largest variant through the router; return rates and times of requests of 1 and 8.

    Units: images per second, seconds until ready, latencies in ms.
    """
    repository, variant = place / "repository", folder.variants[0]
    written = measured(["repository", str(folder.path), "--out", str(repository), "--force"])
    found: dict[str, Any] = {"repository": written}
    spec = next(spec for spec in variant.main.inputs if spec.name == "image")
    shape = (_BATCH, *(int(axis) for axis in spec.axes.split()[1:]))
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    output, budget = variant.main.outputs[0].name, float(variant.main.variant.budget)
    started = time.perf_counter()
    with Server(repository, QUIET) as server, LoadGenerator(server.url) as generator:
        found["ready_s"] = time.perf_counter() - started
        for count in (1, _BATCH):
            request = encoded_request(folder.model, images[:count], budget, output)
            stream = Stream(f"requests of {count}", folder.model, 2, (request,), count)
            result = generator.run([stream], seconds=_SERVED_S, warmup_s=2.0)
            times = refuse_errors(result, generator.url).streams[stream.name].latencies_ms
            found[stream.name] = {
                "images_per_second": count * len(times) / result.seconds,
                "p50_ms": float(np.percentile(times, 50)),
                "p99_ms": float(np.percentile(times, 99)),
                "answers": len(times),
            }
    shutil.rmtree(repository)
    return found


def row_of(name: str, place: Path) -> dict[str, Any]:
    """Measure every step of one model."""
    row = checkpoint_of(name, place)
    path, out = place / f"{name}.safetensors", place / f"{name}-exported"
    options = PRESETS[name][2] if name in PRESETS else ()
    command = ["export", str(path), "--out", str(out), "--force", *options]
    row["export"] = measured(command)
    if "failed" in row["export"]:
        return row
    row["verify"] = measured(["verify", str(out)])
    row["torch.onnx and comparison"] = _peer(path, place)
    folder = ArtefactFolder(out)
    row["mib"] = {
        manifest.variant.name: manifest.file.total_bytes / 2**20 for manifest in folder.manifests
    }
    row["gate_s"] = {
        manifest.variant.name: manifest.parity.seconds for manifest in folder.manifests
    }
    row["images_per_second"] = in_process(folder, path)
    if len(folder.variants[0].components) == 1:
        row["served"] = served(folder, place)
    shutil.rmtree(out)
    return row


def main() -> int:
    """Measure the models that were named, and write each row when it is complete."""
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2:])
    if sys.argv[1:2] == ["--peer"]:
        peer_export(*sys.argv[2:])
        import resource

        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", choices=[*MODELS, *PRESETS, []])
    parser.add_argument("--place", type=Path, default=Path("build/real"))
    parser.add_argument("--again", action="store_true", help="measure rows that exist again")
    given = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": {}}
    given.place.mkdir(parents=True, exist_ok=True)
    for name in given.models or [*MODELS, *PRESETS]:
        if name in result["rows"] and not given.again:
            continue
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
        row = {"commit": commit.strip(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        row |= row_of(name, given.place)
        result["machine"] = this_machine().to_dict()
        result["rows"][name] = row
        write_result(RESULT, result)
        print(name, json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
