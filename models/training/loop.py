# SPDX-License-Identifier: Apache-2.0
"""The training loop: turn a task's batches and losses into its best weights."""

import csv
import io
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.core.checks import check_one_of
from saccade.core.errors import SaccadeError
from saccade.core.files import write_atomically
from saccade.core.json_text import parse_json
from saccade.core.progress import Advance, progress_of
from saccade.models.torch_file import load_torch
from saccade.models.training.options import TrainOptions
from saccade.models.training.parts import Gradients, blocks_of, check_norms
from saccade.models.training.processes import ALONE, Group
from saccade.models.training.regularization import rate_factors
from saccade.models.training.scalars import Scalars
from saccade.models.training.task import Recipe, Task

VERSION = 1


def write_state(path: Path, state: dict[str, Any], run: dict[str, Any]) -> None:
    """Write the tensors, numbers and strings of a run, and what identifies the run.

    Raises: SaccadeError if the file cannot be written.
    """
    data = io.BytesIO()
    torch.save({"version": VERSION, "run": _text(run), "state": state}, data)
    write_atomically(path, data.getvalue())


def read_state(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Read the state of the same run; nothing in the file is executed.

    Raises: SaccadeError if it is missing, damaged, or from a run with other options.
    """
    if not path.exists():
        raise SaccadeError(
            f"{path}: no such file, so there is no interrupted run to continue "
            "(the state is first saved after one minute). Leave --resume out to start a run."
        )
    try:
        content = load_torch(path)
        version, written, state = content["version"], parse_json(content["run"]), content["state"]
        if not (isinstance(written, dict) and isinstance(state, dict)):
            raise ValueError("no run with its state")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise SaccadeError(
            f"{path}: found a damaged file, expected the state of an interrupted run. "
            "Delete it and train again without --resume."
        ) from error
    if version != VERSION:
        raise SaccadeError(
            f"{path}: found state version {version}, expected {VERSION}. "
            "Resume with the version of saccade that wrote it, or start again with --force."
        )
    wanted = json.loads(_text(run))
    differing = sorted(
        key for key in written.keys() | wanted.keys() if written.get(key) != wanted.get(key)
    )
    if differing:
        raise SaccadeError(
            f"{path}: the state is from another run: {', '.join(differing)} differ. Use the "
            "options of the interrupted run (--threads, --force and --log-to may differ), or start "
            "again with --force."
        )
    return state


def _text(run: dict[str, Any]) -> str:
    return json.dumps(run, sort_keys=True, default=repr)


SAVE_EVERY_S = 60.0  # between two saved states
VALIDATIONS, ROWS = 10, 100  # per run: validations by default, rows of the log
LEADING = ("step", "loss", "learning_rate", "seconds")
SCHEDULES = ("cosine", "trapezoid")


class TrainingLog:
    """The log of a run: rows in memory, written whole, so that a reader never sees half a line.

    The loss of a row is the mean over the steps since the previous row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, float]] = []

    def add(self, row: dict[str, float], scores: dict[str, float]) -> None:
        """Add a row: the leading columns, and the scores if the step was validated."""
        self.rows.append(row | scores)

    def write(self) -> None:
        """Bring the file up to date.

        Raises: SaccadeError if it cannot be written.
        """
        write_atomically(self.path, self.content())

    def content(self) -> bytes:
        """Return the table as CSV."""
        scores = dict.fromkeys(key for row in self.rows for key in row if key not in LEADING)
        text = io.StringIO()
        table = csv.DictWriter(text, (*LEADING, *scores), restval="", lineterminator="\n")
        table.writeheader()
        for row in self.rows:
            table.writerow({key: f"{value:.10g}" for key, value in row.items()})
        return text.getvalue().encode()


@dataclass(frozen=True)
class FitResult:
    """Result of a run; the chosen weights are in the task's model."""

    best_step: int
    seconds: float  # of training and validation, over all sessions of a resumed run
    log: TrainingLog  # to write next to the checkpoint
    last_weights: Mapping[str, Tensor]  # those that the last step was validated with


def fit(task: Task, options: TrainOptions, group: Group = ALONE) -> FitResult:
    """Train the task's model and leave the weights of the best validated step in it.

    The state of the run is saved next to `options.out` once a minute, by the first process of the
    group. Remove it after the checkpoint is written.

    Raises: SaccadeError if the loss is not finite, or the state to resume from cannot be used.
    """
    run = Run(task, options, group)
    recipe = task.recipe
    if options.resume:
        run.restore(read_state(options.state_path, run.identity))
    progress = progress_of(f"train {task.family} on {task.data}", recipe.steps)
    with run.scalars, progress as advance:
        advance(run.done)
        while run.done < recipe.steps:
            run.step()
            advance()
            run.after_step(advance)
    with run.averaged():
        last_weights = _copied(task.model.state_dict())
    task.model.load_state_dict(run.best_weights)
    task.model.eval()
    return FitResult(run.best_step, run.seconds(), run.log, last_weights)


class Run:
    """One run: everything that changes from step to step, and how to save and restore it."""

    def __init__(self, task: Task, options: TrainOptions, group: Group = ALONE) -> None:
        recipe = task.recipe
        check_one_of("recipe: schedule", recipe.schedule, SCHEDULES)
        self.task, self.options, self.recipe, self.group = task, options, recipe, group
        self.device = torch.device(options.device)
        task.model.to(self.device)
        train_mode(task.model)
        self.auxiliary: nn.Module | None = task.auxiliary
        named = list(task.model.named_parameters())
        if self.auxiliary is not None:
            named += list(self.auxiliary.to(self.device).train().named_parameters())
        self.optimizer = adamw(recipe, named, layers=task.model.parameter_layers())
        self.average = ParameterAverage(task.model, recipe.ema) if recipe.ema else None
        self.stateful: dict[str, Any] = {"model": task.model, "optimizer": self.optimizer}
        self.stateful |= {"auxiliary": self.auxiliary} if self.auxiliary is not None else {}
        self.stateful |= {"average": self.average} if self.average is not None else {}
        self.rng = np.random.default_rng(options.seed)
        self.log = TrainingLog(options.log_path)
        self.done, self.best_step, self.best_score = 0, 0, -math.inf
        self.best_weights = _copied(task.model.state_dict())
        self.losses: list[float] = []  # since the last row of the log
        self.begin = self.kept = time.monotonic()
        self.identity = _identity(task, options, group)
        self.gradients = self._gradients()
        logs = () if group.rank else options.log_to
        self.scalars = Scalars(options, logs, json.loads(_text(self.identity)))

    def averaged(self) -> AbstractContextManager[None]:
        """Give the model the weights to validate and save inside the block."""
        return nullcontext() if self.average is None else self.average.in_place()

    def seconds(self) -> float:
        """Return the seconds since the run began, without the time between its sessions."""
        return time.monotonic() - self.begin

    def step(self) -> None:
        """Take one optimizer step.

        Raises: SaccadeError if the loss is not finite.
        """
        batch = self.task.batch(self.done, self.rng)
        if self.group.rank:  # its own noise; the state of the first process is enough to resume
            place = (self.options.seed, self.group.rank, self.done)
            torch.manual_seed(int(np.random.default_rng(place).integers(2**62)))
        rate = rate_at(self.recipe, self.done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("factor", 1.0)  # states of older runs have none
        self.optimizer.zero_grad()
        value = self.gradients(batch, self.done)
        if not math.isfinite(value):
            raise SaccadeError(
                f"the loss is {value} at step {self.done + 1}, expected a finite number. "
                f"Lower --learning-rate (it was {rate:.3g}), or check the data."
            )
        if self.recipe.clip_norm:
            nn.utils.clip_grad_norm_(self.task.model.parameters(), self.recipe.clip_norm)
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        self.losses.append(value)
        self.done += 1

    def after_step(self, advance: Advance) -> None:
        """Validate, add to the log and save the state when each is due."""
        every = self.recipe.validate_every or max(1, self.recipe.steps // VALIDATIONS)
        last = self.done == self.recipe.steps
        scores: dict[str, float] = {}
        if self.done % every == 0 or last:
            scores = self._validate()
            name, score = next(iter(scores.items()))
            advance(0, note=f"step {self.done}: {name} {score:.4g}")
        if scores or self.done % max(1, self.recipe.steps // ROWS) == 0:
            row = {
                "step": self.done,
                "loss": sum(self.losses) / len(self.losses),
                "learning_rate": rate_at(self.recipe, self.done - 1),
                "seconds": round(self.seconds(), 1),
            }
            self.log.add(row, scores)
            self.scalars.add(row, scores)
            self.losses = []
        due = time.monotonic() - self.kept >= SAVE_EVERY_S
        if due and not last and not self.group.rank:
            write_state(self.options.state_path, self.state(), self.identity)
            self.log.write()
            self.kept = time.monotonic()

    def _validate(self) -> dict[str, float]:
        model = self.task.model.eval()
        # Random draws of the validation must not change how training continues.
        with self.averaged(), torch.no_grad(), torch.random.fork_rng(devices=gpus(self.device)):
            scores = self.task.validate()
            score = next(iter(scores.values()))
            if score >= self.best_score or not self.best_step:
                self.best_score, self.best_step = score, self.done
                self.best_weights = _copied(model.state_dict())
        train_mode(model)
        return scores

    def _gradients(self) -> Gradients:
        options = self.options
        if options.accumulate > 1:
            check_norms(self.task.model)
        blocks = blocks_of(self.task.model) if options.checkpoint_activations else ()
        move = partial(moved, device=self.device)
        return Gradients(
            self.task, self.group, self._autocast, move, options.accumulate, tuple(blocks)
        )

    def _autocast(self) -> Any:
        gpu = self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        if (self.recipe.precision or ("bf16" if gpu else "fp32")) == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def state(self) -> dict[str, Any]:
        """Return everything that `restore` needs, as tensors, numbers and strings."""
        state = {name: part.state_dict() for name, part in self.stateful.items()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state | {
            "done": self.done,
            "best": (self.best_step, self.best_score, self.best_weights),
            "numpy": json.dumps(self.rng.bit_generator.state),
            "torch": torch.random.get_rng_state(),
            "log": self.log.rows,
            "losses": self.losses,
            "seconds": self.seconds(),
            "scalars": self.scalars.state(),
            "task": self.task.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue as the run whose `state` this is."""
        for name, part in self.stateful.items():
            part.load_state_dict(state[name])
        self.done = state["done"]
        self.best_step, self.best_score, self.best_weights = state["best"]
        self.rng.bit_generator.state = json.loads(state["numpy"])
        torch.random.set_rng_state(state["torch"])
        self.log.rows, self.losses = state["log"], state["losses"]
        self.begin = time.monotonic() - state["seconds"]
        self.scalars.restore(state.get("scalars", {}), self.done)
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)
        self.task.restore(state.get("task", {}))


def train_mode(model: nn.Module) -> None:
    """Switch to training mode, except for norms whose parameters are frozen."""
    model.train()
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        counted = isinstance(getattr(module, "running_mean", None), Tensor)
        if counted and own and not any(parameter.requires_grad for parameter in own):
            module.eval()


def moved(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move the tensors of a batch to that device."""
    return {name: x.to(device, non_blocking=True) for name, x in batch.items()}


def gpus(device: torch.device) -> list[int]:
    """Return the GPUs whose random state a run uses."""
    return [torch.cuda.current_device()] if device.type == "cuda" else []


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().clone() for key, value in weights.items()}


def _identity(task: Task, options: TrainOptions, group: Group) -> dict[str, Any]:
    config: Any = task.model.config
    # Absent if not given, so that earlier states still fit.
    started: dict[str, Any] = {} if options.start is None else {"--init": options.start.sha256}
    parts = {"--processes": group.size, "--accumulate": options.accumulate}
    started |= {name: count for name, count in parts.items() if count > 1}
    if options.given_trunk is not None:
        started["--trunk"] = options.given_trunk.origin.sha256
    if options.freeze:
        started["--freeze"] = ",".join(sorted(options.freeze))
    return started | {
        "family": task.family,
        "recipe": asdict(task.recipe),
        "configuration": config.to_dict(),
        "data": dict(task.data_sha256),
        "--seed": options.seed,
        "--device": options.device,
    }


def adamw(
    recipe: Recipe,
    named: list[tuple[str, nn.Parameter]],
    *,
    layers: Sequence[Sequence[str]] = (),
) -> torch.optim.AdamW:
    """Create the optimizer: matrices decay; vectors, and what the recipe names, do not.

    With `layer_decay`, each of the `layers` has its own factor on the learning rate.
    """
    used = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    factors = rate_factors(layers, [name for name, _ in used], recipe.layer_decay)
    groups: list[dict[str, Any]] = []
    for factor in sorted(set(factors.values()), reverse=True):
        own = [pair for pair in used if factors[pair[0]] == factor]
        free = [parameter for name, parameter in own if _is_free(name, parameter, recipe)]
        bound = [parameter for name, parameter in own if not _is_free(name, parameter, recipe)]
        groups += [
            {"params": bound, "weight_decay": recipe.weight_decay, "factor": factor},
            {"params": free, "weight_decay": 0.0, "factor": factor},
        ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas, fused=True)


def _is_free(name: str, parameter: Tensor, recipe: Recipe) -> bool:
    return parameter.dim() < 2 or any(part in name for part in recipe.without_decay)


def rate_at(recipe: Recipe, step: int) -> float:
    """Return a step's learning rate (steps from 0): warm-up, then level and down, or a cosine."""
    warm = min(1.0, (step + 1) / max(1, recipe.warm_up_steps))
    left = recipe.steps - step
    if recipe.schedule == "trapezoid":
        falling = recipe.decay_share * recipe.steps
        return recipe.learning_rate * min(warm, left / falling if falling else 1.0, 1.0)
    behind = max(0, step - recipe.warm_up_steps) / max(1, recipe.steps - recipe.warm_up_steps)
    return recipe.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * behind))


class ParameterAverage:
    """Exponential moving average of the parameters; the first updates form a plain mean."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self._named = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        self.weights = {name: parameter.detach().clone() for name, parameter in self._named.items()}

    def state_dict(self) -> tuple[int, dict[str, Tensor]]:
        """Return the number of updates and the averages."""
        return self.updates, self.weights

    def load_state_dict(self, state: tuple[int, Mapping[str, Tensor]]) -> None:
        """Continue with what `state_dict` returned."""
        self.updates, weights = state
        for name, mean in self.weights.items():
            mean.copy_(weights[name])

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current parameters."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, mean in self.weights.items():
            mean.lerp_(self._named[name].detach(), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averaged weights inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, mean in self.weights.items():
            mine = self._named[name]
            kept = mine.detach().clone()
            mine.copy_(mean)
            mean.copy_(kept)
