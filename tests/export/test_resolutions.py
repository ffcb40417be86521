# SPDX-License-Identifier: Apache-2.0
"""Variants for smaller images: their files, their gate, and the samples that they answer."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from quick_gate import FEW_SAMPLES
from tiny_families import tiny

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.evaluation import classification
from saccade.exporter.evaluation.decisions import Deciders
from saccade.exporter.evaluation.evaluated_model import (
    EvaluatedModel,
    subjects_of_checkpoint,
    subjects_of_folder,
)
from saccade.exporter.evaluation.scenes import described_scenes
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.exporter.export import ExportOptions, export
from saccade.exporter.gate.gate import verify
from saccade.exporter.gate.reference import Reference
from saccade.exporter.runtimes.onnxruntime import ONNXRUNTIME
from saccade.models.checkpoint import load
from saccade.models.image_decoding import decode
from saccade.serving.repository.stored_sample import samples

LARGE, SMALL = "sot-class-fp32", "sot-r8class-fp32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ArtefactFolder:
    """The class token alone, of images of 16 px (resized to 20) and of 8."""
    place = tmp_path_factory.mktemp("sizes")
    made = tiny("sot", place / "sot.safetensors")
    assert made.preprocessing is not None
    taken = replace(made.preprocessing, resize_px=(20, 20))
    checkpoint = replace(made, preprocessing=taken).save_pretrained(place / "sot.safetensors")
    options = ExportOptions(place / "folder", name="sot", budget=("class", "r8class"))
    export(checkpoint, options, FEW_SAMPLES, progress=None)
    return ArtefactFolder(place / "folder")


@pytest.fixture(scope="module")
def models(folder: ArtefactFolder) -> list[EvaluatedModel]:
    return subjects_of_folder(folder, ONNXRUNTIME)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are not square, of the labels of the model."""
    place, rng = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    for index in range(10):
        size = ((30, 21), (17, 40))[index % 2]
        levels = rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)
        (place / f"answer {index % 5}").mkdir(exist_ok=True)
        file = place / f"answer {index % 5}" / f"{index}.png"
        Image.fromarray(levels).resize(size, Image.Resampling.BICUBIC).save(file)
    return place


def test_a_file_says_what_it_takes_and_is_checked_with_it(folder: ArtefactFolder) -> None:
    large, small = (variant.main for variant in folder.variants)
    assert (large.variant.name, small.variant.name) == (LARGE, SMALL)
    assert [spec.axes for spec in (*large.inputs, *small.inputs)] == ["b 16 16 3", "b 8 8 3"]
    entry = small.variant
    assert (entry.kept, entry.total, entry.unit) == (8, 16, "pixels per side")
    assert entry.budget == pytest.approx(1 / 12)  # a quarter of the pixels, a third for the head
    assert small.preprocessing is not None and large.preprocessing is not None
    assert small.preprocessing == large.preprocessing.at_height(8)
    assert small.preprocessing.resize_px == (10, 10)
    assert verify(folder, FEW_SAMPLES, progress=None).passed


def test_the_reference_sees_the_checkpoints_samples_in_fewer_pixels(folder: ArtefactFolder) -> None:
    reference = Reference(folder.parent, FEW_SAMPLES)
    (_, small) = folder.variants
    budget = reference.budget(small.main.variant)
    sized = reference.sized(budget)
    assert reference.variant(budget).config.height_px == 8
    whole = reference.checkpoint.calibration["image"][3]
    expected = Image.fromarray(whole).resize((8, 8), Image.Resampling.BILINEAR)
    assert np.array_equal(sized.calibration["image"][3], np.asarray(expected))
    other = reference.sized(reference.model.budget("class"))
    assert other.preprocessing == reference.checkpoint.preprocessing


def test_a_manifest_of_other_images_does_not_pass(folder: ArtefactFolder, tmp_path: Path) -> None:
    copied = shutil.copytree(folder.path, tmp_path / "copied")
    path = copied / f"{SMALL}.manifest.json"
    content = json.loads(path.read_text())
    content["preprocessing"]["resize_px"] = [8, 8]  # all of the image instead of its center
    path.write_text(json.dumps(content))
    large, small = verify(copied, FEW_SAMPLES, progress=None).variants
    assert large.passed and not small.passed
    assert "preprocessing in the manifest" in small.problems[0]


def test_each_variant_is_scored_on_files_as_its_router_decodes_them(
    models: list[EvaluatedModel], photographs: Path, folder: ArtefactFolder
) -> None:
    options = EvaluateOptions(data=str(photographs), split="all")
    of = Deciders(classification.decide, options, "all").of
    for model, variant in zip(models, folder.variants, strict=True):
        files = [*sorted(photographs.glob("*/*.png"))]
        expected = {decode(file.read_bytes(), model.images().wanted()).tobytes() for file in files}
        found = of(model)
        assert {image.tobytes() for image in found.inputs["image"]} == expected
        own = classification.test_inputs(model, options).inputs["image"]
        np.testing.assert_allclose(
            found.decisions().logits, model.component("")({"image": own})["logits"], atol=1e-5
        )
        (loaded,) = classification.load_inputs(variant, str(photographs), 2).values()
        assert loaded["image"].shape[1:] == own.shape[1:]
    assert of(models[0]).inputs is of(models[0]).inputs  # loaded once


def test_pixels_in_arrays_of_the_trained_size_are_resized(
    models: list[EvaluatedModel], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    path = tmp_path / "mine.npz"
    np.savez(path, images=pixels, labels=np.arange(12) % 5)
    options = EvaluateOptions(data=str(path), split="all")
    large, small = (classification.test_inputs(model, options) for model in models)
    assert large.sha256 == small.sha256
    assert small.inputs["image"].shape == (12, 8, 8, 3)
    order = [one.tobytes() for one in pixels]
    index = order.index(large.inputs["image"][0].tobytes())
    expected = Image.fromarray(pixels[index]).resize((8, 8), Image.Resampling.BILINEAR)
    assert np.array_equal(small.inputs["image"][0], np.asarray(expected))
    scenes = [described_scenes(model.images(), EvaluateOptions(limit=2)) for model in models]
    assert [one.images.shape for one in scenes] == [(2, 16, 16, 3), (2, 8, 8, 3)]
    assert scenes[0].sha256 == scenes[1].sha256


def test_a_repository_stores_a_real_sample_of_each(folder: ArtefactFolder) -> None:
    stored = samples(folder)
    assert all(sample.real for sample in stored.values())
    assert stored[SMALL].inputs["image"].shape == (1, 8, 8, 3)


def test_a_checkpoint_is_scored_at_a_side(folder: ArtefactFolder, photographs: Path) -> None:
    (model,) = subjects_of_checkpoint(load(folder.path / "sot.safetensors"), ("r8class",))
    assert model.name == "sot-r8class" and model.images().height_px == 8
    image = io.BytesIO()
    Image.new("RGB", (30, 20), (9, 8, 7)).save(image, "PNG")
    pixels = decode(image.getvalue(), model.images().wanted())[None]
    assert model.component("")({"image": pixels})["logits"].shape == (1, 5)
