# SPDX-License-Identifier: Apache-2.0
"""Question answering in a file: the authors' loop of loops runs in ONNX Runtime as in torch."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'saccade[export]'")
pytest.importorskip("onnxruntime", reason="install onnxruntime: pip install 'saccade[cpu]'")

import onnxruntime
import torch

from saccade.export.tracing import trace_part
from saccade.models.vqa import VQA
from saccade.models.vqa_config import PRESETS


def test_the_authors_solver_runs_in_a_file() -> None:
    config = replace(
        PRESETS["vqa-tiny"],
        features="given",
        layout="flat",
        grid=(3, 4),
        rows=10,
        feature_dim=8,
        attention="tvmax",
        solver="authors",
        lam=0.05,
        question_length=3,
    )
    folded = VQA(config).fold()
    part = folded.parts()[0]
    assert part.random is not None
    samples = part.random(np.random.default_rng(0), 7)
    proto = trace_part(folded, part, samples, ("logits", "attention"))
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    inputs = {name: torch.from_numpy(each) for name, each in samples.items()}
    expected = part.run(**inputs)
    for chosen in (slice(0, 7), slice(4, 5)):
        fed = {name: each[chosen] for name, each in samples.items()}
        logits, attention = session.run(None, fed)
        assert np.abs(logits - expected["logits"][chosen].numpy()).max() < 1e-5
        assert np.abs(attention - expected["attention"][chosen].numpy()).max() < 1e-5
