# SPDX-License-Identifier: Apache-2.0
"""The load generator counts what a server really did, and never hides a failure."""

import mmap
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from open_load import Arrivals, OpenLoad, quantiles, with_timeout
from tritonclient.grpc import service_pb2, service_pb2_grpc

from saccade.core.errors import ServerFailed
from saccade.core.machine import cpu_seconds, family_of, memory_mib
from saccade.serving.bench.load import LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.load_requests import encoded_request, tensor_request
from saccade.serving.bench.measurement import point_of

DELAY_S, DYING_S = 0.02, 1.0


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers after a fixed delay; `failing` refuses, `empty` has an output without bytes.

    `dying` takes long to fail.
    """

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.closed = False  # as behind a proxy, which passes only calls of models on

    def ModelInfer(self, request, context):  # noqa: N802
        self.seen[request.model_name] += 1
        if request.model_name == "failing":
            context.abort(grpc.StatusCode.UNAVAILABLE, "the queue of failing is full")
        if request.model_name == "dying":
            time.sleep(DYING_S)
            context.abort(grpc.StatusCode.UNAVAILABLE, "the server is gone")
        time.sleep(DELAY_S)
        content = b"" if request.model_name == "empty" else b"\0\0\0\0"
        return service_pb2.ModelInferResponse(raw_output_contents=[content])

    def ModelStatistics(self, request, context):  # noqa: N802
        if self.closed:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "this call is not passed on")
        answer = service_pb2.ModelStatisticsResponse()
        for name, count in self.seen.items():
            statistics = answer.model_stats.add(name=name, inference_count=count)
            statistics.batch_stats.add(batch_size=1).compute_infer.count = count
        return answer


@pytest.fixture(scope="module")
def fake() -> Iterator[tuple[FakeServer, str]]:
    servicer = FakeServer()
    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield servicer, f"127.0.0.1:{port}"
        server.stop(0).wait()


@pytest.fixture(scope="module")
def generator(fake: tuple[FakeServer, str]) -> Iterator[LoadGenerator]:
    with LoadGenerator(fake[1], server_pid=os.getpid()) as started:
        yield started


def stream(model: str, concurrency: int = 1) -> Stream:
    request = tensor_request(model, np.zeros((1, 8, 8, 1), np.uint8))
    return Stream(model, model, concurrency, (request,))


def test_counts_and_durations_are_the_servers(generator: LoadGenerator, fake) -> None:
    result = generator.run([stream("steady", 4)], seconds=0.6, warmup_s=0.1)
    latencies = np.asarray(result.streams["steady"].latencies_ms)
    assert (latencies >= 1e3 * DELAY_S).all()
    # Four clients, each served every 20 ms or later; a busy machine may halve that.
    assert 0.5 * 4 * 0.6 / DELAY_S <= len(latencies) <= 4 * 0.65 / DELAY_S + 4
    # The window lies inside the run, and the server's own count for it is nearly ours.
    assert fake[0].seen["steady"] > len(latencies)
    assert abs(result.statistics["steady"]["inferences"] - len(latencies)) <= 8
    assert result.seconds == pytest.approx(0.6, abs=0.3)
    assert result.client_cpu_s > 0
    assert sum(result.server_cpu_s.values()) > 0

    figures = point_of([result])
    assert figures["p50_ms"] == pytest.approx(np.percentile(latencies, 50), abs=1e-3)
    assert figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"] <= latencies.max() + 1e-3
    assert figures["inferences_per_second"] == pytest.approx(
        len(latencies) / result.seconds, abs=0.1
    )
    assert 0 < figures["client_cpu_share"] < 1


def test_a_proxy_that_hides_the_servers_counts_can_be_measured(
    generator: LoadGenerator, fake, monkeypatch
) -> None:
    monkeypatch.setattr(fake[0], "closed", True)
    result = generator.run([stream("steady")], seconds=0.2, warmup_s=0.1)
    assert result.only.latencies_ms and result.statistics == {}


def test_streams_run_together_and_are_told_apart(generator: LoadGenerator) -> None:
    result = generator.run([stream("one", 1), stream("three", 3)], seconds=0.4, warmup_s=0.05)
    one, three = (len(result.streams[name].latencies_ms) for name in ("one", "three"))
    assert one > 0
    assert 1.5 * one < three < 6 * one


@pytest.mark.parametrize(
    ("model", "message"), [("failing", "UNAVAILABLE: the queue"), ("empty", "an output is empty")]
)
def test_a_failure_is_never_a_figure(generator: LoadGenerator, model: str, message: str) -> None:
    result = generator.run([stream("steady"), stream(model)], seconds=0.4, warmup_s=0.1)
    assert not result.streams["steady"].errors
    with pytest.raises(ServerFailed, match=message):
        refuse_errors(result, generator.url)


def test_a_server_that_is_gone_ends_the_window(generator: LoadGenerator, fake) -> None:
    before = fake[0].seen["dying"]
    result = generator.run([stream("dying")], seconds=0.1, warmup_s=0)
    assert fake[0].seen["dying"] - before <= 2, "it waited as for a slow model"
    with pytest.raises(ServerFailed, match=r"1 request failed.*the server is gone"):
        refuse_errors(result, generator.url)


def test_a_dead_load_process_is_an_error_and_no_hang(fake) -> None:
    known = set(family_of(os.getpid()))
    with LoadGenerator(fake[1]) as started:
        order = [stream("steady")]
        started.run(order, seconds=0.1, warmup_s=0)
        (pid,) = set(family_of(os.getpid())) - known
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ServerFailed, match=r"load generator stopped \(killed by SIGKILL\)"):
            started.run(order, seconds=0.1, warmup_s=0)


def test_cpu_time_is_of_the_process_and_its_children() -> None:
    assert os.getpid() in family_of(os.getppid())
    before = sum(cpu_seconds(family_of(os.getpid())).values())
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert 0.1 < sum(cpu_seconds(family_of(os.getpid())).values()) - before < 2
    assert any(name.startswith(f"{os.getpid()} ") for name in cpu_seconds(family_of(os.getpid())))


def test_the_routers_request_holds_the_budget_and_whole_files() -> None:
    images = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8, 1)
    request = service_pb2.ModelInferRequest.FromString(encoded_request("nac", images, 0.125))
    assert float(request.parameters["budget"].string_param) == 0.125
    assert list(request.inputs[0].shape) == [2, 1]
    assert request.raw_input_contents[0].count(b"\x89PNG") == 2


def plain(model: str) -> service_pb2.ModelInferRequest:
    return service_pb2.ModelInferRequest(model_name=model)


def arrivals(rate: float, seconds: float, seed: int) -> int:
    """Number of requests that a Poisson process of this seed sends."""
    rng, now, count = random.Random(seed), 0.0, 0
    while (now := now + rng.expovariate(rate)) < seconds:
        count += 1
    return count


def test_open_load_does_not_wait_for_answers(fake):
    # Eight threads answer 400 a second at most: whoever does not wait for them leaves a queue.
    order = Arrivals(
        (with_timeout(plain("slow"), 1),), rate=1000, seconds=1, deadline_s=0.2, seed=3
    )
    with OpenLoad(fake[1]) as load:
        result = load.run(order)
        again = load.run(order)
    assert result.sent == again.sent == arrivals(1000, 1, seed=3)
    assert sum(result.statuses().values()) == result.sent == len(result.lag_ms)
    assert set(result.statuses()) == {"OK", "DEADLINE_EXCEEDED"}
    assert max(result.answered_ms) >= 1e3 * DELAY_S and result.client_cpu_s > 0


def test_open_load_waits_for_the_last_answers(fake):
    order = Arrivals((plain("slow").SerializeToString(),), rate=1000, seconds=0.2, deadline_s=60)
    with OpenLoad(fake[1]) as load:
        result = load.run(order)
    assert result.statuses() == {"OK": result.sent}
    assert 0 < result.after_end <= result.sent


def test_open_load_tells_refusals_apart(fake):
    order = Arrivals((plain("failing").SerializeToString(),), rate=100, seconds=0.3, deadline_s=30)
    with OpenLoad(fake[1]) as load:
        result = load.run(order)
    assert result.statuses() == {"OK": 0, "UNAVAILABLE": result.sent}
    assert result.first_errors == {"UNAVAILABLE": "the queue of failing is full"}
    assert quantiles(result.answered_ms) is None
    assert quantiles(result.failed_ms["UNAVAILABLE"])["p50"] > 0


def test_memory_of_processes():
    (before,) = memory_mib([os.getpid()]).values()
    kept = bytearray(os.urandom(2**20)) * 64
    (after,) = memory_mib([os.getpid(), 2**30]).values()
    assert 48 < after - before < 128 and kept


def test_mapped_files_can_be_left_out(tmp_path):
    path = tmp_path / "library"
    path.write_bytes(os.urandom(2**20) * 32)

    def held(**how):
        (mib,) = memory_mib([os.getpid()], **how).values()
        return mib

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = held(), held(files=False)
        assert sum(mapped[at] for at in range(0, len(mapped), 4096)) > 0
        after = held(), held(files=False)
    assert after[0] - before[0] > 24 and after[1] - before[1] < 8
