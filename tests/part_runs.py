# SPDX-License-Identifier: Apache-2.0
"""Short runs of every family in float64, alone or as one of two processes, to be compared."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import labelled_sets
import language_sets
import numpy as np
import torch
from support.models.sizes import TINY, TOWERS

from saccade.core.errors import SaccadeError
from saccade.models.captioner.training import CaptionTask
from saccade.models.data.listops import listops
from saccade.models.entry import imported
from saccade.models.families import entry_of
from saccade.models.nac.training.recipes import DIGITS
from saccade.models.training import loop, parts, train
from saccade.models.training.options import TrainOptions
from saccade.models.training.processes import ALONE, Group, from_the_first, joined
from saccade.models.training.start import started
from saccade.models.training.train import Follower
from saccade.serving.commands import cli

MODELS = "saccade.models."
STEPS = 2
_SPLITS = {"train2014": 9, "val2014": 3}
OWN: dict[str, Callable[[Path], Path | str]] = {  # write the user's data into a folder
    "vqa": lambda place: language_sets.vqa(place, _SPLITS),
    "coco": lambda place: language_sets.coco(place, _SPLITS),
    "class folders": lambda place: labelled_sets.class_folders(place, labelled_sets.noise(8)),
}
FEW_SCENES = {"scenes": 24, "singles": 12, "validate_scenes": 4, "report_scenes": 4}
FEW_CAPTIONS = {"scenes": 24, "singles": 12, "validate_images": 2, "report_images": 2}


@dataclass(frozen=True)
class Case:
    """A short run: its family and options, fields of its recipe, constants that are smaller."""

    family: str
    set: dict[str, Any]
    recipe: dict[str, Any] = field(default_factory=dict)
    smaller: dict[str, Any] = field(default_factory=dict)  # "module:name" -> value
    data: str | None = None
    noise: dict[str, Any] = field(default_factory=dict)  # further fields of `set`
    own: str = ""  # key in OWN
    batch: int = 6
    has_norms: bool = False
    has_blocks: bool = True

    @property
    def module(self) -> str:
        """Return the module of the task."""
        if self.data == "listops":
            return f"{MODELS}nac.training.listops"
        return entry_of(self.family).training.partition(":")[0]


_NAC = {"modules": 6, "dim": 12, "code_dim": 8, "signature_dim": 4, "ffn_dim": 16}
_NAC |= {"kernel_draw": "none"}
_SOT = {"dim": 12, "layers": 1, "heads": 2, "mlp_dim": 16, "pool_heads": 2, "m": 4, "n": 4}
_FEW_IMAGES = {
    "sot.training:VALIDATION": 4,
    "sot.training:CALIBRATION": 4,
    "sot.training:SCENE_PX": 16,
}
CASES = {
    # The epoch of 998 digits has batches of two sizes, so parts differ too.
    "nac": Case(
        "nac",
        _NAC | {"initial_state": "linear"},
        noise={"drop_path": 0.3, "code_noise": 0.2, "kernel_draw": "sample", "state_noise": True},
        smaller={
            "nac.training.recipes:DIGITS": replace(
                DIGITS, extra=DIGITS.extra | {"validate_count": 8}
            )
        },
        data="digits",
        batch=7,
    ),
    "nac, listops": Case(
        "nac",
        _NAC | {"max_tokens": 16, "local_layers": 1},
        {"ema": 0.9, "extra": {"validate_count": 8}},
        {"nac.training.listops:FIXED_TRAIN": 16, "nac.training.listops:listops": cache(listops)},
        data="listops",
    ),
    "sparo": Case(
        "sparo",
        TOWERS | {"height_px": 16, "width_px": 16},
        {"extra": {"scenes": 24, "validation_images": 6}},
    ),
    "sot": Case("sot", _SOT | {"patch_px": 4}, {"ema": 0.9}, _FEW_IMAGES),
    "sot, norms": Case(
        "sot",
        _SOT | {"token_embedding": "resnet", "patch_px": 8},
        smaller=_FEW_IMAGES,
        has_norms=True,
    ),
    # Each process reads its own images, and one more that is mixed into its first one.
    "sot, own images": Case(
        "sot",
        _SOT | {"patch_px": 8},
        {"augment": ("crop", "flip"), "mixup": 0.8},
        {"data.samples.images:KEPT_BYTES": 0, **_FEW_IMAGES},
        own="class folders",
        batch=7,
    ),
    "slot-attention": Case(
        "slot-attention",
        TINY["slot-attention"] | {"side_px": 14},
        {"extra": {"validation": 4}},
        has_blocks=False,
    ),
    "vqa": Case(
        "vqa",
        TINY["vqa"] | {"height_px": 16, "width_px": 16},
        {"extra": FEW_SCENES | {"questions": 3}},
        noise={"dropout": 0.3},
    ),
    "vqa, own": Case("vqa", TINY["vqa"], own="vqa"),
    "captioner": Case(
        "captioner",
        TINY["captioner"]
        | {"height_px": 24, "width_px": 24, "grid_height": 4, "grid_width": 4}
        | {"widths": [4, 8], "strides": [3, 2]},
        {"extra": FEW_CAPTIONS},
        has_norms=True,
        has_blocks=False,
    ),
    "captioner, own": Case(
        "captioner", TINY["captioner"], own="coco", has_norms=True, has_blocks=False
    ),
}


@contextmanager
def data_of(case: Case) -> Iterator[str | None]:
    """The name of the case's data, or a folder of the user's while it is read."""
    if not case.own:
        yield case.data
        return
    with TemporaryDirectory() as folder:
        yield str(OWN[case.own](Path(folder, case.own)))


@contextmanager
def made_smaller(case: Case) -> Iterator[None]:
    """Change the constants and the recipe that decide how much data a task draws."""
    module = import_module(case.module)
    with ExitStack() as stack:
        if case.recipe:
            quick = module.QUICK
            recipe = case.recipe | {"extra": quick.extra | case.recipe.get("extra", {})}
            stack.enter_context(patch.object(module, "QUICK", replace(quick, **recipe)))
        for place, value in case.smaller.items():
            module, _, name = place.partition(":")
            stack.enter_context(patch.object(import_module(MODELS + module), name, value))
        yield


def run(
    name: str,
    group: Group = ALONE,
    *,
    kind: torch.dtype = torch.float64,
    stop_after: int = 0,
    noisy: bool = False,
    **changes: Any,
) -> dict[str, np.ndarray]:
    """Return weights, losses and scores after a few steps, interrupted after `stop_after`."""
    case = CASES[name]
    options = TrainOptions(
        Path("unused.safetensors"), set=case.set, steps=STEPS, batch=case.batch, side_px=16
    )
    torch.manual_seed(0)
    changes |= {"set": case.set | case.noise} if noisy else {}
    with made_smaller(case), data_of(case) as data:
        options = replace(options, data=data, **changes)
        this = new_run(case, options, kind, group)
        for step in range(STEPS):
            if stop_after and step == stop_after:
                state = deepcopy(this.state())
                torch.manual_seed(5)
                this = new_run(case, options, kind, group)
                this.restore(state)
            this.step()
            this.after_step(lambda *_, **__: None)
    found = {key: value.numpy() for key, value in this.best_weights.items()}
    # AdamW and the limit of their norm hide the scale of gradients.
    for key, x in this.task.model.named_parameters():
        found[f"gradient of {key}"] = (torch.zeros_like(x) if x.grad is None else x.grad).numpy()
    found |= {"losses": np.array([row["loss"] for row in this.log.rows])}
    return found | {"best": np.array([this.best_step, this.best_score])}


def new_run(case: Case, options: TrainOptions, kind: torch.dtype, group: Group) -> loop.Run:
    """Begin a run with numbers of that type, validated after the last step."""
    options = started(case.family, options, partial(from_the_first, group))
    task = imported(entry_of(case.family).training)(options)
    task.recipe = replace(task.recipe, warm_up_steps=1, validate_every=STEPS, clip_norm=1e6)
    for module in (task.model, task.auxiliary):
        if module is not None:
            module.to(kind)
    return loop.Run(task, options, group)


def difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Return the greatest difference of two runs, relative to the size of each array."""
    assert one.keys() == other.keys()
    return max(
        float(np.abs(one[name] - other[name].astype(float)).max() / (np.abs(one[name]).max() + 1))
        for name in one
        if one[name].size
    )


def noise_of(group: Group) -> dict[str, np.ndarray]:
    """Return a number that each process would draw next after a run with dropout."""
    run("vqa", group, noisy=True)
    return {"drawn": parts.gathered(group, torch.rand(1), group.size).numpy()}


def without_gradients(group: Any, x: Any, total: int) -> Any:
    """Gather codes as constants."""
    return gathered(group, x.detach(), total)


gathered = parts.gathered
# What both processes do, in this order; the broken ones must not give the result of one process.
SHARED: dict[str, Callable[[Group], dict[str, np.ndarray]]] = {
    **{name: partial(run, name) for name in CASES},
    "sparo in micro-batches": partial(run, "sparo", accumulate=3),
    "vqa, all at once": partial(run, "vqa", accumulate=2, checkpoint_activations=True),
    "nac, noisy": partial(run, "nac", noisy=True),
    "nac, resumed": partial(run, "nac", noisy=True, stop_after=1),
    "noise": noise_of,
    "sot in bfloat16": partial(
        run, "sot", kind=torch.float32, precision="bf16", checkpoint_activations=True
    ),
}
BROKEN: dict[str, tuple[str, Any, str, Any]] = {
    "gradients are not added up": ("sot", parts, "sum_gradients", lambda group, some, value: value),
    "each part has its own mean": ("captioner", CaptionTask, "weight", lambda task, part: 1),
    "batch norms see their part": ("sot, norms", parts, "_trained_norms", lambda model: []),
    "codes of others have no gradient": ("sparo", parts, "gathered", without_gradients),
}


def shared(group: Group) -> dict[str, dict[str, np.ndarray]]:
    """Return what every run of SHARED and BROKEN gives in that group."""
    found = {name: work(group) for name, work in SHARED.items()}
    for name, (case, place, broken, instead) in BROKEN.items():
        with patch.object(place, broken, instead):
            found[name] = run(case, group)
    return found


def main(request: Follower) -> bool | str:
    """Do the second process's part in what a test does; it names the part as the family."""
    what, _, family = request.family.partition(": ")
    torch.set_num_threads(1)
    if what == "train":
        return train.main(replace(request, family=family))
    if what == "launched":
        return launched(*json.loads(request.options))
    with joined(request.group, "cpu") as group:
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "fails":
            raise SaccadeError("row 12,345: found no image.")
        shared(group)
    return True


def launched(words: list[str], port: str, code: int) -> str:
    """Run a command as the second process of a launcher, and return what it prints."""
    output = StringIO()
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with patch.dict(os.environ, place), redirect_stdout(output), redirect_stderr(output):
        try:
            found = cli.run(words)
        except SystemExit as end:
            found = int(str(end.code or 0))
    return output.getvalue() if found == code else f"exit code {found}: {output.getvalue()}"
