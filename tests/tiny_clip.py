# SPDX-License-Identifier: Apache-2.0
"""A folder of a random CLIP as transformers saves it, with merges, so that it reads any text."""

import json
import shutil
from pathlib import Path

import torch
from places import TESTS
from safetensors.torch import load_file, save_file

MERGES = ("r e", "re d</w>", "b l", "c i", "a n", "an d</w>")
CONTEXT = 40
_TEXT = "text_model.embeddings."


def tiny_clip(place: Path) -> tuple[Path, Path]:
    """The folder, and the file of its merges for `--vocabulary`."""
    folder = shutil.copytree(TESTS / "golden" / "hugging_face" / "clip", place / "tiny-clip")
    size = 514 + len(MERGES)
    content = json.loads((folder / "config.json").read_text())
    content["text_config"] |= {
        "vocab_size": size,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": size - 2,
        "eos_token_id": size - 1,
    }
    (folder / "config.json").write_text(json.dumps(content))
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    width = tensors[f"{_TEXT}token_embedding.weight"].shape[1]
    tensors[f"{_TEXT}token_embedding.weight"] = torch.randn(size, width)
    tensors[f"{_TEXT}position_embedding.weight"] = torch.randn(CONTEXT, width)
    for name in [name for name in tensors if name.endswith("position_ids")]:
        tensors[name] = torch.arange(CONTEXT)[None] if "text" in name else tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    merges = place / "merges.txt"
    merges.write_text("#version: 0.2\n" + "\n".join(MERGES))
    return folder, merges
