# SPDX-License-Identifier: Apache-2.0
"""Every block of docs/engines.md, run in order on a small model in place of the shipped one.

What needs `tensorrt` and a GPU runs against the fake.
"""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from engine_places import HostMemory, use_fake
from places import ROOT
from quick_gate import quick_gate
from rtx_builds import needs_rtx

from saccade.exporter.runtimes.tensorrt import loading
from saccade.exporter.runtimes.tensorrt.engine_manifest import EngineManifest
from saccade.models import shipped
from saccade.serving.commands import cli

DOCUMENT = ROOT / "docs" / "engines.md"


@needs_rtx
@pytest.mark.journey
def test_every_block_does_what_it_says(
    tiny_checkpoint: Path, traced_before: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(tiny_checkpoint, "digits-sum.safetensors")
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "__init__.py"))
    np.save("images.npy", np.ones((4, 8, 8, 1), np.uint8))
    seen: dict[str, dict[str, np.ndarray]] = {}
    for kind, text in re.findall(r"```(\w+)\n(.*?)```", DOCUMENT.read_text(), re.S):
        with pytest.MonkeyPatch.context() as patch, quick_gate():
            if kind == "python" or text.rstrip().endswith("--engine tensorrt"):
                use_fake(patch)
                patch.setattr(loading, "CudaMemory", HostMemory)
            if kind == "python":
                exec(text, seen)
                continue
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                assert (program, cli.run(arguments)) == ("saccade", 0), line
    assert seen["answers"]["probabilities"].shape == (4, 10)
    made = {path.name for path in Path("build/digits/engines").iterdir()}
    assert made == {"tensorrt-rtx-8.9", "tensorrt-rtx-8.9+12.0", "tensorrt-8.9"}


def test_every_key_of_a_manifest_is_explained() -> None:
    table = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", DOCUMENT.read_text(), re.M)
    explained = {name for names in table for name in re.findall(r"`(\w+)`", names)}
    assert set(EngineManifest.__dataclass_fields__) <= explained
