# SPDX-License-Identifier: Apache-2.0
"""`saccade convert`: convert an authors' checkpoint into ours, or report what does not fit."""

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from saccade.core.checks import check_one_of
from saccade.core.errors import SaccadeError
from saccade.core.files import refuse_existing, sha256_of
from saccade.core.machine import version_of
from saccade.core.options import Options, flag
from saccade.core.resources import check_convert
from saccade.models.checkpoint import Checkpoint, check_finite, load, save
from saccade.models.checkpoint_folder import is_checkpoint_folder
from saccade.models.checkpoint_format import AUTHORS_DATA, is_foreign
from saccade.models.data.calibration import calibration_for, own_images, recalibrated
from saccade.models.families import filled, outline
from saccade.models.interface import Component
from saccade.models.official.authors_images import with_images, with_published
from saccade.models.official.conversion import (
    Conversion,
    ConversionFailed,
    ConversionReport,
    Original,
    compared,
)
from saccade.models.official.hub_folder import (
    config_beside,
    hub_of,
    label_names,
    looks_like,
    source_of,
    weights_in,
    with_source,
)
from saccade.models.official.json_files import flattened, key_notes, names_from, object_from
from saccade.models.official.tensor_files import SHARDS, float32_bytes, read_tensors, shards_of
from saccade.models.preprocessing import Preprocessing
from saccade.models.shipped import SHIPPED

if TYPE_CHECKING:
    from torch import Tensor, nn


SAMPLES = 16


def largest_change(
    models: "Iterable[nn.Module]", arrays: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Return the largest change of the logits, or of the first output, between two models.

    The models are in float64, and made one after the other: each is as large as two checkpoints.

    Shapes: arrays [n ...], the calibration samples.
    """
    import torch

    samples = {name: array[:SAMPLES] for name, array in arrays.items()}
    answers = []
    for model in models:
        component: Component = model.components()[0]  # type: ignore[operator]
        given = component.real(samples) if component.real else samples
        inputs = {spec.name: torch.from_numpy(given[spec.name].copy()) for spec in component.inputs}
        wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        with torch.no_grad():
            answers.append(component.run(**wide))
    name = "logits" if "logits" in component.outputs else component.outputs[0]
    before, after = (answer[name] for answer in answers)
    return {
        "output": name,
        "samples": min(SAMPLES, len(before)),
        "largest_change": float((before - after).abs().max()),
        "largest_value": float(before.abs().max()),
    }


@dataclass(frozen=True)
class ConverterSource:
    """A code base whose checkpoints can be read: its converter and its options."""

    module: str  # of this package or in full; `:name` if it is not `convert`
    takes: tuple[str, ...] = ("labels",)  # options that not every source knows
    checkpoint_key: str | None = None  # read if the file has it and the user names none
    hub: str | None = None  # the layout of a model hub's folder, if it has one


OPTIONAL = ("labels", "vocabulary", "attention", "lam", "backbone", "deterministic")
_TRUNK = ("labels", "backbone")

SOURCES = {
    "nac": ConverterSource("nac", ("labels", "deterministic"), checkpoint_key="model"),
    "sparo-clip": ConverterSource("sparo", ("labels", "vocabulary"), hub="open-clip"),
    "open-clip": ConverterSource("clip", ("labels", "vocabulary"), hub="open-clip"),
    "sparo-dino": ConverterSource("sparo:convert_dino", checkpoint_key="teacher"),
    "sot": ConverterSource("sot"),
    "tvmax-vqa": ConverterSource("tvmax_vqa", ("labels", "vocabulary", "attention", "lam")),
    "invariant-slot-attention": ConverterSource("invariant_slot_attention", ()),
    "vit": ConverterSource("vit", _TRUNK, hub="timm"),
    "deit": ConverterSource("vit:convert_deit", _TRUNK, hub="timm"),
    "swin": ConverterSource("swin", _TRUNK, hub="timm"),
    "resnet": ConverterSource("resnet", hub="timm"),
    "transformers": ConverterSource("hugging_face", ("labels", "vocabulary"), hub="transformers"),
}
_PLAIN = "resnet"  # its tensors tell the whole configuration
AUTO = "auto"  # for a folder of a model hub, whose JSON tells the source


_CLASSIFIERS = ("head.", "head_dist.", "classifier.")


@dataclass(frozen=True)
class ConvertOptions(Options):
    """Options for what the file does not tell, and the path of the result."""

    # checkpoint to write: a .safetensors file, or a folder of Hugging Face's names
    out: Path
    config: Path | None = None  # JSON of the authors' model configuration
    preprocessing: Path | None = None  # JSON with preprocessing fields to change
    labels: Path | None = None  # file with names of classes or answers: one per line, or JSON
    vocabulary: Path | None = None  # file with words of the text input: one per line, or JSON
    # output attention of a tvmax-vqa checkpoint
    attention: Literal["softmax", "sparsemax", "tvmax"] | None = None
    lam: float | None = None  # strength of the total variation, with --attention tvmax
    checkpoint_key: str | None = None  # part of the file to read, such as student
    backbone: Path | None = None  # file with weights of the trunk, if PATH has only the head
    deterministic: bool = False  # leave out random draws that the authors' code makes in evaluation
    # authors: compute as the authors' code does; exact: use the paper's formulas
    numerics: Literal["authors", "exact"] = "authors"
    # your images for the gate and the ranges of int8: a folder of images, or data as of `evaluate`;
    # default: generated scenes
    calibrate_on: str | None = None
    force: bool = False  # overwrite an existing file at --out


def convert(source: str, path: Path, options: ConvertOptions) -> ConversionReport:
    """Read an authors' checkpoint, compare every key, and write ours if all keys fit.

    `source` is one of `SOURCES`, or "auto" for a folder of a model hub.

    Raises: SaccadeError if the source, the file or an option cannot be used. ConversionFailed
        with the whole report if keys do not fit; then nothing is written.
    """
    if source == AUTO and is_checkpoint(path):
        return _rewritten(path, options)
    source = source_of(path) if source == AUTO else source
    _check(source, options)
    path = weights_in(path, SOURCES[source].hub)
    if path.is_dir() and (hub := hub_of(path)) is not None:
        raise SaccadeError(
            f"{path}: found a folder of '{hub}', which SOURCE '{source}' does not read. Run: "
            f"saccade convert {shlex.quote(str(path))} --out {options.out}"
        )
    check_convert(options.out, *float32_bytes(path))
    official = official_from(source, path, options)
    tensors = official.tensors.values()  # mapped, not read
    in_float32 = 4 * sum(x.numel() for x in tensors)
    check_convert(options.out, in_float32, sum(x.nbytes for x in tensors))
    converted, report = _compared(source, path, official, options)
    _check_labels(converted)
    return _write(options, converted, report)


def read_trunk(path: Path) -> Checkpoint:
    """Return the checkpoint whose trunk starts a training run.

    A folder of a model hub and the file of a ResNet are converted in memory, without names of
    classes and calibration samples.
    Raises: as `load` and `convert`.
    """
    in_file = is_foreign(path)
    if not in_file and (is_checkpoint_folder(path) or not path.is_dir()):
        return load(path)
    source = _source_of_file(path) if in_file else source_of(path)
    weights, options = weights_in(path, SOURCES[source].hub), ConvertOptions(Path(path.name))
    official = official_from(source, weights, options)
    # The old classifier is not used, so its classes need no names.
    official = replace(official, labels=official.labels or ("",))
    converted, report = _compared(source, weights, official, options)
    return Checkpoint(
        path=path,
        sha256=report.sha256,
        family=converted.family,
        config=converted.config.to_dict(),
        weights={
            name: value.float() if value.is_floating_point() else value
            for name, value in converted.weights.items()
        },
        preprocessing=converted.preprocessing,
        labels=(),
        calibration={},
        card={"source": report.source, "file": report.file, "notes": list(report.notes)},
    )


def _source_of_file(path: Path) -> str:
    """Return the SOURCE of a file that needs no other file to be converted."""
    source = looks_like(read_tensors(path))
    if source != _PLAIN:
        raise SaccadeError(
            f"{path}: found the weights of {source or 'an unknown network'}, expected a "
            "checkpoint of saccade, a folder of timm, transformers or OpenCLIP, or the file of a "
            "ResNet with torchvision's names. Convert it first, and pass the result: saccade "
            f"convert {source or 'SOURCE'} {shlex.quote(str(path))} --out NAME.safetensors"
        )
    return source


def _compared(
    source: str, path: Path, official: Original, options: ConvertOptions
) -> tuple[Conversion, ConversionReport]:
    """Return the model whose keys all fit.

    Raises: ConversionFailed if there are others.
    """
    converted = _with_preprocessing(with_published(_read(source, official), official), options)
    planned = outline(converted.family, converted.config.to_dict())
    expected = planned.state_dict()
    notes = official.notes + converted.notes + _shards(path)
    if options.backbone is not None:
        notes += (f"trunk from {options.backbone.name}, {sha256_of(options.backbone)}",)
    report = ConversionReport(
        source=source,
        file=path.name,
        sha256=sha256_of(path),
        family=converted.family,
        tensors=len(expected),
        parameters=sum(parameter.numel() for parameter in planned.parameters()),
        rows=compared(converted, expected, official.tensors),
        ignored=dict(converted.ignored),
        notes=notes,
        images=converted.preprocessing.described() if converted.preprocessing else "",
        images_from=converted.images_from,
    )
    if report.rows:
        raise ConversionFailed(report)
    check_finite(path.name, converted.weights)
    # Whole numbers may be weights too.
    weights = {
        name: value if value.is_floating_point() else value.to(expected[name].dtype)
        for name, value in converted.weights.items()
    }
    return replace(converted, weights=weights), report


def _rewritten(path: Path, options: ConvertOptions) -> ConversionReport:
    """Write a checkpoint of saccade as a folder, or the one of a folder as a file."""
    _check_out(options)
    for name in (*OPTIONAL, "config", "preprocessing", "checkpoint_key"):
        if getattr(options, name) not in (None, False):
            raise SaccadeError(
                f"{flag(name)} is given, but {path} is already a saccade checkpoint, "
                "which is only written in another form. Leave it out."
            )
    checkpoint = load(path)
    notes: tuple[str, ...] = ()
    if options.calibrate_on is None:
        again = checkpoint.save_pretrained(options.out, replace=options.force)
    else:
        again, said = recalibrated(
            checkpoint, options.calibrate_on, options.out, replace=options.force
        )
        notes = (f"calibration: {said}",)
    return ConversionReport(
        source="saccade",
        file=path.name,
        sha256=checkpoint.sha256,
        family=checkpoint.family,
        tensors=len(checkpoint.weights),
        parameters=sum(tensor.numel() for tensor in checkpoint.weights.values()),
        rows=(),
        ignored={},
        notes=notes,
        images=checkpoint.preprocessing.described() if checkpoint.preprocessing else "",
        images_from="the checkpoint",
        out=str(options.out),
        out_sha256=again.sha256,
    )


def is_checkpoint(path: Path) -> bool:
    """Return True if a path is a checkpoint of saccade: its folder, or its file."""
    return (
        str(path).startswith(SHIPPED) or path.suffix == ".safetensors" or is_checkpoint_folder(path)
    )


def official_from(source: str, path: Path, options: ConvertOptions) -> Original:
    """Read the file, and the files that the options name.

    Raises: SaccadeError if one of the files cannot be read.
    """
    tensors = read_tensors(path, options.checkpoint_key, likely=SOURCES[source].checkpoint_key)
    backbone = None if options.backbone is None else read_tensors(options.backbone)
    beside = config_beside(path, SOURCES[source].hub)
    config = object_from(options.config, "--config")
    return Original(
        path=str(path),
        tensors=tensors if backbone is None else with_trunk(tensors, backbone),
        config=config if beside is None else beside | (config or {}),
        labels=names_from(options.labels, "--labels") or label_names(beside),
        vocabulary=names_from(options.vocabulary, "--vocabulary"),
        attention=options.attention,
        lam=options.lam,
        backbone=backbone,
        deterministic=options.deterministic,
        notes=config_notes(source, config, beside),
    )


def _shards(path: Path) -> tuple[str, ...]:
    if not path.name.endswith(SHARDS):
        return ()
    return tuple(f"weights from {file.name}, {sha256_of(file)}" for file in shards_of(path))


def with_trunk(
    tensors: "Mapping[str, Tensor]", backbone: "Mapping[str, Tensor]"
) -> "dict[str, Tensor]":
    """Merge the tensors of both files; the head replaces the trunk's own classifier."""
    trunk = {key: value for key, value in backbone.items() if not key.startswith(_CLASSIFIERS)}
    return {**trunk, **tensors}


def _read(source: str, official: Original) -> Conversion:
    module, name = _module_of(source)
    read: Callable[[Original], Conversion] = getattr(module, name)
    try:
        return read(official)
    except SaccadeError as error:
        raise with_source(error, source, official.tensors) from error


def _module_of(source: str) -> tuple[Any, str]:
    """Return the module of a source, and the name of its converter."""
    module, _, name = SOURCES[source].module.partition(":")
    module = module if "." in module else f"saccade.models.official.sources.{module}"
    return import_module(module), name or "convert"


# Keys that only a project's own JSON has, not one that a user writes.
_FOREIGN = {"architecture", "pretrained_cfg", "preprocess_cfg", "representationConfig"}


def config_notes(
    source: str, given: Mapping[str, Any] | None, beside: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Return a note for each key of --config that is not read but resembles one that is.

    `beside` is the JSON next to the weights, whose keys are known too.
    Raises: SaccadeError for any unknown key in a JSON that only a user writes.
    """
    kind = getattr(_module_of(source)[0], "JSON", None)  # without one, the converter checks them
    if kind is None or not given:
        return ()
    written = hasattr(kind, "WRITTEN") and not given.keys() & _FOREIGN
    return key_notes(kind, flattened(given), beside, written)


def _check_out(options: ConvertOptions) -> None:
    if options.out.suffix not in (".safetensors", ""):
        raise SaccadeError(
            f"--out is {options.out}, expected a name that ends in .safetensors, or one without an "
            "ending for a folder."
        )
    refuse_existing(options.out, force=options.force)


def _check(source: str, options: ConvertOptions) -> None:
    check_one_of("source", source, SOURCES)
    _check_out(options)
    for name in OPTIONAL:
        given = getattr(options, name)
        if given is not None and given is not False and name not in SOURCES[source].takes:
            raise SaccadeError(
                f"--{name} is given, but source '{source}' does not use it. Leave it out."
            )
    if options.lam is not None and not (options.lam >= 0 and options.attention == "tvmax"):
        raise SaccadeError(
            f"--lam is {options.lam} with --attention {options.attention or 'left out'}, expected "
            "at least 0 with --attention tvmax."
        )


def _with_preprocessing(converted: Conversion, options: ConvertOptions) -> Conversion:
    """Apply the user's preprocessing, which wins; the model applies mean and std itself."""
    given = object_from(options.preprocessing, "--preprocessing")
    if given is None:
        return converted
    if converted.preprocessing is None:
        raise SaccadeError("--preprocessing is given, but this model takes no image. Leave it out.")
    known = converted.preprocessing.to_dict()
    if unknown := sorted(set(given) - set(known)):
        renamed = " ('resize' is now called 'interpolation')" if "resize" in unknown else ""
        raise SaccadeError(
            f"--preprocessing: unknown key{'s' * (len(unknown) > 1)} {', '.join(unknown)}, "
            f"expected some of {', '.join(known)}{renamed}. Correct the JSON."
        )
    preprocessing = Preprocessing.from_dict(known | given)
    said = f"{', '.join(given)} from --preprocessing, the rest from {converted.images_from}"
    return with_images(converted, preprocessing, "--preprocessing", said)


def _check_labels(converted: Conversion) -> None:
    classes = getattr(converted.config, "classes", None)
    if classes is not None and classes != len(converted.labels):
        raise SaccadeError(
            f"the file has {classes} classes, found {len(converted.labels)} labels. Pass the names "
            "with --labels FILE, one per line in the order of the outputs."
        )


def _write(
    options: ConvertOptions, converted: Conversion, report: ConversionReport
) -> ConversionReport:
    model = filled(converted.family, converted.config.to_dict(), converted.weights)
    components: tuple[Component, ...] = model.components()  # type: ignore[operator]
    own = None
    if options.calibrate_on is not None:
        own = own_images(options.calibrate_on, converted.preprocessing, converted.labels)
    arrays, said = calibration_for(components, converted.preprocessing, converted.calibration, own)
    config = converted.config
    if options.numerics == "exact":
        report, config = _exact(converted, model.state_dict(), arrays, report)
    checkpoint = save(
        options.out,
        family=converted.family,
        config=config.to_dict(),
        weights=model.state_dict(),
        preprocessing=converted.preprocessing,
        labels=converted.labels,
        calibration=arrays,
        card=_card(options, report, said) | ({} if own is None else own.card),
        replace=options.force,
    )
    notes = (*report.notes, f"calibration: {said}")
    return replace(report, out=str(options.out), out_sha256=checkpoint.sha256, notes=notes)


def _card(options: ConvertOptions, report: ConversionReport, calibration: str) -> dict[str, Any]:
    return {
        "data": AUTHORS_DATA,
        "source": report.source,
        "file": report.file,
        "file_sha256": report.sha256,
        "numerics": options.numerics,
        "exact": report.exact,
        "notes": list(report.notes),
        "calibration": calibration,
        "images_from": report.images_from,
        "versions": {name: version_of(name) for name in ("saccade", "torch", "safetensors")},
    }


def _exact(
    converted: Conversion,
    weights: "Mapping[str, Tensor]",
    arrays: dict[str, np.ndarray],
    report: ConversionReport,
) -> tuple[ConversionReport, Any]:
    """Return the report with the effect of the papers' formulas, and their configuration."""
    import torch

    if converted.exact is None:
        note = "exact numerics: this model computes its paper's formulas already"
        return replace(report, notes=(*report.notes, note)), converted.config
    configs = (converted.config.to_dict(), converted.exact.to_dict())
    models = (filled(converted.family, config, weights, torch.float64) for config in configs)
    return replace(report, exact=largest_change(models, arrays)), converted.exact
