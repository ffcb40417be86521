# SPDX-License-Identifier: Apache-2.0
"""One server of every family, with policies where a family has them."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from family_folders import family_folder
from joined_repository import join
from policy_files import calibrated_slots, spread, write_policy

from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.server import ServeOptions, Server

FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
LABELS, TEMPLATES = ("red circle", "blue square", "square"), ("a photo of {}", "{}")
FAMILIES = ("sot", "sparo", "slot-attention", "vqa", "captioner")
FOLLOWING = ("sot", "sparo")  # those with a policy of classes
MANY = np.random.default_rng(8).integers(0, 256, (64, 16, 16, 3), dtype=np.uint8)


def options_of(family: str, place: Path) -> dict[str, Any]:
    """Options of its repository; their files are written into `place`."""
    if family != "sparo":
        return {}
    texts = {"labels": LABELS, "templates": TEMPLATES}
    for name, lines in texts.items():
        (place / f"{name}.txt").write_text("\n".join(lines))
    return {name: place / f"{name}.txt" for name in texts}


@contextmanager
def serving(place: Path) -> Iterator[Callable[[str], tuple[Server, Path]]]:
    """Serve all families; by family, the server and the files behind it."""
    folders = {}
    for family in FAMILIES:
        options, folder = options_of(family, place), family_folder(family)
        if family == "sot":  # nothing is as slow as this: it shows what answers say without load
            options |= {"slo_ms": 60_000}
        if family in FOLLOWING:
            folder = shutil.copytree(folder, place / f"{family}-artefacts")
            write_policy(folder)
        if family == "slot-attention":
            folder = shutil.copytree(folder, place / "slots-artefacts")
            calibrated_slots(folder)
            (folder / "frontier.json").unlink()  # only the calibration needs speeds
        folders[family] = folder
        deploy(folder, RepositoryOptions(out=place / family, **options))
        if family in FOLLOWING:
            spread(place / family / family / "1", folder, MANY)
    (place / "all").mkdir()
    joined = join(place / "all", (place / family for family in FAMILIES))
    with Server(joined, ServeOptions(**FREE_PORTS)) as running:
        yield lambda family: (running, folders[family])
