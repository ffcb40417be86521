# SPDX-License-Identifier: Apache-2.0
"""The figures of a report as `bench` writes them, without a benchmark."""

import base64
import io
from typing import Any

import numpy as np
from rich.console import Console

from saccade.serving.bench import report
from saccade.serving.bench.load_requests import png_files

SHORT, LONG = "nac-b0125-fp32", "nac-b1000-fp32"


def point(rate: float, milliseconds: float) -> dict[str, Any]:
    return {
        "inferences_per_second": rate, "p50_ms": milliseconds, "p95_ms": 2 * milliseconds,
        "p99_ms": 30 * milliseconds, "client_cpu_share": 0.2,
    }  # fmt: skip


def file(name: str, role: str, multiply_adds: int = 51_000_000) -> dict[str, Any]:
    return {
        "name": name, "role": role, "sha256": "ab" * 32, "file_bytes": 3_000_000,
        "parameters": 700_000, "multiply_adds": multiply_adds, "peak_activation_bytes": 1_000_000,
    }  # fmt: skip


def variant(budget: float, score: float, rate: float, dominated_by: str | None) -> dict[str, Any]:
    name = f"nac-b{round(1000 * budget):04d}-fp32"
    return {
        "variant": name,
        "sha256": "ab" * 32,
        "budget": budget,
        "precision": "fp32",
        "kept": round(256 * budget),
        "total": 256,
        "unit": "modules",
        "files": [file(name, "", round(51_000_000 * budget))],
        "score": {
            "name": "top-1", "unit": "share", "higher_is_better": True, "value": score,
            "interval": [score - 0.02, score + 0.02], "n": 599,
        },
        "scores": [],
        "top5": 0.99,
        "embedding_bytes": None,
        "in_process": {
            "best_batch": 8,
            **{f"batch_{size}": point(2 * rate, 1.0) for size in (1, 8, 64)},
        },
        "grpc": {
            "concurrency_1": point(rate / 2, 2.0),
            "concurrency_16": point(rate, 9.0),
            "router_concurrency_1": point(rate / 3, 3.0),
        },
        "dominated_by": dominated_by,
    }  # fmt: skip


def measured_policy() -> dict[str, Any]:
    """Return a policy of two of the variants as a report has it, without raw samples."""
    step = {"sha256": "ab" * 32}
    return {
        "policy": "auto",
        "steps": [
            {**step, "variant": SHORT, "threshold": 0.8, "share": 0.7},
            {**step, "variant": LONG, "threshold": None, "share": 0.3},
        ],
        "full": LONG, "full_sha256": "ab" * 32, "against": "full", "confidence": 0.95, "risk": 0.01,
        "bound": 0.008, "score": {**variant(1, 0.925, 1, None)["score"], "n": 500}, "gain": -0.005,
        "gain_interval": [-0.01, 0.0], "agreement": 0.992, "agreement_interval": [0.98, 0.998],
        "calibrated": False,
        "in_process": {
            "best_batch": 8,
            **{f"batch_{size}": point(2100, 0.5) for size in (1, 8, 64)},
        },
        "grpc": {f"router_concurrency_{count}": point(500.0 + count, 2.5) for count in (1, 16)},
        "times_full": {"times": 2.5, "interval": [2.2, 2.9]}, "times_full_served": None,
    }  # fmt: skip


def with_policies(content: dict[str, Any]) -> dict[str, Any]:
    """Add a policy to a report, and one that was left out."""
    content["policies"] = [measured_policy()]
    content["policies_left_out"] = [{"policy": "old", "reason": "its variants have changed."}]
    for each in content["variants"]:
        each["grpc"]["router_concurrency_16"] = point(each["budget"] * 300, 9.0)
    return content


def figures() -> dict[str, Any]:
    """Return a report of three budgets without raw samples, as example sweeps have it."""
    return {
        "schema": report.SCHEMA, "version": report.VERSION, "model": "nac",
        "data": {"name": "digits-sum & <script>", "sha256": "cd" * 32, "n": 599},
        "machine": {"device": "A CPU, 2 cores", "runtime": "onnxruntime 1.31.1 CPU"},
        "date": "2026-11-21T02:30:00+00:00", "server": "triton 2.51.0",
        "variants": [
            variant(1, 0.93, 420, None),
            variant(0.5, 0.85, 400, "nac-b1000-fp32"),
            variant(0.125, 0.88, 3900, None),
        ],
    }  # fmt: skip


def account(requests: int, milliseconds: float) -> dict[str, Any]:
    """Return the server's statistics of one model, with the same time in each part."""
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    return {"requests": requests} | {
        f"{part}_ns": round(1e6 * milliseconds * requests) for part in parts
    }


def with_samples(content: dict[str, Any]) -> dict[str, Any]:
    """Add raw samples to a report: latencies of 1 to 100 ms, 0.5 ms in each part of the model."""
    for each in content["variants"]:
        statistics = {
            content["model"]: account(100, 0.25),
            each["variant"]: account(50, 0.5),
            "another": account(0, 0),
        }
        round_ = {"latencies_ms": list(range(1, 101)), "seconds": 1.0, "statistics": statistics}
        each["samples"] = {
            "values": [1, 0, 1],
            "in_process_s": {"1": [0.001, 0.002, 0.003], "8": [0.008, 0.01, 0.012]},
            "grpc": {name: [round_, round_] for name in each["grpc"]},
        }
    return content


def with_examples(content: dict[str, Any]) -> dict[str, Any]:
    """Add two example samples to a report; the variants differ on one of them."""
    image = png_files(np.zeros((1, 8, 8, 3), dtype=np.uint8))[0, 0]
    picture = base64.b64encode(image).decode()

    def example(index: int, scores: tuple[float, ...]) -> dict[str, Any]:
        answers = {
            each["variant"]: {
                "text": f"answer {score:g}", "confidence": 0.75, "score": score, "focus": picture,
            }
            for each, score in zip(content["variants"], scores, strict=True)
        }  # fmt: skip
        return {
            "index": index, "question": "what is it?", "truth": "seven", "image": picture,
            "answers": answers,
        }  # fmt: skip

    content["examples"] = {
        "samples": 599,
        "disagreements": 1,
        "shown": [example(17, (1.0, 0.0, 1.0)), example(0, (1.0, 1.0, 1.0))],
    }
    return content


def hostile(content: dict[str, Any], text: str) -> dict[str, Any]:
    """Put `text` wherever a report has a name or word from an untrusted source."""
    content["model"] = content["data"]["name"] = content["machine"]["device"] = text
    content["machine"] |= {"processor": text, "system": text, "versions": {text: text}}
    content["server"] = content["date"] = content["data"]["sha256"] = text
    for index, each in enumerate(content["variants"]):
        name = f"{text} {index}"
        each["variant"], each["precision"] = name, "fp32"
        each["files"][0]["name"] = each["files"][0]["sha256"] = name
        each["score"]["name"] = each["unit"] = text
        each["dominated_by"] = each["dominated_by"] and name
    content["failed"] = [{"variant": text, "stage": text, "reason": text}]
    for policy in content.get("policies", ()):
        policy["policy"] = policy["score"]["name"] = policy["steps"][0]["variant"] = text
    for policy in content.get("policies_left_out", ()):
        policy["policy"] = policy["reason"] = text
    for example in (content.get("examples") or {}).get("shown", ()):
        example["question"] = example["truth"] = text
        answers = example["answers"].values()
        example["answers"] = {
            each["variant"]: {**answer, "text": text}
            for each, answer in zip(content["variants"], answers, strict=True)
        }
    return content


def shown(content: Any, width: int = 80) -> str:
    """Return what a terminal of that width shows."""
    stream = io.StringIO()
    Console(file=stream, width=width).print(content)
    return stream.getvalue()
