# SPDX-License-Identifier: Apache-2.0
"""The entry of a family: everything that other packages need from it, declared in its folder.

It is light to import: whatever needs torch, or belongs to a later stage, is named as `module:name`
and imported when it is used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class EvaluationTask:
    """One way to score a model, and the requests from its data that it is measured with."""

    score: str  # module:function of (model, options) -> the result of one variant
    inputs: str  # module:function of (variant, data, count) -> arrays of its components by role
    roles: tuple[str, ...] = ()  # of the components that it needs
    # module:function of (variants, options, indices of samples) -> their answers, readable
    examples: str = ""
    # module:function of (model, options, split) -> the model as a function from samples to logits,
    # of which the answer is the largest; none: variants cannot answer in place of each other
    decide: str = ""
    # module:function of (model, options, split) -> images for segmentations, which have no classes
    segments: str = ""
    # module:function of (model, options) -> the same of the images that are scored
    scored_segments: str = ""


@dataclass(frozen=True)
class FamilyEntry:
    """A family as the registry sees it. Most families do not need the fields with defaults."""

    model: str  # module:class with the methods of `interface.Family`
    folded: str  # module:class, built from a model in evaluation; it has `components`
    training: str  # module:function of (options) -> a task of `saccade train`
    presets: str  # module:name, the configurations by size
    source: str  # module:name, the paper
    tasks: tuple[str, ...]  # for `saccade evaluate`, the family's own score first
    answers: tuple[str, ...]  # outputs that callers request; large maps only if they are the answer
    trunk: str = ""  # module:name, a `trunks.TrunkPort` if the model has a trunk of images
    settings: tuple[str, ...] = ()  # of --set, which training reads besides the configuration's
    own_tasks: Mapping[str, EvaluationTask] = field(default_factory=dict)  # besides the usual ones
    validation: str = "scores"  # what the scores of a training run are called
    architectures: tuple[str, ...] = ()  # names that users look for; hints point here
    embedding_saved: bool = False  # True if a budget saves embedding bytes, hardly time

    # The components by role, and how the server's router uses them.
    roles: tuple[str, ...] = ()  # unique to this family; see `export.artefact.variant.ROLES`
    required: tuple[str, ...] = ()  # needed to answer any request
    inner: tuple[str, ...] = ()  # called by the router only
    beside: tuple[str, ...] = ()  # answer separate requests, besides the first component
    filled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the router may draw these
    # If what it draws depends on a sample's index in its request: the request parameter with the
    # index of the first one, so that the requests that a call is split into do not matter.
    first_row: str | None = None
    # Files of this folder, by their name next to the router. They run in the server and import
    # nothing from saccade; `family.py` has the class `Family`, a `plain_family.PlainFamily`.
    router: Mapping[str, str] = field(default_factory=dict)
    # module:function of (model, outputs by role) -> what the router answers, if that differs from
    # the outputs of the components.
    router_outputs: str | None = None
    # module:function of (runtime metadata, runners by role) -> the runner of a whole request, if no
    # single component answers one.
    whole: str | None = None

    # The client.
    calls: tuple[str, ...] = ()  # of the client: segment, edit, answer, caption
    picture: str | None = None  # module:function of `attention_maps.ShowRequest`, for `show`
    # module:function of (runtime metadata, outputs, image size) -> a map [n h w] of what the model
    # looked at; None if the outputs do not tell.
    focus: str | None = None


def imported(reference: str) -> Any:
    """Import the object that `module:name` refers to."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)
