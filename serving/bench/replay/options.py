# SPDX-License-Identifier: Apache-2.0
"""Options of `saccade replay`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from saccade.core.options import Options
from saccade.core.schema import Positive, Range


@dataclass(frozen=True)
class ReplayOptions(Options):
    """Options of replay: the server, by when an answer is in time, and what to send."""

    model: str  # name of the router in the repository
    url: str = "127.0.0.1:8001"  # the server's gRPC address
    # how long an answer may take, counted from when its request was due; requests have it as their
    # timeout; default: the objective of the repository
    deadline_ms: Positive | None = None
    # instead of a log: poisson:RATE, gamma:RATE,CV2 (bursts; CV2 is 1 for Poisson) or
    # step:RATE,TIMES (TIMES the rate in the middle third); RATE is in requests per second, or as
    # 0.7x in what the largest budget sustains, which is measured first
    arrivals: str | None = None
    seconds: Positive | None = None  # length: of a log the first seconds, of --arrivals 60
    speed: Positive = 1.0  # replay the log so many times as fast
    budget: float | str | None = None  # budget of requests for which the log has none
    policy: str | None = None  # policy that requests without a budget follow
    images: Path | None = None  # an image, or a folder of them, to send in turn; default: noise
    # artefact folder that `saccade bench` has measured: answers count by their variant's score
    scores: Path | None = None
    senders: Annotated[int, Range(1, 64)] = 1  # processes that send; more if one falls behind
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0  # seed of --arrivals and of the noise
