# SPDX-License-Identifier: Apache-2.0
"""A caller that sends only hard images: what do the others wait for, with and without allowances?

    python benchmarks/escalations.py [--rounds 6 --seconds 20 --busy 0.3]

Two variants of the bundled server sleep for a time per image, and a policy asks them in turn. Two
callers send single images at random times, each half of the load. Of the first one's images, a
fifth go on to the second variant. So do those of the second caller, or all of them. Four arms take
turns: either kind of second caller, with allowances and without. Writes results/escalations.json.
"""

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from result_file import options_of, spread, write_result

from saccade.serving.bench.load_requests import png_files, request
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.model_config import read_config
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from open_load import Arrivals, OpenLoad, with_timeout
from policy_files import write_policy
from tiny_artefacts import FULL, HALF, MODEL, artefacts, rehash

SECONDS = {HALF: 0.004, FULL: 0.04}  # per image
GOES_ON, WAIT_S, MOST = 0.2, 5.0, 1.1
FREE = ServeOptions(grpc_port=0, http_port=0, metrics_port=0, ready_port=0)
SLEEPING = """
import time, numpy as np, triton_python_backend_utils as pb
WIDTHS = {{"logits": 3, "probabilities": 3, "embedding": 4}}
class TritonPythonModel:
    def execute(self, requests):
        images = [pb.get_input_tensor_by_name(one, "image").as_numpy() for one in requests]
        time.sleep({seconds} * sum(map(len, images)))
        sure = [np.where(own.reshape(len(own), -1)[:, :1] > 127, {hard}, 9) for own in images]
        return [pb.InferenceResponse([
            pb.Tensor(name, np.eye(1, WIDTHS[name], dtype=np.float32) * own.astype(np.float32))
            for name in one.requested_output_names()]) for one, own in zip(requests, sure)]
"""


def main() -> None:
    parser = options_of(__doc__, "escalations", rounds=6, seconds=20.0)
    parser.add_argument("--busy", type=float, default=0.3, help="of the second variant, usually")
    options = parser.parse_args()
    rate = options.busy / (GOES_ON * SECONDS[FULL]) / 2
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = artefacts(Path(place) / "exported", checkpoint=False)
        write_policy(folder)
        places = {name: Path(place) / name for name in ("with", "without")}
        for name, repository in places.items():
            prepare(folder, repository, limited=name == "with")
        with Server(places["with"], FREE) as limited, Server(places["without"], FREE) as free:
            urls = {"with": limited.url, "without": free.url}
            for turn in range(options.rounds):
                rounds.append({})
                for name, kind in [(n, k) for n in urls for k in ("usual", "hard")][
                    :: 1 - turn % 2 * 2
                ]:
                    found = run(urls[name], kind, turn, rate, options.seconds)
                    rounds[-1][f"{kind} {name}"] = found
                    time.sleep(WAIT_S)
                print(json.dumps(rounds[-1]), flush=True)
    times = {
        name: spread(
            [one[f"hard {name}"]["first"] / one[f"usual {name}"]["first"] for one in rounds]
        )
        for name in places
    }
    result = {
        "benchmark": "p95 of a caller beside one that sends only hard images",
        "seconds_per_image": SECONDS, "goes_on": GOES_ON, "busy": options.busy,
        "requests_per_s_each": rate, "seconds": options.seconds,
        "p95_times_that_beside_a_usual_caller": times,
        "target": {"most": MOST, "met": times["with"]["median"] <= MOST},
        "rounds": rounds,
    }  # fmt: skip
    write_result(options.out, result)
    print(times)


def prepare(folder: Path, repository: Path, *, limited: bool) -> None:
    """Write a repository of two variants that sleep; those of bright images are unsure."""
    deploy(folder, RepositoryOptions(out=repository))
    for variant, seconds in SECONDS.items():
        model = repository / variant
        config = read_config(model / "config.pbtxt")
        config.backend, config.default_model_filename = "python", "model.py"
        for field in ("parameters", "optimization", "model_operations"):
            config.ClearField(field)  # those of the other backend
        (model / "config.pbtxt").write_text(str(config))
        code = SLEEPING.format(seconds=seconds, hard=0 if variant == HALF else 9)
        (model / "1" / "model.py").write_text(code)
    router = repository / MODEL / "1"
    routes = json.loads((router / "routes.json").read_text())
    shares = (1 - GOES_ON, GOES_ON)
    for step, share in zip(routes["policies"][0]["steps"], shares, strict=True):
        step.update(temperature=1.0, end_share=share)
    routes["policies"][0]["steps"][0]["threshold"] = 0.9
    (router / "routes.json").write_text(json.dumps(routes))
    if not limited:
        code = (router / "allowance.py").read_text()
        (router / "allowance.py").write_text(code.replace("TIMES = 2.0", "TIMES = 1e9"))
    rehash(repository)


def run(url: str, kind: str, turn: int, rate: float, seconds: float) -> dict[str, Any]:
    """Return the p95 of the first caller and of the second, in milliseconds."""
    orders = {"first": GOES_ON, "second": GOES_ON if kind == "usual" else 1.0}

    def send(name: str) -> tuple[float, int, dict[str, int]]:
        messages = messages_of(f"{name}-{kind}-{turn}", orders[name])
        seed = 2 * turn + (name == "second")
        with OpenLoad(url) as load:
            load.run(Arrivals(messages, rate, 4.0, 60.0, seed))  # also tells who is who
            found = load.run(Arrivals(messages, rate, seconds, 60.0, seed))
        return float(np.percentile(found.answered_ms, 95)), found.sent, dict(found.statuses())

    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(orders, pool.map(send, orders), strict=True))
    ended = {f"{name}_statuses": statuses for name, (_, _, statuses) in found.items()}
    return {name: p95 for name, (p95, _, _) in found.items()} | ended


def messages_of(caller: str, hard: float) -> tuple[bytes, ...]:
    """Return requests of a caller, of whose images this share is hard."""
    from tritonclient.grpc import service_pb2

    made = []
    for at, bright in enumerate(np.random.default_rng(0).permutation(50) < 50 * hard):
        image = np.full((1, 4, 4, 1), 255 * bright, np.uint8)
        message = service_pb2.ModelInferRequest.FromString(
            request(MODEL, {"image": png_files(image)}, ("logits", "certified"), {"policy": "auto"})
        )
        message.id = f"{caller}/{at}"
        made.append(with_timeout(message, int(1e6 * WAIT_S)))
    return tuple(made)


if __name__ == "__main__":
    main()
