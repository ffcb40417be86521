# SPDX-License-Identifier: Apache-2.0
"""Training of a NAC on the characters of ListOps: endless new expressions, and their parts."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.models.data.listops import (
    CLASS_NAMES,
    VOCABULARY,
    Expressions,
    Grammar,
    as_bytes,
    draw,
    listops,
    most_bytes,
    most_tokens,
)
from saccade.models.nac.model import NAC
from saccade.models.nac.training.circuit_task import CircuitTask
from saccade.models.nac.training.recipes import LISTOPS
from saccade.models.training.options import TrainOptions, chosen_recipe
from saccade.models.training.task import Task

CALIBRATION, FIXED_TRAIN = 512, 2_000  # from the training split's fixed draw, whose hash is stored

QUICK = LISTOPS
SHIPPED = replace(QUICK, steps=10_000, validate_every=500)


def task(options: TrainOptions) -> Task:
    """Train a NAC on listops; `--set` accepts max_tokens, depth and arguments of the grammar.

    With `--set input=bytes`, it reads their text, and max_tokens is its length in bytes.

    Raises: SaccadeError if other data is named, or a value is out of range.
    """
    if options.data != "listops":
        raise SaccadeError(f"data '{options.data}' is not listops. Pass --data listops.")
    return ListOpsTask(options)


class ListOpsTask(CircuitTask):
    """A `CircuitTask`: each step draws new expressions of the training split."""

    data, labels = "listops", CLASS_NAMES
    undivided = (*CircuitTask.undivided, "lists_share")
    at_once = 250

    def __init__(self, options: TrainOptions) -> None:
        recipe = chosen_recipe(options, quick=QUICK, shipped=SHIPPED)
        known = ("depth", "arguments")
        sizes = {name: options.set[name] for name in known if name in options.set}
        kind = options.value("input", "characters")
        if kind not in ("characters", "bytes"):
            raise SaccadeError(
                f"--set input={kind}: listops are expressions, which are read as characters or "
                "bytes. Leave it out, or pass other --data."
            )
        if (sets := options.value("input_sets", 1)) != 1:
            raise SaccadeError(
                f"--set input_sets={sets}: listops are single expressions. Leave it out, or pass "
                "--data with pairs."
            )
        most = options.value("max_tokens", 0)
        self.text = kind == "bytes"
        tokens = most_tokens(most) if self.text else most
        self.grammar = Grammar(max_tokens=tokens if most else 100, **sizes)
        self.most = most or (most_bytes(100) if self.text else 100)
        given = {
            "input": "bytes" if self.text else "characters",
            "vocabulary": () if self.text else VOCABULARY,
            "max_tokens": self.most,
            "classes": len(CLASS_NAMES),
        }
        super().__init__(options, recipe, given, known)
        self.auxiliary = ListValues(self.model)
        self.training = self._read(listops("train", FIXED_TRAIN, grammar=self.grammar))
        validation = self._read(listops("validation", grammar=self.grammar))
        self.data_sha256 = {"train": self.training.sha256, "validation": validation.sha256}
        labels, kept = validation.labels, slice(CALIBRATION)
        self.scored = (validation.characters, validation.length), labels
        self.ranked = (self.training.characters[kept], self.training.length[kept])
        self.card = {
            "grammar": vars(self.grammar),
            "validation_samples": len(labels),
            "majority": float(np.bincount(labels).max() / len(labels)),
        }

    def batch(self, step: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Return characters and values [b n], length and labels [b]; n is the greatest length."""
        drawn = self._read(draw(rng, self.recipe.batch, split="train", grammar=self.grammar))
        longest = int(drawn.length.max())
        batch = {
            "characters": torch.from_numpy(drawn.characters[:, :longest]),
            "values": torch.from_numpy(drawn.values[:, :longest]),
            "length": torch.from_numpy(drawn.length),
            "labels": torch.from_numpy(drawn.labels),
        }
        return batch | self.modules(step, rng)

    def loss(self, batch: dict[str, Tensor], step: int) -> Tensor:
        """Return the loss of the answer, the graph prior, and the value of each list."""
        logits = self.model(batch["characters"], batch["length"], modules=batch.get("modules"))
        loss = self.with_graph_prior(F.cross_entropy(logits, batch["labels"]))
        if self.extra["values_weight"]:
            share = batch.get("lists_share", 1.0)
            loss = loss + self.extra["values_weight"] * share * self.auxiliary.loss(batch["values"])
        return loss

    def _read(self, drawn: Expressions) -> Expressions:
        """Return the expressions as the model reads them."""
        return as_bytes(drawn, self.most) if self.text else drawn

    def part(self, batch: Any, index: int, count: int) -> Any:
        """Return a part, whose mean over lists counts as much as it has lists per expression."""
        part = super().part(batch, index, count)
        lists, whole = (float((each["values"] >= 0).double().mean()) for each in (part, batch))
        return part | {"lists_share": batch.get("lists_share", 1.0) * torch.tensor(lists / whole)}

    def calibration(self) -> dict[str, np.ndarray]:
        """Return 512 training expressions with their answers."""
        names = ("characters", "length", "labels")
        found = {name: getattr(self.training, name)[:CALIBRATION] for name in names}
        return {"bytes" if self.text and name == names[0] else name: found[name] for name in found}


class ListValues(nn.Module):
    """A linear head, only for training, that predicts the value of the list that closes here.

    It reads the closing brackets' tokens after the tokenizer, whose convolutions see some positions
    around them; nested lists are usually longer than that.
    """

    def __init__(self, model: NAC) -> None:
        super().__init__()
        self.head = nn.Linear(model.config.tokens_width, len(CLASS_NAMES))
        self._tokens: Tensor | None = None
        self._hook = model.tokenizer.register_forward_hook(self._remember)

    def _remember(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._tokens = output

    def loss(self, values: Tensor) -> Tensor:
        """Return the loss of the model's latest forward pass.

        Shapes: values [b n], -1 where no list closes -> scalar.
        """
        assert self._tokens is not None
        return F.cross_entropy(
            self.head(self._tokens).flatten(0, 1), values.flatten(), ignore_index=-1
        )

    def detach(self) -> None:
        """Remove the hook from the model."""
        self._hook.remove()
