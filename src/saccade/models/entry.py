# SPDX-License-Identifier: Apache-2.0
"""The entry of a family: everything that others ask about it, declared in its own folder.

Light to import: what needs torch, or belongs to a later stage, is named as `module:name` and
imported where it is asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class EvaluationTask:
    """One way to score a model, and the requests that it is measured with: those of its data."""

    score: str  # module:function of (model, options), the result of one variant
    inputs: str  # module:function of (variant, data, count), the arrays of its components by role
    roles: tuple[str, ...] = ()  # of components without which it cannot be asked
    # module:function of (variants, options, indices of samples), their answers for a reader
    examples: str = ""
    # module:function of (model, options, split), the logits that an answer is the largest of;
    # none: an answer is nothing that one variant could give in place of another
    decide: str = ""


@dataclass(frozen=True)
class FamilyEntry:
    """A family as the registry knows it; what has a default, most families do without."""

    model: str  # module:class with the methods of `interface.Family`
    folded: str  # module:class, made of a model in evaluation; it has `components`
    training: str  # module:function of (options), a task of `saccade train`
    presets: str  # module:name, the configurations by size
    source: str  # module:name, the paper
    tasks: tuple[str, ...]  # of `saccade evaluate`, the family's own score first
    answers: tuple[str, ...]  # outputs that a caller asks for; large maps only if they are it
    own_tasks: Mapping[str, EvaluationTask] = field(default_factory=dict)  # beside the usual ones
    validation: str = "scores"  # word for the scores of a training run
    embedding_saved: bool = False  # whether the budget saves bytes of an embedding, hardly time

    # The components, by role, and what the server's router makes of them.
    roles: tuple[str, ...] = ()  # that no other family has: see `export.artefact.variant.ROLES`
    required: tuple[str, ...] = ()  # without which no request is answered
    inner: tuple[str, ...] = ()  # that only the router itself calls
    beside: tuple[str, ...] = ()  # that answer requests of their own, beside the first component
    filled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # inputs that it may draw
    # Files of this folder by their name beside the router. They run in the server and import
    # nothing of saccade; `family.py` has the class `Family`, a `plain_family.PlainFamily`.
    router: Mapping[str, str] = field(default_factory=dict)
    # module:function of (model, outputs by role), what the router answers where its answers are
    # not the outputs of the components.
    router_outputs: str | None = None
    # module:function of (runtime metadata, runners by role), the runner of a whole request where no
    # single component answers one.
    whole: str | None = None

    # The client.
    calls: tuple[str, ...] = ()  # segment, edit, answer, caption: those that not every model has
    picture: str | None = None  # module:function of `attention_maps.ShowRequest`, for `show`
    # module:function of (runtime metadata, outputs, image size), a map [n h w] of what was looked
    # at; none where the outputs do not say it.
    focus: str | None = None


def imported(reference: str) -> Any:
    """The object that `module:name` stands for."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)
