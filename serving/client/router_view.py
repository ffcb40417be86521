# SPDX-License-Identifier: Apache-2.0
"""A router's description for its callers: family, components, variants, runtime metadata."""

import json
from dataclasses import dataclass
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.models.families import entries, entry_of

DESCRIBED = "saccade"  # the router's parameter that contains its description for callers
# The request parameter with which a probe asks for the state of the lanes, and the output that
# returns it as JSON. The router answers such a request immediately: it waits in no lane.
PROBE, LANES = "saccade_probe", "saccade_lanes"
SPACE = "space"  # key of the description: the variant whose space others are mapped into
FIRST_ROW = "first_row"  # key of the description: the parameter with a request's first index


@dataclass(frozen=True)
class RouterView:
    """A router as described by its configuration."""

    model: str
    family: str
    models: tuple[str, ...]  # behind the router; one per component of each variant
    components: dict[str, dict[str, Any]]
    labels: bool
    _shared: dict[str, Any]
    _variants: dict[str, dict[str, Any]]
    policies: tuple[str, ...] = ()  # names of the policies that a request may follow
    slo_ms: float | None = None  # objective of requests that adapt to the load; None: none do
    # If answers depend on a sample's index in its request: the parameter with the first one's.
    first_row: str | None = None
    space: str | None = None  # the variant in whose space policies embed; None: none do

    def runtime_metadata(self, variant: str) -> dict[str, Any]:
        """Return the runtime metadata of a variant.

        Raises: SaccadeError if the router has no variant of this name.
        """
        if variant not in self._variants:
            known = ", ".join(self._variants)
            raise SaccadeError(f"{self.model}: found no variant {variant!r}, expected {known}.")
        return {**self._shared, **self._variants[variant]["facts"]}

    def sha256(self, variant: str) -> str:
        """Return the hash of a variant's file."""
        return str(self._variants[variant]["sha256"])

    def named(self, text: str) -> str:
        """Return the variant with this name, or with a budget of this name.

        Raises: SaccadeError if there is none.
        """
        for name in self.variants:
            if text in (name, self.budget(name)):
                return name
        raise SaccadeError(
            f"{self.model}: found no variant {text!r:.60}, expected one of "
            f"{', '.join(map(self.budget, self.variants))}."
        )

    def budget(self, variant: str) -> str:
        """Return the budget with which a request can choose a variant."""
        return str(self._variants[variant]["setting"])

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants as answers give them, largest budget first."""
        return tuple(self._variants)

    def inputs(self, role: str) -> tuple[str, ...]:
        """Return the inputs of a component; empty if there is no such component."""
        return tuple(spec["name"] for spec in self.components.get(role, {}).get("inputs", ()))

    def outputs(self, role: str) -> tuple[str, ...]:
        """Return the outputs of a component; empty if there is no such component."""
        return tuple(spec["name"] for spec in self.components.get(role, {}).get("outputs", ()))

    def dtypes(self) -> dict[str, str]:
        """Return the type of each input of all components; encoded images are `string`."""
        dtypes: dict[str, str] = {}
        for component in self.components.values():
            own = {spec["name"]: spec["dtype"] for spec in component["inputs"]}
            dtypes |= own | dict.fromkeys(component["encoded"], "string")
        return dtypes

    @property
    def main_role(self) -> str:
        """The component that takes an image, or else the first."""
        return next(
            (role for role, part in self.components.items() if part["encoded"]),
            next(iter(self.components)),
        )

    @property
    def tasks(self) -> tuple[str, ...]:
        """Kinds of answers that the model gives about its main input, the usual one first."""
        outputs, calls = self.outputs(self.main_role), entry_of(self.family).calls
        tasks: list[str] = [call for call in ("caption", "segment", "answer") if call in calls]
        classifies = "probabilities" in outputs or (self.labels and "embedding" in outputs)
        if classifies and "answer" not in tasks:
            tasks.append("classify")
        return (*tasks, "embed") if "embedding" in outputs else tuple(tasks)

    def image_size(self) -> tuple[int, int]:
        """Return the height and width in pixels of the image that the model takes.

        Raises: SaccadeError if it takes no image.
        """
        for component in self.components.values():
            for spec in component["inputs"]:
                if spec["name"] in component["encoded"]:
                    _, height, width, *_ = spec["axes"].split()
                    return int(height), int(width)
        raise SaccadeError(f"{self.model} takes no image. Choose another model.")

    def check_family(self, other: "RouterView") -> None:
        """Refuse to compare models that do different things.

        Raises: SaccadeError naming both families.
        """
        if self.family != other.family:
            raise SaccadeError(
                f"{other.model} is a model of family {other.family}, but {self.model} is of family "
                f"{self.family}. Compare two models of the same family."
            )

    def require_output(self, name: str, what: str) -> None:
        """Refuse a call for an output that the model cannot compute from images alone.

        Raises: SaccadeError that names the family and the command to use instead.
        """
        served = [part for part in self.components.values() if name in _names(part["outputs"])]
        if any({*_names(part["inputs"])} - {*part["optional"]} == {"image"} for part in served):
            return
        if name == "probabilities" and self.labels and not served:
            return  # the router compares embeddings with those of its labels
        calls = entry_of(self.family).calls
        ask = f"Use `saccade {calls[0]}`" if calls else "Use `Client.infer`"
        if "tokens" in self.inputs("text"):
            ask = "Pass labels to compare with: --labels FILE"
        raise SaccadeError(
            f"{self.model} is a model of family {self.family}, which does not {what}. {ask}, or "
            "choose another model."
        )

    def require_policies(self, *, embeds: bool = False) -> None:
        """Refuse a call with a policy, or for embeddings in another space, if there are none.

        Raises: SaccadeError that explains how to add policies.
        """
        if not (self.space if embeds else self.policies):
            kind, how = (" of embeddings", " --embedding") if embeds else ("", "")
            raise SaccadeError(
                f"{self.model} has no policies{kind}. Run `saccade calibrate{how}` on its artefact "
                "folder (and for a server, `saccade repository` again), or choose by --budget."
            )

    def require(self, call: str, what: str) -> None:
        """Refuse a call that models of this family do not answer.

        Raises: SaccadeError that names the family, and those that answer the call.
        """
        able = [family for family, entry in entries() if call in entry.calls]
        if self.family not in able:
            raise SaccadeError(
                f"{self.model} is a model of family {self.family}, but {what} needs family "
                f"{' or '.join(able)}. Choose another model."
            )


def _names(specs: Any) -> list[str]:
    return [spec["name"] for spec in specs]


def view_of(config: Any, model: str) -> RouterView:
    """Return a router's view from its configuration.

    Raises: SaccadeError if the model is not a router.
    """
    names = config.config.parameters["variants"].string_value
    text = config.config.parameters[DESCRIBED].string_value
    if not names or not text:
        raise SaccadeError(
            f"{model} is not a router: it lists no variants. Pass the name that `saccade serve` "
            "prints, or write the repository again with `saccade repository`."
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
        slo_ms=content.get("adaptive", {}).get("slo_ms"),
        first_row=content.get(FIRST_ROW),
        space=content.get(SPACE),
    )


def _largest_first(
    variants: dict[str, dict[str, Any]], models: tuple[str, ...], router: str
) -> dict[str, dict[str, Any]]:
    """Return the variants in the order of the models; the JSON object has them by name.

    The component `clip-text-b0500-fp32` belongs to the variant `clip-b0500-fp32`.
    """

    def place(variant: str) -> int:
        ending = variant.removeprefix(router)
        return next((i for i, name in enumerate(models) if name.endswith(ending)), len(models))

    return {name: variants[name] for name in sorted(variants, key=place)}


def probe_of(config: Any) -> dict[str, Any] | None:
    """Return the inputs and parameters of a router's probe, or None if it is not a router."""
    parameters = config.config.parameters
    if DESCRIBED not in parameters:
        return None
    probe: dict[str, Any] = json.loads(parameters[DESCRIBED].string_value)["probe"]
    return probe
