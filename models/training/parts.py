# SPDX-License-Identifier: Apache-2.0
"""The gradients of a batch in parts, one per process or one after the other.

Each part's loss has its share of the mean, batch norms use the statistics of all processes, and a
loss that compares samples gets the codes of all of them. So without noise the sum is that of one
pass over the batch. Noise, such as dropout, is drawn by each part.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from saccade.core.errors import SaccadeError
from saccade.models.training.processes import Group, ProcessLost
from saccade.models.training.task import BatchImages, ComparingTask, Task, share_of, with_pixels


@dataclass(frozen=True)
class Gradients:
    """Adds a batch's gradients to those of the task's parameters, and returns its loss.

    With `accumulate` above 1, each process passes its rows through the model in that many parts. A
    loss that compares samples keeps only the codes of the parts; the gradients pass each part again
    with the same noise.

    Source: of the second pass, Gao et al. 2021 (arXiv 2101.06983).
    """

    task: Task
    group: Group
    autocast: Callable[[], AbstractContextManager[Any]]
    move: Callable[[Any], Any]  # of a batch to the model's device
    accumulate: int
    blocks: Sequence[nn.Module] = ()  # their activations are computed again

    def __call__(self, batch: Any, step: int) -> float:
        """Return the loss of the whole batch, the same in every process.

        Raises: SaccadeError if the batch is too small, ProcessLost if another process has ended.
        """
        count, samples = self.group.size * self.accumulate, self.task.samples(batch)
        if samples < count:
            raise SaccadeError(
                f"found a batch of {samples} samples, expected at least {count}: one for each "
                "process and micro-batch. Raise --batch, or lower --processes or --accumulate."
            )
        own = with_pixels(self._cut(batch, self.group.size)[self.group.rank])
        parts = self._cut(own, self.accumulate)
        with changed_layers(self.task.model, self.blocks, self.group):
            if isinstance(self.task, ComparingTask) and count > 1:
                value = self._compared(self.task, batch, parts, step)
            else:
                value = self._means(parts, step)
        return sum_gradients(self.group, _parameters(self.task), value)

    def _cut(self, batch: Any, count: int) -> list[Any]:
        if count == 1:
            return [batch]
        return [self.task.part(batch, index, count) for index in range(count)]

    def _means(self, parts: Sequence[Any], step: int) -> float:
        weights = torch.tensor([self.task.weight(part) for part in parts], dtype=torch.float64)
        shares = weights / all_sum(self.group, weights.sum())
        value = 0.0
        for part, share in zip(parts, shares.tolist(), strict=True):
            batch = self.move(part)
            with self.autocast():
                loss = self.task.loss(batch, step)
            torch.autograd.backward(loss if share == 1 else loss * share)
            value += loss.item() * share
        return value

    def _compared(self, task: ComparingTask, batch: Any, parts: Sequence[Any], step: int) -> float:
        total, size = task.samples(batch), self.group.size
        known = {name: x for name, x in batch.items() if not isinstance(x, BatchImages)}
        with self.autocast():
            codes = zip(*(self._codes(task, part) for part in parts), strict=True)
            every = tuple(gathered(self.group, torch.cat(code), total) for code in codes)
            loss = task.compare(every, self.move(known), step)
        # Every process computes the whole loss, so each takes the same share of its gradient.
        torch.autograd.backward(loss / size)
        return loss.item() / size

    def _codes(self, task: ComparingTask, part: Any) -> Any:
        batch = self.move(part)
        if self.accumulate == 1:
            return task.codes(batch)
        return checkpoint(task.codes, batch, use_reentrant=False)


def _parameters(task: Task) -> Iterator[nn.Parameter]:
    yield from task.model.parameters()
    if task.auxiliary is not None:
        yield from task.auxiliary.parameters()


# --- sums over all processes ----------------------------------------------------------------------


def _reduced(x: Tensor) -> Tensor:
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        raise ProcessLost from error
    return x


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return _reduced(x.clone())

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return _reduced(gradients[0].clone())


def all_sum(group: Group, x: Tensor) -> Tensor:
    """Return the sum over all processes, with its gradient.

    Raises: ProcessLost.
    """
    if group.size == 1:
        return x
    total: Tensor = _AllSum.apply(x)
    return total


def gathered(group: Group, x: Tensor, total: int) -> Tensor:
    """Return the rows of all processes, with their gradient.

    Shapes: x [n ...], this process's rows of a batch -> [total ...].
    Raises: ProcessLost.
    """
    own = share_of(total, group.rank, group.size)
    zeros = [x.new_zeros((count, *x.shape[1:])) for count in (own.start, total - own.stop)]
    return all_sum(group, torch.cat((zeros[0], x, zeros[1])))


def sum_gradients(group: Group, parameters: Iterable[nn.Parameter], value: float) -> float:
    """Replace each gradient by its sum over all processes, and return the sum of the values.

    Raises: ProcessLost.
    """
    if group.size == 1:
        return value
    gradients = [each.grad for each in parameters if each.grad is not None]
    count = sum(gradient.numel() for gradient in gradients)
    # On the CPU, where a process that has ended is noticed immediately.
    total, counts = _reduced(torch.tensor([value, count], dtype=torch.float64)).tolist()
    assert counts == count * group.size, "the processes have gradients of different parameters"
    for kind in dict.fromkeys(gradient.dtype for gradient in gradients):
        same = [gradient for gradient in gradients if gradient.dtype == kind]
        flat = _reduced(torch.cat([gradient.flatten() for gradient in same]))
        for gradient, summed in zip(same, flat.split([x.numel() for x in same]), strict=True):
            gradient.copy_(summed.view_as(gradient))
    return float(total)


# --- layers that a batch in parts changes ---------------------------------------------------------


@contextmanager
def changed_layers(model: nn.Module, blocks: Sequence[Any], group: Group) -> Iterator[None]:
    """Recompute these blocks for gradients, and give batch norms the statistics of all processes.

    The modules are as before after the block, because validation copies them.
    """
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    norms: list[Any] = [] if group.size == 1 else _trained_norms(model)
    for norm in norms:
        norm.forward = partial(_normalized, group, norm)
    try:
        yield
    finally:
        for module in (*blocks, *norms):
            del module.forward


def _trained_norms(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if isinstance(each, _BatchNorm) and each.training]


def _normalized(group: Group, norm: Any, x: Tensor) -> Tensor:
    """Normalize with the statistics of all processes: torch's SyncBatchNorm does so on GPUs only.

    Shapes: x [b c ...] -> same.
    """
    axes, shape = [0, *range(2, x.dim())], [1, -1, *(1 for _ in range(2, x.dim()))]
    wide = x.to(norm.running_var.dtype)
    count = wide.new_tensor([x.numel() / x.shape[1]])
    sums = all_sum(group, torch.cat((wide.sum(axes), count)))
    total = sums[-1].detach()
    mean = sums[:-1] / total
    centered = wide - mean.view(shape)
    variance = all_sum(group, centered.square().sum(axes)) / total
    with torch.no_grad():
        norm.num_batches_tracked += 1
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(variance * total / (total - 1), norm.momentum)
    scaled = centered * (norm.weight * (variance + norm.eps).rsqrt()).view(shape)
    return (scaled + norm.bias.view(shape)).to(x.dtype)


def check_norms(model: nn.Module) -> None:
    """Refuse micro-batches for a model with batch norms in training.

    Raises: SaccadeError naming the first one.
    """
    norms = _trained_norms(model)
    if norms:
        name = next(name for name, module in model.named_modules() if module is norms[0])
        raise SaccadeError(
            f"--accumulate: found the batch norm '{name}', whose statistics are those of the "
            "whole batch, which micro-batches do not have. Use --processes, which share them, "
            "or a smaller --batch; or keep that part with --init and --freeze."
        )


def blocks_of(model: Any) -> list[nn.Module]:
    """Return the blocks of the model whose activations can be computed again.

    Raises: SaccadeError if it has none.
    """
    found = [module for module in model.modules() if isinstance(module, model.repeated_blocks)]
    if not found:
        raise SaccadeError(
            "--checkpoint-activations: found no repeated blocks in this model, expected the "
            "layers of a transformer. Leave it out; --accumulate needs less memory, too."
        )
    return found
