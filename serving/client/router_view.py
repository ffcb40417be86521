# SPDX-License-Identifier: Apache-2.0
"""What a router tells its callers of itself: family, parts, variants, and their facts."""

import json
from dataclasses import dataclass
from typing import Any

from saccade.errors import SaccadeError
from saccade.models.families import entries

DESCRIBED = "saccade"  # the router's parameter that tells its callers what stands behind it
# The request parameter by which a probe asks for the state of the lanes, and the output that has it
# as JSON. The router answers such a request at once: it waits in no lane.
PROBE, LANES = "saccade_probe", "saccade_lanes"


@dataclass(frozen=True)
class RouterView:
    """A router as its configuration describes it."""

    model: str
    family: str
    models: tuple[str, ...]  # behind the router; of a model of two parts, two a variant
    parts: dict[str, dict[str, Any]]
    labels: bool
    _shared: dict[str, Any]
    _variants: dict[str, dict[str, Any]]

    def facts(self, variant: str) -> dict[str, Any]:
        """What is known of a variant.

        Raises: SaccadeError if the router has none of this name.
        """
        if variant not in self._variants:
            known = ", ".join(self._variants)
            raise SaccadeError(f"{self.model}: no variant {variant!r}; it has {known}.")
        return {**self._shared, **self._variants[variant]["facts"]}

    def setting(self, variant: str) -> str:
        """The setting of a variant, by which a request asks for it."""
        return str(self._variants[variant]["setting"])

    @property
    def variants(self) -> tuple[str, ...]:
        """The names that answers carry, largest budget first."""
        return tuple(self._variants)

    def inputs(self, role: str) -> tuple[str, ...]:
        """The inputs of a part; none if there is no such part."""
        return tuple(each["name"] for each in self.parts.get(role, {}).get("inputs", ()))

    def outputs(self, role: str) -> tuple[str, ...]:
        """The outputs of a part; none if there is no such part."""
        return tuple(each["name"] for each in self.parts.get(role, {}).get("outputs", ()))

    def dtypes(self) -> dict[str, str]:
        """What each input holds, over all parts; encoded images hold bytes."""
        found: dict[str, str] = {}
        for part in self.parts.values():
            own = {each["name"]: each["dtype"] for each in part["inputs"]}
            found |= own | dict.fromkeys(part["encoded"], "string")
        return found

    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels of the image that the model takes.

        Raises: SaccadeError if it takes none.
        """
        for part in self.parts.values():
            for spec in part["inputs"]:
                if spec["name"] in part["encoded"]:
                    _, height, width, *_ = spec["axes"].split()
                    return int(height), int(width)
        raise SaccadeError(f"{self.model} takes no image. Name another model.")

    def check_family(self, other: "RouterView") -> None:
        """Refuse to compare models that do different things.

        Raises: SaccadeError naming both families.
        """
        if self.family != other.family:
            raise SaccadeError(
                f"{other.model} is a model of family {other.family}, {self.model} of family "
                f"{self.family}. Compare two of one family."
            )

    def require(self, call: str, what: str) -> None:
        """Refuse a call that this family's models do not answer.

        Raises: SaccadeError naming its family, and those that do.
        """
        able = [family for family, entry in entries() if call in entry.calls]
        if self.family not in able:
            raise SaccadeError(
                f"{self.model} is a model of family {self.family}; {what} needs one of family "
                f"{' or '.join(able)}. Name another one."
            )


def view_of(config: Any, model: str) -> RouterView:
    """A router's view, from its configuration.

    Raises: SaccadeError if the model is not a router.
    """
    names = config.config.parameters["variants"].string_value
    text = config.config.parameters[DESCRIBED].string_value
    if not names or not text:
        raise SaccadeError(
            f"{model} is not a router: it names no variants. Give the name that "
            "`saccade serve` shows, or write the repository anew with `saccade repository`."
        )
    content = json.loads(text)
    return RouterView(
        model=model,
        family=content["family"],
        models=tuple(names.split(",")),
        parts=content["parts"],
        labels=content["labels"],
        _shared=content["facts"],
        _variants=content["variants"],
    )


def probe_of(config: Any) -> dict[str, Any] | None:
    """The inputs and parameters of a router's probe; none where the model is not a router."""
    parameters = config.config.parameters
    if DESCRIBED not in parameters:
        return None
    probe: dict[str, Any] = json.loads(parameters[DESCRIBED].string_value)["probe"]
    return probe
