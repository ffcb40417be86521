# SPDX-License-Identifier: Apache-2.0
"""One contract per op, the only declaration of its names, axes, attributes and tolerance."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, get_args

import numpy as np

from saccade.core.checks import check_one_of
from saccade.core.errors import SaccadeError, ShapeError
from saccade.core.schema import Range

_Execution = Literal["kernels", "bodies"]
Ops = _Execution | None  # None: the file has no custom op
OPS: tuple[str, ...] = get_args(_Execution)


DOMAIN, VERSION = "saccade", 1
# Types of an op's main tensors; half precision is computed in float32.
DTYPES = ("float32", "float16", "float64")
_CHECKED_AT_MOST = 256


@dataclass(frozen=True)
class Port:
    """One input or output of the ONNX node."""

    name: str
    axes: str  # "... h w": `...` means any number of leading axes, the same for all ports
    dtype: str = "T"  # "T" is the type of the first input


@dataclass(frozen=True)
class Attribute:
    """One attribute of the ONNX node."""

    name: str
    default: float | int
    allowed: str  # as text, for messages
    range: Range

    def holds(self, value: float) -> bool:
        """True if the attribute may have this value."""
        return math.isfinite(value) and self.range.holds(value)

    @property
    def kind(self) -> type:
        return type(self.default)


@dataclass(frozen=True)
class Op:
    """A contract, callable as the public function, which picks an implementation."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: Mapping[str, Attribute]
    tolerance: Mapping[str, float]
    # Differences are divided by this: an answer [... ] -> a scale that broadcasts over it.
    scale: Callable[[np.ndarray], np.ndarray | float]
    reference: Callable[..., tuple[np.ndarray, ...]]
    package: str  # the folder of its implementations
    _checked: dict[Any, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)
    _public: list[Callable[..., Any]] = field(default_factory=list, repr=False, compare=False)

    @property
    def node(self) -> str:
        """The operator type in an ONNX file, such as `Sparsemax`."""
        return self.name.removeprefix(f"{DOMAIN}::")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._public[0](*args, **kwargs)

    def public(self, function: Callable[..., Any]) -> "Op":
        """Decorate the function that runs when the op is called."""
        assert not self._public, f"{self.name} already has a public function"
        self._public.append(function)
        return self

    def implementation(self, role: str) -> Any:
        """Import the implementation of this op from the module `role` of its package."""
        return getattr(import_module(f"{self.package}.{role}"), self.reference.__name__)

    def defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check the given attributes and return all of them.

        Raises: SaccadeError for an unknown attribute or a value out of range.
        """
        # Cached: models pass the same values each time, and a check is slower than some kernels.
        key = tuple((name, type(value), value) for name, value in given.items())
        try:
            values = self._checked.get(key)
        except TypeError:  # not hashable, so not a number
            return self.checked_attributes(given, where=self.name)
        if values is None:
            values = self.checked_attributes(given, where=self.name)
            if len(self._checked) < _CHECKED_AT_MOST:
                self._checked[key] = values
        return dict(values)

    def checked_attributes(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Check the given attributes and return all of them by name.

        `where` starts an error message, for example with the node's name.
        """
        for name in given:
            check_one_of(f"{where}: an attribute", name, self.attributes)
        values = {}
        for attribute in self.attributes.values():
            value = given.get(attribute.name, attribute.default)
            is_number = isinstance(value, int | float | np.integer | np.floating)
            whole = attribute.kind is float or (is_number and float(value).is_integer())
            if not is_number or isinstance(value, bool) or not whole or not attribute.holds(value):
                raise SaccadeError(
                    f"{where}: {attribute.name} is {value!r}, expected {attribute.allowed}."
                )
            values[attribute.name] = attribute.kind(value)
        return values

    def output_shapes(self, *shapes: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
        """Return the output shapes for these input shapes; an axis may be symbolic.

        Raises: ShapeError if the inputs do not fit the axis rule.
        """
        leading: tuple[Any, ...] | None = None
        sizes: dict[str, Any] = {}
        for port, shape in zip(self.inputs, shapes, strict=True):
            words = [word for word in port.axes.split() if word != "..."]
            has_leading = "..." in port.axes
            actual = tuple(shape)
            if len(actual) < len(words) or (not has_leading and len(actual) != len(words)):
                raise self._wrong_shape(port, actual)
            cut = len(actual) - len(words)
            if has_leading and leading is None:
                leading = actual[:cut]
            elif has_leading and actual[:cut] != leading:
                raise self._wrong_shape(port, actual)
            for word, size in zip(words, actual[cut:], strict=True):
                expected = int(word) if word.isdigit() else sizes.setdefault(word, size)
                if expected != size:
                    raise self._wrong_shape(port, actual)
        return tuple(
            tuple(
                axis
                for word in port.axes.split()
                for axis in ((leading or ()) if word == "..." else (sizes[word],))
            )
            for port in self.outputs
        )

    def checked_dtype(self, port: Port, dtype: str, known: Sequence[str] = DTYPES) -> None:
        """Check the type of a tensor.

        Raises: SaccadeError if `port` does not accept type `dtype`.
        """
        allowed = known if port.dtype == "T" else (port.dtype,)
        if dtype not in allowed:
            raise SaccadeError(
                f"{self.name}: input {port.name} is {dtype}, expected {' or '.join(allowed)}."
            )

    def _wrong_shape(self, port: Port, actual: tuple[Any, ...]) -> ShapeError:
        rule = ", ".join(f"{port.name} [{port.axes}]" for port in self.inputs)
        return ShapeError(
            f"{self.name}: input {port.name} has shape {list(actual)}, expected {rule}."
        )


def op(
    name: str,
    *,
    inputs: tuple[Port, ...],
    outputs: tuple[Port, ...],
    tolerance: Mapping[str, float],
    attributes: tuple[Attribute, ...] = (),
    scale: Callable[[np.ndarray], np.ndarray | float] = lambda answer: 1.0,
) -> Callable[[Callable[..., Any]], Op]:
    """Declare an op; the decorated function is its float64 reference on the last axes.

    The function's keyword-only parameters must be the declared attributes.
    """

    def declare(reference: Callable[..., Any]) -> Op:
        keywords = {
            parameter.name: parameter.default
            for parameter in inspect.signature(reference).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        declared = {attribute.name: attribute.default for attribute in attributes}
        assert keywords == declared, f"{name}: {keywords} is not {declared}"

        def as_tuple(*arrays: np.ndarray, **given: Any) -> tuple[np.ndarray, ...]:
            answer = reference(*arrays, **given)
            return answer if isinstance(answer, tuple) else (answer,)

        as_tuple.__name__, as_tuple.__doc__ = reference.__name__, reference.__doc__
        return Op(
            name,
            inputs,
            outputs,
            {attribute.name: attribute for attribute in attributes},
            tolerance,
            scale,
            as_tuple,
            reference.__module__.removesuffix(".contract"),
        )

    return declare


def is_tensor(value: object) -> bool:
    """True for a torch tensor; does not import torch."""
    return any(base.__module__.split(".")[0] == "torch" for base in type(value).__mro__)


def on_arrays(contract: Op, arrays: Sequence[Any], given: Mapping[str, Any]) -> Any:
    """Run the reference on checked array-likes; the result has the first input's type."""
    read = [np.asarray(array) for array in arrays]
    if read[0].dtype.kind in "iub":
        read[0] = read[0].astype(np.float64)
    values = contract.defaults(given)
    contract.output_shapes(*(array.shape for array in read))
    for port, array in zip(contract.inputs, read, strict=True):
        contract.checked_dtype(port, array.dtype.name)
    answers = contract.reference(*read, **values)
    return tuple(
        answer.astype(read[0].dtype if port.dtype == "T" else port.dtype)
        for port, answer in zip(contract.outputs, answers, strict=True)
    )
