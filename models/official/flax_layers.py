# SPDX-License-Identifier: Apache-2.0
"""Layers of Flax as layers of torch: which axes turn, and which tensors join."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from saccade.errors import SaccadeError

if TYPE_CHECKING:
    from torch import Tensor


class Translation:
    """Flax parameters on their way into our keys; remembers where each came from.

    Every method takes our key without `.weight` and `.bias`, and the Flax scope of the layer.
    """

    def __init__(self, tensors: "Mapping[str, Tensor]") -> None:
        self.tensors = tensors
        self.weights: dict[str, Tensor] = {}
        self.names: dict[str, str] = {}

    def has(self, key: str) -> bool:
        """Whether the file has that tensor."""
        return key in self.tensors

    def scope_of(self, end: str, *, within: str) -> str:
        """What stands in front of the one key that ends so.

        Raises: SaccadeError if there is none.
        """
        for key in self.tensors:
            if key.startswith(within) and (key == within + end or key.endswith("/" + end)):
                return key.removesuffix(end)
        raise SaccadeError(f"found no tensor {within}.../{end}, expected one. {_ASK}")

    def copy(self, ours: str, key: str) -> None:
        """One tensor as it is."""
        self._set(ours, self._get(key), key)

    def dense(self, ours: str, scope: str, *, inputs: int = 1) -> None:
        """Dense and DenseGeneral: the first `inputs` axes come in, the others go out."""
        kernel = self._get(scope + "/kernel")
        flat = kernel.flatten(0, inputs - 1).flatten(1) if kernel.dim() > 2 else kernel
        self._set(ours + ".weight", flat.mT, scope + "/kernel")
        self._bias(ours, scope)

    def norm(self, ours: str, scope: str) -> None:
        """LayerNorm and GroupNorm."""
        self._set(ours + ".weight", self._get(scope + "/scale"), scope + "/scale")
        self._bias(ours, scope)

    def conv(self, ours: str, scope: str) -> None:
        """A convolution's kernel (height, width, inputs, outputs)."""
        kernel = self._get(scope + "/kernel")
        self._set(ours + ".weight", kernel.permute(3, 2, 0, 1), scope + "/kernel")
        self._bias(ours, scope)

    def transposed_conv(self, ours: str, scope: str) -> None:
        """A transposed convolution's kernel, which Flax does not mirror and torch does."""
        kernel = self._get(scope + "/kernel").permute(2, 3, 0, 1).flip(2, 3)
        self._set(ours + ".weight", kernel, scope + "/kernel")
        self._bias(ours, scope)

    def gate(self, ours: str, scope: str) -> None:
        """A GRU cell's six layers as two; only the inputs' and the candidate's have biases."""
        inputs = [f"{scope}/{gate}" for gate in ("ir", "iz", "in")]
        state = [f"{scope}/{gate}" for gate in ("hr", "hz", "hn")]
        self._join(ours + ".inputs.weight", [each + "/kernel" for each in inputs])
        self._join(ours + ".inputs.bias", [each + "/bias" for each in inputs])
        self._join(ours + ".state.weight", [each + "/kernel" for each in state])
        self.copy(ours + ".candidate_bias", scope + "/hn/bias")

    def _join(self, ours: str, keys: list[str]) -> None:
        import torch

        joined = torch.cat([self._get(key) for key in keys], -1)
        self._set(ours, joined.mT if joined.dim() == 2 else joined, ", ".join(keys))

    def _bias(self, ours: str, scope: str) -> None:
        if self.has(scope + "/bias"):
            self.copy(ours + ".bias", scope + "/bias")

    def _get(self, key: str) -> "Tensor":
        if key not in self.tensors:
            raise SaccadeError(f"found no tensor {key}, expected one. {_ASK}")
        return self.tensors[key]

    def _set(self, ours: str, value: "Tensor", key: str) -> None:
        self.weights[ours] = value.contiguous()
        self.names[ours] = key


_ASK = "Pass the whole parameters of the authors' model, and a --config that fits them."
