# SPDX-License-Identifier: Apache-2.0
"""Take models of the sizes that people have from their folder to a server, and measure each step.

    pip install -c constraints.txt transformers
    python benchmarks/real_size.py                          # every model that is not in the file
    python benchmarks/real_size.py vit-b nac-imagenet --again
    python benchmarks/real_size.py --tables                 # of docs/benchmarks.md
    python benchmarks/real_size.py --picture docs/real_size.png

Weights are random, so nothing is scored. A row is written to results/real_size.json as soon as it
is measured, with commit and date, and is kept until `--again` names its model. Each command runs in
its own process: seconds, and the largest resident memory. Beside the export, in the same run, what
a user would write instead: torch.onnx.export, and a comparison of 16 images in ONNX Runtime. Beside
the throughput: torch, torch.compile, and the file of torch.onnx in ONNX Runtime and in OpenVINO.
"""

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openvino_native import native_openvino
from PIL import Image
from real_models import MODELS, write_model
from result_file import RESULTS, commit_and_date, table, write_result
from served_models import QUIET

from saccade.core.machine import cores, this_machine
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.graph.samples import random_inputs
from saccade.exporter.runtimes.runners import onnx_runner, onnx_session, torch_runner
from saccade.exporter.runtimes.runtime import runtime_named
from saccade.models.checkpoint import Checkpoint, load, save
from saccade.models.entry import imported
from saccade.models.families import build, entry_of
from saccade.models.interface import component_named
from saccade.models.preprocessing import Preprocessing
from saccade.serving.bench.load import LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.load_requests import encoded_request, request
from saccade.serving.server.server import Server

RESULT = RESULTS / "real_size.json"
# Rows of the picture: the model's row in the results, and its variant.
SHOWN = {
    "ResNet-50": ("resnet-50", "resnet-50-exact"),
    "DeiT-S": ("deit-s", "deit-s-exact"),
    "Swin-T": ("swin-t", "swin-t-exact"),
    "ViT-B/16": ("vit-b", "vit-b-exact"),
    "CLIP ViT-L/14, images": ("clip-l14", "clip-l14-image-b1000"),
    "NAC, 1,024 modules": ("nac-imagenet", "nac-imagenet-b1000"),
    "NAC, half of them": ("nac-imagenet", "nac-imagenet-b0500"),
    "NAC, an eighth": ("nac-imagenet", "nac-imagenet-b0125"),
}
LOOKS = {
    "torch": ("torch", "o", "#9aa0a6"),
    "torch.compile": ("torch.compile", "s", "#9aa0a6"),
    "fp32, ONNX Runtime": ("fp32, onnxruntime", "o", "#1f77b4"),
    "fp32, OpenVINO": ("fp32, openvino", "D", "#1f77b4"),
    "int8, ONNX Runtime": ("int8, onnxruntime", "o", "#d62728"),
    "int8, OpenVINO": ("int8, openvino", "D", "#d62728"),
}
_FIVE = ("--budget", "1,0.5,0.25,0.125,0.0625")
# Named sizes of saccade's own families: family, size, changed fields, options of the export.
PRESETS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "nac-imagenet": ("nac", "imagenet", {}, _FIVE),
    "nac-imagenet-320": ("nac", "imagenet", {"modules": 320}, _FIVE),
    "nac-tiny-imagenet": ("nac", "tiny-imagenet", {}, _FIVE),
    "sot-tiny": ("sot", "sot-tiny", {}, ("--budget", "fast,class")),
    "sparo-vit-b16": ("sparo", "vit-b-16-sparo", {}, ()),
    # At each budget, the check takes minutes: float64 convolutions of eleven slots at 128 x 128.
    "slots-clevr": ("slot-attention", "slot-attention-clevr", {}, ("--budget", "t3")),
    "mcan-grid": ("vqa", "vqa-grid", {}, ()),
    "captioner": ("captioner", "captioner-paper", {}, ()),
}
# Converted models that are exported in int8 as well, which is calibrated on photographs.
INT8 = ("vit-b", "deit-s", "resnet-50")
_SAMPLES, _PEER_IMAGES, _ROUNDS, _BATCH, _PHOTOGRAPHS = 64, 16, 3, 8, 32
_SERVED_S = 8.0
# Above it, sessions of all runtimes do not fit into 24 GiB together: fewer ways are compared.
_LARGE_MIB = 2048


def measured(command: Sequence[str]) -> dict[str, Any]:
    """Run a command of saccade in its own process, and return its time and its peak.

    Units: MiB with the files that it maps, s.
    """
    return _process([sys.executable, __file__, "--child", *command])


def _process(script: list[str]) -> dict[str, Any]:
    """Run a script that prints its peak last."""
    started = time.perf_counter()
    done = subprocess.run(script, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        return {"seconds": seconds, "failed": done.stderr.strip()[-300:]}
    return {"seconds": seconds, "peak_mib": int(done.stdout.splitlines()[-1])}


def child(command: Sequence[str]) -> int:
    """Run the command as the only child of this process, and print the child's peak in MiB."""
    done = subprocess.run([sys.executable, "-m", "saccade", *command], stdout=subprocess.DEVNULL)
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
    return done.returncode


def checkpoint_of(name: str, place: Path) -> dict[str, Any]:
    """Write the checkpoint of a model, and return what its conversion took."""
    path = place / f"{name}.safetensors"
    if name in PRESETS:
        _write_preset(name, path)
        return {}
    source = write_model(name, place / name)
    return {"convert": measured(["convert", str(source), "--out", str(path), "--force"])}


def _write_preset(name: str, path: Path) -> None:
    family, size, changes, _ = PRESETS[name]
    config = replace(imported(entry_of(family).presets)[size], **changes)
    model: Any = build(family, config.to_dict()).eval()
    rng = np.random.default_rng(0)
    calibration: dict[str, np.ndarray] = {}
    for index, component in enumerate(model.components()):
        if not index or component.real is None:  # the inputs of others are made from these
            calibration |= random_inputs(component, rng, _SAMPLES)
    preprocessing = None
    if (image := calibration.get("image")) is not None:
        height, width, channels = image.shape[1:]
        preprocessing = Preprocessing(height, width, channels, config.mean, config.std)
    classes = getattr(config, "classes", None) or getattr(config, "answers", 0)
    save(
        path,
        family=family,
        config=config.to_dict(),
        weights=model.state_dict(),
        preprocessing=preprocessing,
        labels=tuple(f"class {index}" for index in range(classes)),
        calibration=calibration,
        card={"data": "random", "seed": 0},
    )


def _photographs(place: Path) -> Path:
    """Return a folder of JPEG files of smooth random colors: ranges of int8, not scores."""
    folder, rng = place / "photographs", np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    for index in range(_PHOTOGRAPHS):
        colors = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        colors.resize((640, 480)).save(folder / f"{index}.jpg", quality=85)
    return folder


class Whole(torch.nn.Module):
    """A model's component as a separate module, with all outputs: a peer leaves out no work."""

    def __init__(self, model: Any, role: str, inputs: list[str], outputs: list[str]) -> None:
        super().__init__()
        self.model, self.role, self.inputs, self.outputs = model, role, inputs, outputs

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs in their order for the inputs in theirs."""
        component = component_named(self.model, self.role)
        outputs = component.run(**dict(zip(self.inputs, arguments, strict=True)))
        return tuple(outputs[name] for name in self.outputs)


def peer_export(path: str, out: str) -> None:
    """Export with torch alone and compare with ONNX Runtime, as a user would without saccade."""
    model: Any = load(path).build()
    component = model.components()[0]
    given = random_inputs(component, np.random.default_rng(0), _PEER_IMAGES)
    names, outputs = [spec.name for spec in component.inputs], list(component.outputs)
    whole = Whole(model, component.role, names, outputs).eval()
    arguments = tuple(torch.from_numpy(given[name][:2].copy()) for name in names)
    torch.onnx.export(
        whole,
        arguments,
        out,
        dynamo=True,
        dynamic_shapes=(tuple({0: torch.export.Dim.DYNAMIC} for _ in names),),
        input_names=names,
        external_data=True,
        verbose=False,
    )
    answers = onnx_session(out, threads=cores()).run(None, {name: given[name] for name in names})
    expected = torch_runner(model, component.role)(given)
    for name, answer in zip(outputs, answers, strict=True):
        print(name, float(np.abs(answer - expected[name]).max() / np.abs(expected[name]).max()))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def _peer(path: Path, place: Path) -> dict[str, Any]:
    for file in [*place.glob("peer.onnx*")]:  # of another model
        file.unlink()
    return _process([sys.executable, __file__, "--peer", str(path), str(place / "peer.onnx")])


def in_process(folder: ArtefactFolder, checkpoint: Checkpoint, peer: Path) -> dict[str, Any]:
    """Return images per second by variant, runtime and threads, beside what others make of it.

    The ways take turns. Of two components, as two towers or a decoder, the first is measured.
    """
    runs = dict(_ours(folder, checkpoint)) | dict(_peers(folder, checkpoint, peer))
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


def _given(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, np.ndarray]:
    component = component_named(checkpoint.build(), manifest.variant.role)
    drawn = random_inputs(component, np.random.default_rng(0), _BATCH)
    return {spec.name: drawn[spec.name] for spec in manifest.inputs}


def _is_large(folder: ArtefactFolder) -> bool:
    return folder.manifests[0].file.total_bytes > _LARGE_MIB * 2**20


def _ours(
    folder: ArtefactFolder, checkpoint: Checkpoint
) -> Iterator[tuple[str, Callable[[], Any]]]:
    large = _is_large(folder)
    for variant in folder.variants:
        manifest = variant.main
        given = _given(checkpoint, manifest)
        for name in ("onnxruntime",) if large else ("onnxruntime", "openvino"):
            runtime = runtime_named(name)
            if name == "openvino" and manifest.custom_ops:
                continue  # it takes files with inlined ops only
            for threads in {cores()} if large else {1, cores()}:
                title = f"{manifest.variant.name}, {name}, {_threads(threads)}"
                run = runtime.load(folder, manifest, "bodies", threads=threads)
                yield title, partial(run, given)


def _peers(
    folder: ArtefactFolder, checkpoint: Checkpoint, peer: Path
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the unchanged torch model, the same compiled, and the file of torch.onnx."""
    main = folder.variants[0].main
    given = _given(checkpoint, main)
    outputs = [spec.name for spec in main.outputs]
    model = Whole(checkpoint.build(), main.variant.role, list(given), outputs).eval()
    arguments = tuple(torch.from_numpy(array) for array in given.values())
    yield "torch", _without_grad(model, arguments)
    if _is_large(folder):
        return
    ways: dict[str, Callable[[], Callable[[], Any]]] = {
        "torch.compile": lambda: _without_grad(torch.compile(model), arguments),
        "torch.onnx, onnxruntime": lambda: partial(
            onnx_runner(onnx_session(peer, threads=cores())), given
        ),
        "torch.onnx, openvino": lambda: partial(native_openvino(peer, "fp32", cores()), given),
    }
    for name, make in ways.items():
        try:
            call = make()
            call()
        except Exception as error:
            print(f"{name}: {str(error)[:200]}", file=sys.stderr)
        else:
            yield name, call


def _without_grad(model: Any, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    def run() -> Any:
        with torch.inference_mode():
            return model(*arguments)

    return run


def served(folder: ArtefactFolder, checkpoint: Checkpoint, place: Path) -> dict[str, Any]:
    """Serve the folder; return rates and times of requests of 1 and 8 with two clients.

    Tensors go to each variant, and PNG files through the router to the first.
    Units: images per second, seconds until ready, latencies in ms.
    """
    repository = place / "repository"
    written = measured(["repository", str(folder.path), "--out", str(repository), "--force"])
    found: dict[str, Any] = {"repository": written}
    started = time.perf_counter()
    with Server(repository, QUIET) as server, LoadGenerator(server.url) as generator:
        found["ready_s"] = time.perf_counter() - started
        for title, model, count, message in _requests(folder, checkpoint):
            stream = Stream(title, model, 2, (message,), count)
            result = generator.run([stream], seconds=_SERVED_S, warmup_s=2.0)
            times = refuse_errors(result, generator.url).streams[title].latencies_ms
            found[title] = {
                "images_per_second": count * len(times) / result.seconds,
                "p50_ms": float(np.percentile(times, 50)),
                "p99_ms": float(np.percentile(times, 99)),
                "answers": len(times),
            }
    shutil.rmtree(repository)
    return found


def _requests(
    folder: ArtefactFolder, checkpoint: Checkpoint
) -> Iterator[tuple[str, str, int, bytes]]:
    for variant in folder.variants:
        manifest = variant.main
        given, output = _given(checkpoint, manifest), manifest.outputs[0].name
        for count in (1, _BATCH):
            rows = {name: array[:count] for name, array in given.items()}
            model = manifest.variant.name
            yield f"{model}, tensors of {count}", model, count, request(model, rows, (output,))
            if variant is folder.variants[0] and list(given) == ["image"]:
                budget = float(manifest.variant.budget)
                message = encoded_request(folder.model, rows["image"], budget, output)
                yield f"router, PNG files of {count}", folder.model, count, message


def measure(name: str, place: Path, row: dict[str, Any]) -> None:
    """Measure every step of one model, and add each to its row."""
    row |= checkpoint_of(name, place)
    path, out = place / f"{name}.safetensors", place / f"{name}-exported"
    options = list(PRESETS[name][3]) if name in PRESETS else []
    export = ["export", str(path), "--out", str(out), "--force"]
    row["export"] = measured([*export, *options])
    if "failed" in row["export"]:
        return
    row["verify"] = measured(["verify", str(out)])
    row["torch.onnx and comparison"] = _peer(path, place)
    if name in INT8:
        more = ["--precision", "fp32,int8", "--calibrate-on", str(_photographs(place))]
        row["export fp32, int8"] = measured([*export, *more])
    folder, checkpoint = ArtefactFolder(out), load(path)
    row["mib"] = {each.variant.name: each.file.total_bytes / 2**20 for each in folder.manifests}
    row["gate_s"] = {each.variant.name: each.parity.seconds for each in folder.manifests}
    peer = place / "peer.onnx"
    row["images_per_second"] = in_process(folder, checkpoint, peer)
    row["served"] = served(folder, checkpoint, place)
    shutil.rmtree(out)


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


_STEPS = {
    "convert": "convert",
    "export": "export and check",
    "torch.onnx and comparison": "torch.onnx, comparison",
    "verify": "verify",
}
_WAYS = {
    "ONNX Runtime, 1 thread": ", onnxruntime, 1 thread",
    _threads(cores()): f", onnxruntime, {_threads(cores())}",
    "OpenVINO": f", openvino, {_threads(cores())}",
    "torch": "torch",
    "torch.compile": "torch.compile",
    "torch.onnx in ONNX Runtime": "torch.onnx, onnxruntime",
    "in OpenVINO": "torch.onnx, openvino",
}


def tables(rows: dict[str, dict[str, Any]]) -> str:
    """Return the tables of docs/benchmarks.md: what each step takes, and images per second."""
    head = ["model", "CPU with", "files, MiB", *_STEPS.values(), "repository", "ready"]
    lines: list[list[str]] = []
    for name, row in rows.items():
        taken = [_taken(row.get(step)) for step in _STEPS]
        files, server = row.get("mib", {}), row.get("served", {})
        sizes = f"{sum(files.values()):,.0f}" + (f" in {len(files)}" if len(files) > 1 else "")
        ready = f"{server['ready_s']:.1f} s" if "ready_s" in server else "-"
        own = [f"`{name}`", _widest(row.get("instruction_sets")), sizes]
        lines.append([*own, *taken, _taken(server.get("repository")), ready])
    speeds: list[list[str]] = []
    for row in rows.values():
        sizes = row["mib"] if row.get("served") else {}
        full = max(sizes, key=sizes.get, default="")  # which the peers ran as well
        found = [_speeds(variant, row, is_full=variant == full) for variant in sizes]
        speeds += [cells for cells in found if cells]
    ways = ["variant", *_WAYS, "server", "p50, p99 ms"]
    return f"{table(head, lines)}\n\n{table(ways, speeds)}"


def draw(rows: dict[str, Any], path: Path) -> None:
    """Draw the speeds of the models in `SHOWN`, which were all measured on the same CPU."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for label, (way, mark, color) in LOOKS.items():
        found = [
            (median, at)
            for at, (row, variant) in enumerate(SHOWN.values())
            if (median := _median(rows[row]["images_per_second"], variant, way))
        ]
        axes.plot(*zip(*found, strict=True), mark, color=color, label=label, markersize=8)
    axes.set(xscale="log", xlabel="images per second, two cores, batches of 8")
    axes.set_yticks(range(len(SHOWN)), SHOWN)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, which="both", axis="x")
    axes.xaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _median(rates: dict[str, Any], variant: str, way: str) -> float | None:
    name = way if way.startswith("torch") else f"{variant}-{way}, 2 threads"
    # What is compared with computes the full model.
    is_peer_of_less = way.startswith("torch") and not variant.endswith(("exact", "b1000"))
    return None if is_peer_of_less or name not in rates else float(rates[name]["median"])


def _widest(sets: list[str] | None) -> str:
    """Name what a CPU has for narrow types, or otherwise its widest vectors."""
    narrow = [name for name in sets or () if name.endswith(("VNNI", "BF16")) and "512" in name]
    return ", ".join(narrow or (sets or ["-"])[-1:])


def _speeds(variant: str, row: dict[str, Any], *, is_full: bool) -> list[str]:
    """Return a row of the second table; empty for further components of a variant."""
    rates, served = row["images_per_second"], row["served"].get(f"{variant}, tensors of {_BATCH}")
    if served is None:
        return []
    own = [
        rates.get(variant + way) if way.startswith(",") else rates.get(way) if is_full else None
        for way in _WAYS.values()
    ]
    cells = [f"{each['median']:,.3g}" if each else "-" for each in own]
    times = f"{served['p50_ms']:,.0f}, {served['p99_ms']:,.0f}"
    return [f"`{variant}`", *cells, f"{served['images_per_second']:,.3g}", times]


def _taken(step: dict[str, Any] | None) -> str:
    if step is None:
        return "-"
    if "failed" in step:
        return "fails"
    return f"{step['seconds']:,.0f} s, {step['peak_mib'] / 1024:.1f} GiB"


def main() -> int:
    """Measure the models that were named, and write each row when it is complete."""
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2:])
    if sys.argv[1:2] == ["--peer"]:
        peer_export(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", choices=[*MODELS, *PRESETS, []])
    parser.add_argument("--place", type=Path, default=Path("build/real"))
    parser.add_argument("--again", action="store_true", help="measure rows that exist again")
    parser.add_argument("--tables", action="store_true", help="print what was measured")
    parser.add_argument("--picture", type=Path, help="draw what was measured into this PNG file")
    given = parser.parse_args()
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": {}}
    if given.tables:
        print(tables(result["rows"]))
        return 0
    if given.picture:
        draw(result["rows"], given.picture)
        return 0
    given.place.mkdir(parents=True, exist_ok=True)
    for name in given.models or [*MODELS, *PRESETS]:
        if name in result["rows"] and not given.again:
            continue
        row = {**commit_and_date(), "instruction_sets": this_machine().instruction_sets}
        try:
            measure(name, given.place, row)
        except Exception as error:  # what was measured so far is kept
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        result["machine"] = this_machine().to_dict()
        result["rows"][name] = row
        write_result(RESULT, result)
        print(name, json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
