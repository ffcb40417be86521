# SPDX-License-Identifier: Apache-2.0
"""The gradients of a batch in parts, one per process or one after the other: the same sum.

Each part's loss has its share of the mean, noise is drawn for the whole batch
(`layers.batch_rows`), batch norms use the statistics of all processes, and a loss that compares
samples gets the codes of all of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from saccade.core.errors import SaccadeError
from saccade.models.layers.batch_rows import BatchRows, current_rows, rows_of_batch
from saccade.models.training.processes import Group, ProcessLost
from saccade.models.training.task import ComparingTask, Task

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Part:
    """A part of a batch, its rows, and its share of the mean that the loss is."""

    batch: Any
    rows: BatchRows
    share: float


def parts_of(task: Task, batch: Any, count: int) -> list[Part]:
    """Cut a batch into `count` parts that differ by at most one sample.

    Raises: SaccadeError if it has fewer samples.
    """
    samples = task.samples(batch)
    if samples < count:
        raise SaccadeError(
            f"found a batch of {samples} samples, expected at least {count}: one for each process "
            "and micro-batch. Raise --batch, or lower --processes or --accumulate."
        )
    cut = [task.part(batch, index, count) for index in range(count)]
    sizes = [task.rows(part) for part in cut]
    weights = [task.weight(part) for part in cut]
    firsts = [0, *accumulate(sizes)]
    return [
        Part(part, BatchRows(first, size, firsts[-1]), weight / sum(weights))
        for part, first, size, weight in zip(cut, firsts, sizes, weights, strict=False)
    ]


@dataclass(frozen=True)
class Gradients:
    """Adds a batch's gradients to those of the task's parameters, and returns its loss.

    With `accumulate` above 1, each process passes its rows through the model in that many parts. A
    loss that compares samples first gets the codes of all parts without gradients. Then each part
    is passed again, with the gradients of its codes.

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
        count = self.group.size * self.accumulate
        with _recomputed(self.blocks, self.group):
            if count == 1:
                return self._mean(step, Part(batch, BatchRows(0, 1, 1), 1.0))
            parts = parts_of(self.task, batch, count)
            own = parts[self.group.rank * self.accumulate :][: self.accumulate]
            with _OfWholeBatch(self.group):
                if isinstance(self.task, ComparingTask):
                    value = self._compared(self.task, batch, own, step)
                else:
                    value = sum(_each(own, partial(self._mean, step)))
        return sum_gradients(self.group, _parameters(self.task), value)

    def _mean(self, step: int, part: Part) -> float:
        batch = self.move(part.batch)
        with self.autocast():
            loss = self.task.loss(batch, step)
        torch.autograd.backward(loss if part.share == 1 else loss * part.share)
        return loss.item() * part.share

    def _codes(self, task: ComparingTask, part: Part) -> tuple[Tensor, ...]:
        with self.autocast():
            return task.codes(self.move(part.batch))

    def _compared(self, task: ComparingTask, batch: Any, own: list[Part], step: int) -> float:
        rows = BatchRows(own[0].rows.first, sum(part.rows.count for part in own), own[0].rows.total)
        codes = partial(self._codes, task)
        before = _random_states()
        if whole_pass := len(own) == 1:
            found = _each(own, codes)[0]
        else:
            with torch.no_grad():
                by_part = _each(own, codes)
            found = tuple(torch.cat(name).requires_grad_() for name in zip(*by_part, strict=True))
        with self.autocast():
            every = tuple(gathered(self.group, code, rows) for code in found)
            loss = task.compare(every, self.move(batch), step)
        with rows_of_batch(rows if whole_pass else None):
            # Every process computes the whole loss, so each takes the same share of its gradient.
            torch.autograd.backward(loss / self.group.size)
        if not whole_pass:
            after = _random_states()
            _restore(before)
            sizes = [part.rows.count for part in own]
            gradients = zip(*(code.grad.split(sizes) for code in found), strict=True)
            _each(own, lambda part: torch.autograd.backward(codes(part), next(gradients)))
            _restore(after)
        return loss.item() / self.group.size


def _parameters(task: Task) -> Iterator[nn.Parameter]:
    yield from task.model.parameters()
    if task.auxiliary is not None:
        yield from task.auxiliary.parameters()


def _each(parts: Sequence[Part], work: Callable[[Part], Any]) -> list[Any]:
    """Return the result for each part; all of them draw the same numbers for the whole batch."""
    before, answers = _random_states(), []
    for part in parts:
        _restore(before)
        with rows_of_batch(part.rows):
            answers.append(work(part))
    return answers


def _random_states() -> tuple[Tensor, Tensor | None]:
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.random.get_rng_state(), gpu


def _restore(states: tuple[Tensor, Tensor | None]) -> None:
    torch.random.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])


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


def gathered(group: Group, x: Tensor, rows: BatchRows) -> Tensor:
    """Return the rows of all processes, with their gradient.

    Shapes: x [rows.count ...] -> [rows.total ...].
    Raises: ProcessLost.
    """
    after = rows.total - rows.first - rows.count
    zeros = [x.new_zeros((count, *x.shape[1:])) for count in (rows.first, after)]
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


# --- layers whose result depends on the whole batch -----------------------------------------------


class _OfWholeBatch(TorchFunctionMode):
    """Draw dropout for the whole batch, and give batch norms the statistics of all processes."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        if function is F.dropout:
            return _dropout(*arguments, **(named or {}))
        if function is F.batch_norm and self.group.size > 1:
            return _batch_norm(self.group, *arguments, **(named or {}))
        return function(*arguments, **(named or {}))


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    rows = current_rows()
    if not training or p == 0 or rows is None:
        return F.dropout(x, p, training, inplace)
    each = x.shape[0] // rows.count
    # Numbers are drawn in the order of memory, which is the part's.
    order = sorted(range(x.dim()), key=lambda axis: (-x.stride()[axis], axis))
    shape = (each * rows.total, *x.shape[1:])
    ones = x.new_ones([shape[axis] for axis in order])
    kept = F.dropout(ones.permute([order.index(axis) for axis in range(x.dim())]), p)
    return x * kept[each * rows.first : each * (rows.first + rows.count)]


def _batch_norm(
    group: Group,
    x: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return the batch norm with the mean and variance over all processes, as SyncBatchNorm."""
    if not training:
        return F.batch_norm(x, running_mean, running_variance, weight, bias, False, momentum, eps)
    wide = x.float() if x.dtype in _HALF else x
    axes, shape = [0, *range(2, x.dim())], [1, -1, *(1 for _ in range(2, x.dim()))]
    count = wide.new_tensor([x.numel() / x.shape[1]])
    sums = all_sum(group, torch.cat((wide.sum(axes), count)))
    total = sums[-1].detach()
    mean = sums[:-1] / total
    centered = wide - mean.view(shape)
    variance = all_sum(group, centered.square().sum(axes)) / total
    with torch.no_grad():
        if running_mean is not None and running_variance is not None:
            running_mean.lerp_(mean.to(running_mean), momentum)
            running_variance.lerp_((variance * total / (total - 1)).to(running_variance), momentum)
    scaled = centered * (variance + eps).rsqrt().view(shape)
    if weight is not None:
        scaled = scaled * weight.view(shape)
    return (scaled if bias is None else scaled + bias.view(shape)).to(x.dtype)


def check_norms(model: nn.Module) -> None:
    """Refuse micro-batches for a model with batch norms in training.

    Raises: SaccadeError naming the first one.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.training:
            raise SaccadeError(
                f"--accumulate: found the batch norm '{name}', whose statistics are those of the "
                "whole batch, which micro-batches do not have. Use --processes, which share them, "
                "or a smaller --batch; or keep that part with --init and --freeze."
            )


# --- activations that are computed again ----------------------------------------------------------


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


@contextmanager
def _recomputed(blocks: Sequence[Any], group: Group) -> Iterator[None]:
    """Keep only the inputs of these modules, and run them again for gradients; dropout repeats.

    The modules are as before after the block, because validation copies them.
    """

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _OfWholeBatch(group)  # torch computes gradients outside of modes

    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
