# SPDX-License-Identifier: Apache-2.0
"""`saccade group`: one artefact folder whose variants come from several checkpoints."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.core.files import copy_file, new_folder, refuse_existing
from saccade.core.options import Options
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import (
    Manifest,
    ParentEntry,
    VariantEntry,
    VariantFiles,
    write_manifest,
)
from saccade.exporter.artefact.variant import OF_GROUPS, check_model_name, variant_name
from saccade.models.budget import Budget
from saccade.models.families import entry_of

if TYPE_CHECKING:
    from rich.table import Table

_WORD = re.compile("[a-z0-9]{1,16}")
_NAME_IT = "Name the members in short: saccade group small=FOLDER large=FOLDER"


@dataclass(frozen=True)
class GroupOptions(Options):
    """How to combine artefact folders."""

    out: Path  # folder to create
    name: str | None = None  # model name; default: the name of the folder
    force: bool = False  # replace an existing folder


@dataclass(frozen=True)
class GroupMember:
    """An artefact folder, and the word that stands for it in the names of variants."""

    word: str
    folder: ArtefactFolder

    def setting(self, manifest: Manifest) -> str:
        """Return the name of a variant's budget in the group, which is that of no other one."""
        parts = [self.word]
        for field in ("setting", "precision"):
            if len({getattr(one.variant, field) for one in self.folder.manifests}) > 1:
                parts.append(getattr(manifest.variant, field))
        return "".join(parts)


@dataclass(frozen=True)
class CheckpointGroup:
    """The folder that was written."""

    path: Path
    manifests: tuple[Manifest, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        variants = [
            {
                "variant": manifest.variant.name,
                "of": manifest.exported.name,
                "checkpoint": manifest.parent.sha256,
                "budget": float(manifest.variant.budget),
            }
            for manifest in self.manifests
        ]
        return {"path": str(self.path), "variants": variants}

    def to_text(self) -> "Table":
        """Return a row per file, for a terminal."""
        from rich import box
        from rich.table import Table

        caption = "Budget: share of the multiply-adds. `saccade bench` replaces it by that of time."
        table = Table(box=box.SIMPLE, padding=(0, 1), caption=caption, caption_justify="left")
        for heading in ("variant", "of", "budget"):
            table.add_column(heading, no_wrap=True)
        for manifest in self.manifests:
            entry = manifest.variant
            table.add_row(entry.name, manifest.exported.name, f"{entry.budget:.3g}")
        return table


def group(members: Sequence[Path | str], options: GroupOptions) -> CheckpointGroup:
    """Write an artefact folder with the variants of several ones that do the same task.

    A member is a folder, or `word=folder`. Files are copied unchanged, with the records of their
    gates; only the names of variants and their budgets are new. A variant's budget is its share of
    the highest cost: of its multiply-adds, and once all were measured, of its time.

    Raises: SaccadeError if the folders do not do the same task on the same inputs with the same
        labels, one is a group or is given twice, a file has changed, or the output exists.
    """
    opened = _members(members)
    name = check_model_name(options.name or options.out.name.lower())
    folders = [member.folder.path for member in opened]
    refuse_existing(options.out, force=options.force, inputs=folders)
    for member in opened:
        member.folder.check_files()
    for problem in _differences(opened):
        raise SaccadeError(f"{problem}. Leave one of them out, or export it again.")
    sources = _sources(opened, name)
    with new_folder(options.out, force=options.force) as partial:
        for member, own, manifest in sources:
            _store(partial, member, own, manifest)
    return CheckpointGroup(options.out, ArtefactFolder(options.out).manifests)


def _members(texts: Sequence[Path | str]) -> tuple[GroupMember, ...]:
    named = [(word, ArtefactFolder(path)) for word, path in map(_word, texts)]
    for _, folder in named:
        if folder.variants[0].in_group:
            raise SaccadeError(
                f"{folder}: is a group itself. Pass the folders that it was made of."
            )
    # vit-s and vit-b become s and b.
    parts = [folder.model.split("-") for _, folder in named]
    shared = sum(1 for _ in takewhile(lambda ones: len(set(ones)) == 1, zip(*parts, strict=False)))
    shared = min(shared, *(len(own) - 1 for own in parts)) if len(parts) > 1 else 0
    members = [
        GroupMember(word or "".join(own[shared:]), folder)
        for (word, folder), own in zip(named, parts, strict=True)
    ]
    if len(members) < 2:
        raise SaccadeError(f"found {len(members)} artefact folder, expected two or more.")
    for one, other in combinations(members, 2):
        known = {manifest.file.sha256 for manifest in one.folder.manifests}
        both = [each for each in other.folder.manifests if each.file.sha256 in known]
        if both:
            raise SaccadeError(
                f"{other.folder}: the file of its {both[0].variant.name} is also in {one.folder}. "
                "Pass each variant once. Several budgets of one checkpoint need no group: saccade "
                "export CHECKPOINT --budget 1,0.5"
            )
        if one.word == other.word:
            raise SaccadeError(
                f"{one.folder} and {other.folder} would both be called {one.word!r}. {_NAME_IT}"
            )
    return tuple(members)


def _word(text: Path | str) -> tuple[str, Path]:
    """Return the word and the folder of `word=folder`; the word is empty for a folder alone."""
    word, sign, path = str(text).partition("=")
    if not sign or Path(text).is_dir():
        return "", Path(text)
    if not _WORD.fullmatch(word):
        raise SaccadeError(f"{text}: {word!r:.60} is not 1 to 16 of a-z and 0-9. {_NAME_IT}")
    return word, Path(path)


def _differences(members: Sequence[GroupMember]) -> Iterator[str]:
    """Describe why members cannot answer in place of each other, one sentence each."""
    for member in members:
        own = _first(member)
        family, outputs = own.main.variant.family, {spec.name for spec in own.main.outputs}
        answers = "embedding" in outputs or (own.labels and "logits" in outputs)
        if entry_of(family).router or not answers:
            yield (
                f"{member.folder}: found a model of family {family} that "
                f"answers with {', '.join(sorted(outputs))}, expected one that classifies with "
                "labels, or that embeds"
            )
    first = members[0]
    for other in members[1:]:
        both = f"{first.folder} and {other.folder}"
        if there := _labels_apart(_first(first), _first(other)):
            yield f"{both} have different labels: {there}"
        roles = [tuple(_first(one).components) for one in (first, other)]
        if roles[0] != roles[1]:
            found = " and ".join(str(list(own)).replace("''", "one file") for own in roles)
            yield f"{both} have different components: {found}"
            continue
        for role in roles[0]:
            taken = [_first(one).components[role] for one in (first, other)]
            if len({_inputs(manifest) for manifest in taken}) > 1:
                found = " and ".join(", ".join(_inputs(manifest)) for manifest in taken)
                yield f"{both} take different inputs: {found}"


def _first(member: GroupMember) -> VariantFiles:
    return member.folder.variants[0]


def _labels_apart(one: VariantFiles, other: VariantFiles) -> str:
    """Return why labels cannot be mapped by name, with a few of each side; empty if they can."""
    if one.labels == other.labels:
        return ""
    own, there = Counter(one.labels), Counter(other.labels)
    words = []
    for name, more in (("the first", own - there), ("the second", there - own)):
        labels = list(more)
        others = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        if labels:
            words.append(f"only {name} has {', '.join(labels[:3])}{others}")
    if not words and own.most_common(1)[0][1] > 1:
        words.append(f"in another order, and {own.most_common(1)[0][0]!r} is there twice")
    return "; ".join(words)


def _inputs(manifest: Manifest) -> tuple[str, ...]:
    """Describe the inputs; the router brings images to any size, so theirs does not matter."""
    image = manifest.preprocessing is not None
    return tuple(
        f"{spec.name} ({spec.dtype})"
        if image and spec.name == "image"
        else f"{spec.name} ({spec.dtype}, {spec.axes})"
        for spec in manifest.inputs
    )


def _sources(
    members: Sequence[GroupMember], model: str
) -> list[tuple[GroupMember, Manifest, Manifest]]:
    """Return each manifest, with its member, and what it becomes in the group."""
    most = max(variant.multiply_adds for member in members for variant in member.folder.variants)
    made = []
    for member in members:
        parent = member.folder.manifests[0].parent
        for variant in member.folder.variants:
            for role, own in variant.components.items():
                try:
                    setting, precision = member.setting(own), own.variant.precision
                    name = variant_name(model, role, setting, precision)
                except SaccadeError as error:
                    raise SaccadeError(f"{member.folder}: {error} {_NAME_IT}") from error
                entry = VariantEntry(
                    name=name,
                    model=model,
                    family=own.variant.family,
                    role=role,
                    setting=setting,
                    budget=Budget(variant.multiply_adds / most),
                    kept=variant.multiply_adds,
                    total=most,
                    unit=OF_GROUPS,
                    precision=precision,
                )
                # An ONNX file contains the name of its file of weights.
                file = own.file if own.file.data else replace(own.file, name=f"{name}.onnx")
                kept = ParentEntry(f"{member.word}-{parent.name}", parent.sha256)
                new = replace(own, variant=entry, file=file, parent=kept, member=own.variant)
                made.append((member, own, new))
    names = [new.file.name for _, _, new in made]
    if twice := {name for name in names if names.count(name) > 1}:
        raise SaccadeError(
            f"found two files {min(twice)} with files of weights, which cannot be renamed. Export "
            "one of the two checkpoints again with another --name."
        )
    return made


def _store(place: Path, member: GroupMember, own: Manifest, manifest: Manifest) -> None:
    source = member.folder.path
    copy_file(source / own.file.name, place / manifest.file.name)
    if own.file.data:
        copy_file(source / own.file.data.name, place / own.file.data.name)
    checkpoint, copy = source / own.parent.name, place / manifest.parent.name
    if checkpoint.exists() and not copy.exists():
        copy_file(checkpoint, copy)
    write_manifest(place, manifest)
