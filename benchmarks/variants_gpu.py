# SPDX-License-Identifier: Apache-2.0
"""Compare the throughput of folded and unfolded variants of a NAC on a GPU.

`results/variants_gpu.json` names the device that was used.
    saccade export shipped:digits-sum --out build/digits \
        --budget 1,0.5,0.25,0.125,0.0625 --precision fp32,fp16
    saccade build build/digits        # where TensorRT supports the GPU
    python benchmarks/variants_gpu.py --artefact build/digits

Each budget and batch is measured as the unfolded torch model, the same with torch.compile, the
folded model, and the folded model as CUDA graphs, in float32 and with fp16 products. Every form is
first compared with the unfolded model on the device. A round times each form in turn, with events
around a burst of calls on rotated inputs. The figure is the median over the rounds of the ratio
within a round. For the variants in `--artefact`, ONNX Runtime's CUDA provider and the engines are
timed too if they are installed and built, including copies to and from the device. torch.compile
takes half a minute per model and is measured for one batch size. To try the script, `--device cpu`
runs the same code without CUDA graphs and writes nothing.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from result_file import write_result

from saccade.core.errors import SaccadeError, require
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.gate.metrics import WHOLE, relative_error, tensor_limit
from saccade.exporter.runtimes.half_products import half_products
from saccade.exporter.runtimes.runners import Runner, onnx_runner, onnx_session
from saccade.exporter.runtimes.runtime import peers_of
from saccade.models.checkpoint import load

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "variants_gpu.json"
BUDGETS = ("1", "0.5", "0.25", "0.125", "0.0625")
BATCHES = (1, 8, 64, 512)
COMPILED_BATCH = 64
ROTATED, BURST, ROUNDS = 4, 10, 15
# A GPU may round float32 products to TF32 only if that is enabled, which it is not here.
PRECISIONS = ("fp32", "fp16")
PAPER = {"budget": 0.125, "full over budget": 8}
Form = Callable[[Any], Any]


def forms_of(model: Any, images: Any, cuda: bool) -> dict[str, Form]:
    """Return the ways to run the model, each from images to logits.

    Shapes: images uint8 [b h w c] -> [b classes].
    """
    import torch

    folded = deepcopy(model).double().fold().float().to(images.device)
    products = half_products(folded, "fp16", accumulate=False)

    def rounded(x: Any) -> Any:
        with products:
            return folded(x)

    forms: dict[str, Form] = {"unfolded": model, "folded": folded, "folded fp16": rounded}
    if cuda:
        if len(images) == COMPILED_BATCH:
            # Compiled code of the earlier budgets counts towards the limit of recompilations.
            torch._dynamo.reset()
            forms["unfolded compiled"] = torch.compile(model, dynamic=False)
        forms["folded graph"] = captured(folded, images)
        forms["folded fp16 graph"] = captured(rounded, images)
    return forms


def exported_forms(artefact: Path | None, budget: str, device: str) -> dict[str, Form]:
    """Return ONNX Runtime and the engines for the variants of a budget, from images to logits."""
    import torch

    forms: dict[str, Form] = {}
    folder = ArtefactFolder(artefact) if artefact else None
    for manifest in folder.manifests if folder else ():
        if f"{manifest.variant.budget:g}" != budget or manifest.variant.precision not in PRECISIONS:
            continue
        if device == "cuda":
            runners = peers_of(folder, manifest)
        else:
            runners = {"onnxruntime": onnx_runner(onnx_session(folder.file(manifest)))}
        for name, runner in runners.items():

            def run(images: Any, runner: Runner = runner) -> Any:
                return torch.from_numpy(runner({"image": images.cpu().numpy()})["logits"]).to(
                    device
                )

            forms[f"{name} {manifest.variant.precision}"] = run
    return forms


def captured(form: Form, images: Any) -> Form:
    """Capture a form as a CUDA graph for this batch; the next call overwrites the answer."""
    import torch

    place = images.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            form(place)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = form(place)

    def replay(x: Any) -> Any:
        place.copy_(x)
        graph.replay()
        return answer

    return replay


def check(forms: dict[str, Form], images: Any) -> dict[str, float]:
    """Return each form's error against the unfolded model, relative to its largest logit.

    Raises: SaccadeError if a form gives a different result.
    """
    expected = forms["unfolded"](images).cpu().numpy()
    actual = {}
    for name, form in forms.items():
        error = relative_error(form(images).cpu().numpy(), expected, WHOLE)
        actual[name] = error
        limit = tensor_limit("fp16" if "fp16" in name else "fp32")
        if not error <= limit:
            raise SaccadeError(f"{name}: relative error is {error:.2g}, expected at most {limit}.")
    return actual


def seconds_of(form: Form, inputs: list[Any], cuda: bool, burst: int) -> float:
    """Return the time per call over a burst."""
    import torch

    if not cuda:
        start = time.perf_counter()
        for index in range(burst):
            form(inputs[index % len(inputs)])
        return (time.perf_counter() - start) / burst
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for index in range(burst):
        form(inputs[index % len(inputs)])
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / burst


def measure(given: argparse.Namespace) -> list[Any]:
    """Return a row per budget and batch: inferences per second and ratios within each round."""
    import torch

    checkpoint, device, cuda = load(given.checkpoint), given.device, given.device == "cuda"
    whole = checkpoint.build(torch.float32).to(device).eval()
    image = torch.from_numpy(checkpoint.calibration["image"]).to(device)
    rows = []
    for budget in given.budgets:
        model = whole.at(whole.budget(budget)).to(device)
        exported = exported_forms(given.artefact, budget, device)
        for batch in given.batches:
            inputs = [image.roll(index, 0).repeat(-(-batch // len(image)), 1, 1, 1)[:batch].clone()
                      for index in range(ROTATED)]  # fmt: skip
            forms = forms_of(model, inputs[0], cuda) | exported
            errors = check(forms, inputs[0])
            times: dict[str, list[float]] = {name: [] for name in forms}
            for turn in range(given.rounds):
                names = list(forms)[:: 1 if turn % 2 else -1]
                for name in names:
                    times[name].append(seconds_of(forms[name], inputs, cuda, BURST))
            base = times["unfolded"]
            rows.append(
                {
                    "budget": float(budget),
                    "batch": batch,
                    "errors": errors,
                    "inferences_per_second": {
                        name: batch / statistics.median(time) for name, time in times.items()
                    },
                    "over_unfolded": {
                        name: [slow / own for slow, own in zip(base, time, strict=True)]
                        for name, time in times.items()
                    },
                }
            )
            print(budget, batch, _shown(rows[-1]), file=sys.stderr)
    return rows


def _shown(row: dict[str, Any]) -> str:
    ratios = {name: statistics.median(ratio) for name, ratio in row["over_unfolded"].items()}
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())


def full_over_budget(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the throughput at 0.125 over that of all modules, by form and batch (paper: 8)."""
    speeds = {(row["budget"], row["batch"]): row["inferences_per_second"] for row in rows}
    return {
        f"{form}, batch {batch}": few[form] / speeds[1.0, batch][form]
        for (budget, batch), few in speeds.items()
        if budget == PAPER["budget"]
        for form in few
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    shipped = ROOT / "src" / "saccade" / "models" / "shipped" / "digits-sum.safetensors"
    parser.add_argument("--checkpoint", type=Path, default=shipped)
    parser.add_argument("--artefact", type=Path, help="artefact folder, optionally with engines")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    arguments = parser.parse_args()
    torch = require("torch", extra="export")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("variants_gpu.py: no CUDA device found. To try the script, pass --device cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        rows = measure(arguments)
    ratios = full_over_budget(rows)
    print("\n".join(f"0.125 over full, {name}: {ratio:.2f}" for name, ratio in ratios.items()))
    if arguments.device == "cuda":
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        result = {"machine": machine, "paper": PAPER, "rows": rows, "0.125 over full": ratios}
        write_result(RESULT, result)


if __name__ == "__main__":
    main()
