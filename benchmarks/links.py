# SPDX-License-Identifier: Apache-2.0
"""Measure a NAC whose modules keep K links: score, speed and memory by K.

    python benchmarks/links.py score                 # trains what is missing into build/links
    python benchmarks/links.py shipped speed memory  # on one thread

Each part replaces its own figures in results/links.json. Scores are of five seeds for each data
set, with the recipes below, and of the shipped checkpoints. A model is scored with its K
strongest links ("learned"), with its own link and K - 1 random ones ("random", one draw per seed),
and with the dense model's weights of the strongest links, which are not divided by their sum
("lossy": it costs as much as the dense model). Intervals are Student's t over the seeds of paired
differences, 95 %.

Speed is that of one propagator of the preset `imagenet`, dense and sparse in turn. Memory is the
peak of a new process that runs the whole model with 4,096 modules, where private memory may be
limited.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from fold import traced
from interleaved import in_turn
from result_file import BUILD, facts, interval, options_of, write_result
from torch import Tensor, nn

from saccade.exporter.runtimes.runners import onnx_session
from saccade.models.checkpoint import load
from saccade.models.data.datasets import load_data
from saccade.models.data.listops import listops
from saccade.models.families import new_model
from saccade.models.nac import fold
from saccade.models.nac.config import PRESETS
from saccade.models.nac.model import NAC
from saccade.models.training.options import TrainOptions
from saccade.models.training.train import train

LINKS, SEEDS = (4, 8, 16, 32), (0, 1, 2, 3, 4)
CHECKPOINTS = BUILD.parent / "links"
RECIPES: dict[str, dict[str, Any]] = {
    "digits": {},
    "digits-sum": {"steps": 1_500, "batch": 32, "set": {"modules": 64}},
    "listops": {"steps": 1_000, "batch": 32},
}
SHIPPED = ("digits-sum", "listops")
AT_ONCE, MOST, BATCHES = 50, 1_000, (1, 8)
LARGE, LARGE_BATCH, LARGE_LINKS, LIMIT_GIB = 4096, 4, 16, 2
RUN = """
import re, resource, sys
from pathlib import Path
import numpy
x = numpy.zeros((int(sys.argv[2]), 224, 224, 3), numpy.uint8)
if sys.argv[1].endswith(".onnx"):
    from saccade.exporter.runtimes.runners import onnx_session
    session = onnx_session(Path(sys.argv[1]))
    run = lambda: session.run(["logits"], {"image": x})
else:
    import torch
    from links import large
    model = large(int(sys.argv[1]))
    run = torch.inference_mode()(lambda: model(torch.from_numpy(x)))
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
Path("/proc/self/clear_refs").write_text("5")  # the peak so far
before = peak()
if limit := int(sys.argv[3]):
    resource.setrlimit(resource.RLIMIT_DATA, (limit << 30, limit << 30))
run()
print(before, peak())
"""


def trained(data: str, seed: int) -> Path:
    """Return the checkpoint of a seed; train it if it is missing, resume it if it is not done."""
    out = CHECKPOINTS / f"{data}-{seed}.safetensors"
    options = TrainOptions(out, data=data, seed=seed, **RECIPES[data])
    if not out.exists():
        train("nac", replace(options, resume=options.state_path.exists()))
    return out


def samples(data: str) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Return the inputs of the first test samples, and their labels."""
    if data == "listops":
        drawn = listops("test")
        return (drawn.characters[:MOST], drawn.length[:MOST]), drawn.labels[:MOST]
    images = load_data(data, "test")
    return (images.images[:MOST],), images.labels[:MOST]


@torch.inference_mode()
def right(model: nn.Module, data: str) -> float:
    """Return the share of right answers in percent."""
    inputs, labels = samples(data)
    found = [
        model(*(torch.from_numpy(array[at : at + AT_ONCE]) for array in inputs)).argmax(1).numpy()
        for at in range(0, len(labels), AT_ONCE)
    ]
    return 100 * float((np.concatenate(found) == labels).mean())


def with_random_links(model: NAC, links: int, seed: int) -> NAC:
    """Return the sparse model with its own and links - 1 random senders per module."""
    sparse, rng = model.sparse(links), np.random.default_rng((seed, links))
    places = np.arange(model.config.modules)
    rows = [[own, *rng.choice(np.delete(places, own), links - 1, False)] for own in places]
    assert sparse.neighbors is not None
    sparse.neighbors.copy_(torch.tensor(np.sort(rows)))
    return sparse


def lossy(kept: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, heads: int) -> Tensor:
    """`fold.fused_attention` that sets weights to 0 where `kept` [u u] is, after the softmax."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    weights = (q @ k.mT + bias).softmax(-1) * kept
    return (weights @ v).transpose(1, 2).flatten(2)


def by_links(path: Path | str, data: str, seed: int) -> dict[str, dict[str, float]]:
    """Return the scores of one checkpoint by the number of links, in each of three ways."""
    model: Any = load(path).build()
    dense = model.fold()
    rows: dict[str, dict[str, float]] = {"all": {"learned": right(dense, data)}}
    for links in LINKS:
        sparse = model.sparse(links)
        kept = torch.zeros(dense.links.shape).scatter(1, sparse.neighbors, 1.0)
        row = {"link_share": float(100 * (dense.links * kept).sum() / dense.links.sum())}
        row["learned"] = right(sparse.fold(), data)
        row["random"] = right(with_random_links(model, links, seed).fold(), data)
        attention = fold.fused_attention
        fold.fused_attention = partial(lossy, kept)  # type: ignore[assignment]
        row["lossy"] = right(dense, data)
        fold.fused_attention = attention
        rows[str(links)] = row
        print(Path(path).stem, links, row, flush=True)
    return rows


def compared(differences: list[float]) -> dict[str, Any]:
    """Return the mean of paired differences in points, its interval, and whether it excludes 0."""
    low, high = interval(differences)
    mean, half = (low + high) / 2, (high - low) / 2
    return {"mean": mean, "half_width": half, "shown": abs(mean) > half, "seeds": differences}


def score(chosen: list[str]) -> dict[str, Any]:
    """Score the checkpoints of all seeds, and compare over seeds."""
    result: dict[str, Any] = {"recipes": RECIPES, "seeds": SEEDS}
    for data in chosen:
        rows = {str(seed): by_links(trained(data, seed), data, seed) for seed in SEEDS}
        over: dict[str, dict[str, Any]] = {}
        for links in map(str, LINKS):
            pairs = {
                "learned - all": (("learned", links), ("learned", "all")),
                "learned - random": (("learned", links), ("random", links)),
                "learned - lossy": (("learned", links), ("lossy", links)),
            }
            over[links] = {
                name: compared([rows[str(s)][a[1]][a[0]] - rows[str(s)][b[1]][b[0]] for s in SEEDS])
                for name, (a, b) in pairs.items()
            }
        own = {"test": len(samples(data)[1]), "percent": rows, "over_seeds": over}
        result[data] = facts() | own
    return result


def shipped() -> dict[str, Any]:
    """Score the shipped checkpoints."""
    return {data: by_links(f"shipped:{data}", data, 0) for data in SHIPPED}


class PropagatorAlone(nn.Module):
    """The first propagator of a folded NAC, for the exporter: states in, states out."""

    def __init__(self, folded: Any) -> None:
        super().__init__()
        self.propagator, self.bias = folded.propagators[0], folded.link_bias
        self.neighbors = folded.neighbors

    def forward(self, theta: Tensor) -> Tensor:
        return self.propagator(theta.clone(), self.bias, None, None, self.neighbors)


def as_call(model: nn.Module, theta: Tensor, runtime: str) -> Callable[[int], Any]:
    """Return a call of the model in that runtime."""
    if runtime == "torch":
        return lambda index: model(theta)
    axis = ({0: torch.export.Dim("b", min=1)},)
    with torch.no_grad():
        program = torch.onnx.export(
            model.eval(), (theta.expand(3, -1, -1) if len(theta) == 1 else theta,),
            dynamo=True, opset_version=20, dynamic_shapes=axis, verbose=False,
        )  # fmt: skip
    assert program is not None
    session = onnx_session(program.model_proto.SerializeToString())
    feed = {session.get_inputs()[0].name: theta.numpy()}
    return lambda index: session.run(None, feed)


def speed(rounds: int, moment_s: float) -> dict[str, Any]:
    """Time a dense and a sparse propagator in turn."""
    config = replace(PRESETS["imagenet"], propagator_layers=1)
    model = new_model(NAC, config).eval()
    dense = PropagatorAlone(model.fold())
    rows: dict[str, Any] = {"modules": config.modules, "batches": {}}
    for batch in BATCHES:
        theta = torch.randn(batch, config.modules, config.dim)
        for runtime in ("onnxruntime", "torch"):
            peer = as_call(dense, theta, runtime)
            for links in LINKS:
                sparse = PropagatorAlone(model.sparse(links).fold())
                ours = as_call(sparse, theta, runtime)
                with torch.inference_mode():
                    ratio = in_turn(ours, peer, rounds=rounds, moment_s=moment_s).to_dict()
                own = rows["batches"].setdefault(str(batch), {}).setdefault(runtime, {})
                own[str(links)] = ratio
                print(batch, runtime, links, ratio, flush=True)
    return rows


def large(links: int) -> Any:
    """Return the folded model of `imagenet` with more modules, sparse unless links is 0."""
    torch.set_num_threads(1)
    config = replace(PRESETS["imagenet"], modules=LARGE, signature_init="random")
    model = new_model(NAC, config).eval()
    return (model.sparse(links) if links else model).fold()


def memory() -> dict[str, Any]:
    """Run the whole model in new processes, dense and sparse, with and without a limit."""
    rows: dict[str, Any] = {"modules": LARGE, "batch": LARGE_BATCH, "limit_gib": LIMIT_GIB}
    with tempfile.TemporaryDirectory() as folder:
        for links in (0, LARGE_LINKS):
            path = Path(folder) / f"{links}.onnx"
            path.write_bytes(traced(large(links), "").SerializeToString())
            for runtime, what in (("onnxruntime", str(path)), ("torch", str(links))):
                runs = {limit: _peak(what, limit) for limit in (0, LIMIT_GIB)}
                row = {"peak_mib": runs[0], "within_limit": runs[LIMIT_GIB] is not None}
                rows.setdefault(runtime, {})[f"k{links}" if links else "dense"] = row
                print(runtime, links, row, flush=True)
            rows.setdefault("file_mib", []).append(path.stat().st_size / 2**20)
    return rows


def _peak(what: str, limit_gib: int) -> dict[str, float] | None:
    words = [sys.executable, "-c", RUN, what, str(LARGE_BATCH), str(limit_gib)]
    places = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(words, capture_output=True, text=True, env=places)
    if done.returncode:
        print(done.stderr.strip().splitlines()[-1][:200])
        return None
    loaded, most = (int(number) / 1024 for number in done.stdout.split())
    return {"loaded": loaded, "most": most}


def main() -> None:
    """Measure the given parts."""
    parser = options_of(__doc__ or "", "links", rounds=9, seconds=1.0)
    parser.add_argument("part", nargs="+", choices=("score", "shipped", "speed", "memory"))
    parser.add_argument("--data", nargs="+", choices=RECIPES, default=list(RECIPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    parts = {
        "score": partial(score, options.data),
        "shipped": shipped,
        "speed": partial(speed, options.rounds, options.seconds),
        "memory": memory,
    }
    for part in options.part:
        known = result.get(part, {})  # scores of other data, too
        result = {"benchmark": "links"} | result | {part: known | facts() | parts[part]()}
        write_result(options.out, result)


if __name__ == "__main__":
    main()
