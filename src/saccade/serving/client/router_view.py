# SPDX-License-Identifier: Apache-2.0
"""Description of a router for its callers: family, components, variants, runtime metadata."""

import json
from dataclasses import dataclass
from typing import Any

from saccade.errors import SaccadeError
from saccade.models.families import entries, entry_of

DESCRIBED = "saccade"  # the router's parameter that tells its callers what stands behind it
# The request parameter by which a probe asks for the state of the lanes, and the output that has it
# as JSON. The router answers such a request at once: it waits in no lane.
PROBE, LANES = "saccade_probe", "saccade_lanes"


@dataclass(frozen=True)
class RouterView:
    """A router as its configuration describes it."""

    model: str
    family: str
    models: tuple[str, ...]  # behind the router; of a model of two components, two a variant
    components: dict[str, dict[str, Any]]
    labels: bool
    _shared: dict[str, Any]
    _variants: dict[str, dict[str, Any]]
    policies: tuple[str, ...] = ()  # that a request may name

    def runtime_metadata(self, variant: str) -> dict[str, Any]:
        """Runtime metadata of a variant.

        Raises: SaccadeError if the router has none of this name.
        """
        if variant not in self._variants:
            known = ", ".join(self._variants)
            raise SaccadeError(f"{self.model}: no variant {variant!r}; it has {known}.")
        return {**self._shared, **self._variants[variant]["facts"]}

    def budget(self, variant: str) -> str:
        """The budget of a variant, by which a request asks for it."""
        return str(self._variants[variant]["setting"])

    @property
    def variants(self) -> tuple[str, ...]:
        """The names that answers carry, largest budget first."""
        return tuple(self._variants)

    def inputs(self, role: str) -> tuple[str, ...]:
        """The inputs of a component; none if there is no such part."""
        return tuple(spec["name"] for spec in self.components.get(role, {}).get("inputs", ()))

    def outputs(self, role: str) -> tuple[str, ...]:
        """The outputs of a component; none if there is no such part."""
        return tuple(spec["name"] for spec in self.components.get(role, {}).get("outputs", ()))

    def dtypes(self) -> dict[str, str]:
        """Type of each input, over all components; encoded images hold bytes."""
        dtypes: dict[str, str] = {}
        for component in self.components.values():
            own = {spec["name"]: spec["dtype"] for spec in component["inputs"]}
            dtypes |= own | dict.fromkeys(component["encoded"], "string")
        return dtypes

    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels of the image that the model takes.

        Raises: SaccadeError if it takes none.
        """
        for component in self.components.values():
            for spec in component["inputs"]:
                if spec["name"] in component["encoded"]:
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

    def require_output(self, name: str, what: str) -> None:
        """Refuse a call that asks for an output of images alone, where the model has none.

        Raises: SaccadeError naming its family, and the commands that ask it.
        """
        served = [part for part in self.components.values() if name in _names(part["outputs"])]
        if any({*_names(part["inputs"])} - {*part["optional"]} == {"image"} for part in served):
            return
        if name == "probabilities" and self.labels and not served:
            return  # the router compares embeddings with those of its labels
        calls = entry_of(self.family).calls
        ask = f"Ask it with `saccade {calls[0]}`" if calls else "Ask it with `Client.infer`"
        if "tokens" in self.inputs("text"):
            ask = "Give it labels to compare with: --labels FILE"
        raise SaccadeError(
            f"{self.model} is a model of family {self.family}, which does not {what}. {ask}, or "
            "name another model."
        )

    def require_policies(self) -> None:
        """Refuse a call by a policy where the router has none.

        Raises: SaccadeError that says how it gets some.
        """
        if not self.policies:
            raise SaccadeError(
                f"{self.model} has no policies. Run `saccade calibrate` on the artefact folder and "
                "`saccade repository` again, or choose by --budget."
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


def _names(specs: Any) -> list[str]:
    return [spec["name"] for spec in specs]


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
    models = tuple(names.split(","))
    return RouterView(
        model=model,
        family=content["family"],
        models=models,
        components=content["parts"],
        labels=content["labels"],
        _shared=content["facts"],
        _variants=_largest_first(content["variants"], models, model),
        policies=tuple(content.get("policies", ())),
    )


def _largest_first(
    variants: dict[str, dict[str, Any]], models: tuple[str, ...], router: str
) -> dict[str, dict[str, Any]]:
    """Variants in the order of the models; the JSON object has them by name.

    The component `clip-text-b0500-fp32` is of the variant `clip-b0500-fp32`.
    """

    def place(variant: str) -> int:
        ending = variant.removeprefix(router)
        return next((i for i, name in enumerate(models) if name.endswith(ending)), len(models))

    return {name: variants[name] for name in sorted(variants, key=place)}


def probe_of(config: Any) -> dict[str, Any] | None:
    """The inputs and parameters of a router's probe; none where the model is not a router."""
    parameters = config.config.parameters
    if DESCRIBED not in parameters:
        return None
    probe: dict[str, Any] = json.loads(parameters[DESCRIBED].string_value)["probe"]
    return probe
