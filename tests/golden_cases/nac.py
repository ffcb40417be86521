# SPDX-License-Identifier: Apache-2.0
"""Tensors that the NAC authors' code made, against ours: parts, circuits, models, key lists."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nac_graph_golden as parts
import numpy as np
import torch
from golden_refusals import arrays_of, lines_of, weights_of
from nac_executor_golden import RUNS
from torch import Tensor

from saccade.models.families import family_class
from saccade.models.official.conversion import Original, sources_of
from saccade.models.official.sources import nac

Tensors = dict[str, Tensor]
NOT_OURS: dict[str, str] = parts.NOT_OURS


def check(folder: Path) -> list[str]:
    """One line for each array that is further from ours than the manifest allows."""
    manifest = json.loads((folder / "manifest.json").read_text())
    runs = [(case["id"], partial(check_case, folder, case)) for case in ours(manifest)]
    files = [listed["file"] for listed in manifest["key_lists"]]
    runs += [(file, partial(check_keys, folder / file)) for file in files]
    return [line for name, run in runs for line in lines_of(name, run)]


def count(folder: Path) -> int:
    """Number of cases that `check` runs."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return len(ours(manifest)) + len(manifest["key_lists"])


def left_out(folder: Path) -> dict[str, str]:
    """The cases that `check` does not run, with the reason."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return {
        case["id"]: NOT_OURS[case["id"]] for case in manifest["cases"] if case["id"] in NOT_OURS
    }


def ours(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases that layers of this package compute."""
    return [case for case in manifest["cases"] if case["id"] not in NOT_OURS]


def check_case(folder: Path, case: dict[str, Any]) -> Iterator[str]:
    """One line for each array of a case that is too far off."""
    arrays = arrays_of(folder, case)
    computed_values = computed(case, arrays, weights_of(folder, case))
    draws = {draw["name"] for draw in case.get("draws") or ()}
    given = {*case["inputs"], *draws, "probe", *case.get("not_unique", ())}
    for name in sorted(set(arrays) - given):
        if name not in computed_values:
            yield f"{case['id']}: {name} was not computed"
            continue
        found_here, theirs = (
            np.broadcast_to(computed_values[name], arrays[name].shape),
            arrays[name],
        )
        atol, rtol = case["tolerance"]["atol"].get(name, 0.0), case["tolerance"]["rtol"]
        if not np.allclose(found_here, theirs, rtol=rtol, atol=atol):
            yield f"{case['id']}: {name} is off by {np.nanmax(np.abs(found_here - theirs)):.2e}"
    for name in case.get("grad_none", ()):
        if np.any(computed_values.get(f"grad/{name}", np.zeros(1))):
            yield f"{case['id']}: {name} has a gradient"


def computed(
    case: dict[str, Any], arrays: dict[str, np.ndarray], weights: Tensors
) -> dict[str, np.ndarray]:
    """The case's outputs and the gradients of what is recorded, in float64."""
    if case["kind"] not in RUNS:
        values: dict[str, np.ndarray] = parts.RUNS[case["kind"]](case, arrays, weights)
        return values
    leaves = {name: value.double().requires_grad_() for name, value in weights.items()}
    inputs = {name: torch.from_numpy(arrays[name]) for name in case["inputs"]}
    for value in inputs.values():
        value.requires_grad_(value.is_floating_point())
    draws = [torch.from_numpy(arrays[draw["name"]]) for draw in case.get("draws") or ()]
    made = RUNS[case["kind"]](case | {"drawn": draws}, inputs, leaves)
    (made[case["grad_of"]] * torch.from_numpy(arrays["probe"])).sum().backward()
    answers = {name: value.detach().numpy() for name, value in made.items()}
    for name, leaf in (leaves | inputs).items():
        if leaf.grad is not None:
            answers[f"grad/{name}"] = leaf.grad.numpy()
    return answers


def check_keys(path: Path) -> list[str]:
    """A full-size list of keys and shapes read without any weights, as the file alone tells."""
    listed = json.loads(path.read_text())
    tensors = {key: torch.empty(shape, device="meta") for key, shape in listed["keys"].items()}
    converted = nac.convert(Original(path.name, tensors, deterministic=True))
    with torch.device("meta"):
        model = family_class("nac")(converted.config, fresh=False)
    failures = []
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    made = {name: tuple(value.shape) for name, value in converted.weights.items()}
    if wanted != made:
        failures.append(f"{path.name}: {sorted(set(wanted.items()) ^ set(made.items()))[:4]}")
    read = {key for name in converted.names.values() for key in sources_of(name)}
    if left := set(tensors) ^ (read | set(converted.ignored)):
        failures.append(f"{path.name}: keys not read {sorted(left)[:4]}")
    return failures
