# SPDX-License-Identifier: Apache-2.0
"""Folders of transformers answer as transformers does, and what is not supported is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from places import TESTS
from safetensors.torch import load_file, save_file

from saccade.core.errors import SaccadeError
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.image_decoding import fit
from saccade.models.official.conversion import ConversionReport, Original
from saccade.models.official.convert import ConvertOptions, convert
from saccade.models.official.sources.hugging_face import processor_images

GOLDEN = TESTS / "golden" / "hugging_face"
ANSWERS = np.load(GOLDEN / "answers.npz")
FOLDERS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
ANSWERED = ("logits", "embedding", "text")
SMALLER = sorted(key for key in ANSWERS.files if key.endswith(" px"))
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Each folder as a checkpoint, made once."""
    place = tmp_path_factory.mktemp("converted")

    def find(name: str) -> Checkpoint:
        out = place / f"{name}.safetensors"
        if not out.exists():
            convert("auto", GOLDEN / name, ConvertOptions(out))
        return load(out)

    return find


def answers_of(model: Any) -> dict[str, np.ndarray]:
    components = model.components()
    small = components[0].inputs[0].shape[1] == ANSWERS["images"].shape[1]
    names = ("images" if small else "large images", "tokens")
    images, tokens = (torch.from_numpy(ANSWERS[name]) for name in names)
    with torch.no_grad():
        outputs = dict(components[0].run(image=images))
        if len(components) == 2:
            outputs["text"] = components[1].run(tokens=tokens)["embedding"]
            outputs["logits"] = model(images, tokens)
    return {name: tensor.numpy() for name, tensor in outputs.items()}


@pytest.mark.parametrize("name", FOLDERS)
def test_answers_are_those_of_transformers(
    name: str, converted: Callable[[str], Checkpoint]
) -> None:
    checkpoint = converted(name)
    wanted = {
        key.partition("/")[2]: ANSWERS[key]
        for key in ANSWERS.files
        if key.startswith(f"{name}/") and key.rpartition("/")[2] in ANSWERED
    }
    assert wanted
    for dtype, close in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        ours = answers_of(checkpoint.build().to(dtype))
        for key, theirs in wanted.items():
            assert np.abs(ours[key] - theirs).max() < close, (key, dtype)
    assert checkpoint.labels == (("cat", "dog", "eft") if checkpoint.family == "sot" else ())


@pytest.mark.parametrize("key", SMALLER)
def test_answers_to_smaller_images_are_those_with_interpolated_positions(
    key: str, converted: Callable[[str], Checkpoint]
) -> None:
    name, _, said = key.partition("/")
    output, _, side = said.removesuffix(" px").partition(" at ")
    whole: Any = converted(name).build(torch.float64)
    model = whole.at(whole.budget(f"r{side}"))
    large = whole.config.height_px == ANSWERS["large images"].shape[1]
    images = ANSWERS["large images" if large else "images"][:, : int(side), : int(side)]
    with torch.no_grad():
        ours = model.components()[0].run(image=torch.from_numpy(images))
        if "text" in [component.role for component in model.components()] and output == "logits":
            tokens = torch.from_numpy(ANSWERS["tokens"])
            ours = {"logits": model(torch.from_numpy(images), tokens)}
    assert np.abs(ours[output].numpy() - ANSWERS[key]).max() < 1e-10


@pytest.mark.parametrize("name", FOLDERS)
def test_photographs_become_the_pixels_of_the_image_processor(
    name: str, converted: Callable[[str], Checkpoint]
) -> None:
    preprocessing = converted(name).preprocessing
    assert preprocessing is not None
    for index in range(3):
        photograph = Image.fromarray(ANSWERS[f"photograph {index}"])
        theirs = ANSWERS[f"{name}/pixels {index}"]
        assert np.array_equal(fit(photograph, preprocessing.wanted()), theirs), index


@pytest.mark.journey
def test_a_converted_folder_is_exported_through_the_gate(
    converted: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    """The classifier that reads both the class token and the mean of the others."""
    from quick_gate import FEW_SAMPLES

    from saccade.exporter.export import ExportOptions, export

    done = export(converted("dinov2"), ExportOptions(tmp_path / "dino"), FEW_SAMPLES, progress=None)
    assert done.report.passed


def test_positions_of_another_size_are_interpolated_and_reported(tmp_path: Path) -> None:
    report = changed(tmp_path, "dinov2")
    assert any("6 x 6 patches interpolated to 4 x 4" in note for note in report.notes)


def changed(
    place: Path,
    name: str,
    config: Change | None = None,
    processor: Change | None = None,
    tensors: Change | None = None,
    **options: Any,
) -> ConversionReport:
    """Convert a copy of a folder with other JSON or other tensors."""
    folder = shutil.copytree(GOLDEN / name, place / name)
    for file, change in (("config.json", config), ("preprocessor_config.json", processor)):
        content = json.loads((folder / file).read_text())
        if change is not None:
            change(content)
            (folder / file).write_text(json.dumps(content))
    if tensors is not None:
        weights = load_file(folder / "model.safetensors")
        tensors(weights)
        save_file(weights, folder / "model.safetensors")
    return convert("auto", folder, ConvertOptions(place / "ours.safetensors", **options))


def put(**values: Any) -> Change:
    return lambda content: content.update(values)


def drop(name: str) -> Change:
    return lambda content: content.pop(name)


CONFIGS: dict[str, tuple[str, Change, str]] = {
    "convnext": ("vit", put(model_type="convnext"), "'convnext'.*saccade reads ResNets.* train"),
    "naflex": ("vit", put(model_type="siglip2"), "'siglip2'.*any shape.*one size, whose model_typ"),
    "stride": ("resnet", put(downsample_in_bottleneck=True), "downsample_in_bottleneck is True, e"),
    "widths": ("resnet", put(hidden_sizes=[16, 32, 64, 96]), r"hidden_sizes is .*128\], which dou"),
    "stages": (
        "resnet",
        put(depths=[1, 2, 1], hidden_sizes=[16, 32, 64]),
        "stage_layers is .*, expected 4 values for a ResNet",
    ),
    "blocks": ("resnet", put(depths=[1, 3, 1, 1]), "missing: .*layer2.2.conv1"),
    "GELU": ("siglip-vision", put(hidden_act="relu"), "hidden_act is 'relu', expected one of gelu"),
    "side": ("siglip-vision", put(image_size=17), r"image_size is \[17, 17\], expected \[16, 16\]"),
    "positions": ("siglip-vision", put(patch_size=4), r"position.*found \(9, 16\), expected \(16,"),
    "no pooling": (
        "siglip-vision",
        put(vision_use_head=False),
        r"unexpected: vision_model.head|unexpected: head",
    ),
    "no type": ("vit", put(model_type="mystery"), "'mystery', expected one of vit, deit"),
    "a decoder": (
        "vit",
        put(architectures=["ViTForMaskedImageModeling"]),
        "architectures.*expected one of ViTForImageClassification",
    ),
    "text alone": ("clip", put(architectures=["CLIPTextModel"]), "expected one of CLIPModel"),
    "activation": ("vit", put(hidden_act="relu"), "hidden_act is 'relu', expected gelu"),
    "several labels": (
        "vit",
        put(problem_type="multi_label_classification"),
        "problem_type is 'multi_label_classification', expected None or 'single",
    ),
    "gates": ("dinov2", put(use_swiglu_ffn="yes"), "use_swiglu_ffn is .yes., expected"),
    "absolute": ("swin", put(use_absolute_embeddings=True), "use_absolute_embeddings is True"),
    "wide": ("swin", put(mlp_ratio=2.0), "mlp_ratio is 2.0, expected at least 4 and at most 4"),
    "size": ("vit", put(image_size=224), r"image_size is \[224, 224\], expected \[16, 16\], the i"),
    "width": ("vit", put(hidden_size=20), r"\(16, 16\), expected \(20, 20\)"),
    "no width": ("vit", put(hidden_size="16"), "hidden_size is '16', expected a whole number"),
    "names": ("vit", put(id2label={"0": "cat"}), "3 outputs, but id2label of config.json has 1"),
    "no names": ("vit", drop("id2label"), "id2label of config.json has none.*--labels FILE"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_refuses_a_configuration(case: str, tmp_path: Path) -> None:
    name, change, reason = CONFIGS[case]
    with pytest.raises(SaccadeError, match=f"(?s){reason}"):
        changed(tmp_path, name, config=change)
    assert not (tmp_path / "ours.safetensors").exists()


PROCESSORS: dict[str, tuple[str, Change, str]] = {
    "class": (
        "vit",
        put(image_processor_type="BeitImageProcessor"),
        "image_processor_type is 'BeitImageProcessor', expected one of ViTImageProcessor",
    ),
    "another step": ("vit", put(do_pad=True), "do_pad is True, expected only the steps resize"),
    "a share": ("vit", put(crop_pct=0.9), "crop_pct is 0.9"),
    "no share": ("resnet", put(crop_pct=1.5), "crop_pct is 1.5, expected above 0 and at most 1"),
    "two crops": ("resnet", put(do_center_crop=True), "do_center_crop is True, expected shortest"),
    "no resize": ("vit", put(do_resize=False), "do_resize is False, expected True"),
    "no scale": ("vit", put(do_rescale=False), "do_rescale is False, expected True"),
    "scale": ("vit", put(rescale_factor=1 / 127.5), "rescale_factor is .*, expected 1/255"),
    "filter": ("vit", put(resample=4), r"resample is 4, expected one of 0, 1, 2, 3"),
    "mean": ("vit", put(image_mean=[0.5]), r"image_mean is \[0.5\], expected 3 numbers"),
    "longest": ("clip", put(size={"longest_edge": 21}), "size is .*, expected height and width, o"),
    "no crop": ("clip", put(do_center_crop=False), "do_center_crop is False, expected true"),
    "large crop": ("clip", put(crop_size=30), "crop_size is 30, expected .* at most 21 and 21"),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_refuses_an_image_processor_by_the_name_of_the_step(case: str, tmp_path: Path) -> None:
    name, change, reason = PROCESSORS[case]
    with pytest.raises(SaccadeError, match=f"preprocessor_config.json: {reason}"):
        changed(tmp_path, name, processor=change)


def test_processors_of_older_releases(tmp_path: Path) -> None:
    def older(content: dict[str, Any]) -> None:
        del content["image_processor_type"]
        content |= {"feature_extractor_type": "CLIPFeatureExtractor", "size": 21, "crop_size": 16}

    changed(tmp_path, "clip-states", processor=older)
    preprocessing = load(tmp_path / "ours.safetensors").preprocessing
    assert preprocessing is not None
    assert (preprocessing.resize_mode, preprocessing.resize_px) == ("shortest", (21, 21))
    assert (preprocessing.height_px, preprocessing.crop_rounding) == (16, "down")


def test_a_large_image_of_a_resnet_is_squashed() -> None:
    """As ConvNextImageProcessor does from 384 px, whatever its crop_pct is."""
    given = json.loads((GOLDEN / "resnet" / "preprocessor_config.json").read_text())
    given["size"] = {"shortest_edge": 384}
    official = Original("it", {}, {"preprocessor_config": given})
    preprocessing = processor_images(official, 3).preprocessing
    assert (preprocessing.resize_mode, preprocessing.resize_px) == ("squash", (384, 384))


def test_weights_that_are_whole_numbers(tmp_path: Path) -> None:
    change = put(**{"classifier.bias": torch.tensor([1, 2, 3])})
    assert changed(tmp_path, "vit", tensors=change).out
    assert load(tmp_path / "ours.safetensors").weights["head.class_fc.bias"].tolist() == [1, 2, 3]


def test_no_image_processor(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "vit", tmp_path / "vit")
    (folder / "preprocessor_config.json").rename(folder / "processor.json")
    options = ConvertOptions(tmp_path / "ours.safetensors")
    with pytest.raises(SaccadeError, match=r"no preprocessor_config.json .* Copy it"):
        convert("auto", folder, options)
    # A processor of several inputs contains that of images, as transformers 5 saves it.
    inner = json.loads((folder / "processor.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    assert convert("auto", folder, options).out


def sharded(place: Path, change: Change | None = None) -> Path:
    """Return a folder whose weights are in two files."""
    folder = shutil.copytree(GOLDEN / "vit", place / "vit")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts: tuple[dict[str, Any], ...] = ({}, {})
    for index, (name, tensor) in enumerate(sorted(weights.items())):
        parts[index % 2][name] = tensor
    files = [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]
    for file, part in zip(files, parts, strict=True):
        save_file(part, folder / file)
    places = {name: files[index] for index in (0, 1) for name in parts[index]}
    content: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": places}
    if change is not None:
        change(content)
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return folder


def test_weights_in_several_files(tmp_path: Path, converted: Callable[[str], Checkpoint]) -> None:
    report = convert("auto", sharded(tmp_path), ConvertOptions(tmp_path / "ours.safetensors"))
    assert sum("weights from model-0000" in note for note in report.notes) == 2
    ours, whole = load(tmp_path / "ours.safetensors").weights, converted("vit").weights
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


SHARDS: dict[str, tuple[Change, str]] = {
    "a file elsewhere": (
        lambda content: content["weight_map"].update(x="../model.safetensors"),
        r"names '\.\./model.safetensors', expected files of weights in the same folder",
    ),
    "a missing file": (
        lambda content: content["weight_map"].update(x="model-3.safetensors"),
        "names model-3.safetensors, which is not in the folder. Copy all 3 files",
    ),
    "a missing tensor": (
        lambda content: content["weight_map"].update(x="model-00001-of-00002.safetensors"),
        "lacks x, which model.safetensors.index.json says it has",
    ),
    "no map": (drop("weight_map"), "has no weight_map"),
}


@pytest.mark.parametrize("case", SHARDS)
def test_refuses_an_index_of_weights(case: str, tmp_path: Path) -> None:
    change, reason = SHARDS[case]
    with pytest.raises(SaccadeError, match=reason):
        convert("auto", sharded(tmp_path, change), ConvertOptions(tmp_path / "ours.safetensors"))


def test_inspect_names_the_command(tmp_path: Path) -> None:
    from saccade.serving.commands.inspection import inspect

    found = inspect(GOLDEN / "vit")
    assert (found.kind, found.facts["model"], found.facts["labels"]) == (
        "a folder of transformers",
        "ViTForImageClassification",
        3,
    )
    assert found.next[0].startswith(f"saccade convert {GOLDEN / 'vit'} --out build/vit.safe")
    in_parts = inspect(sharded(tmp_path))
    assert in_parts.facts["weights"] == "model.safetensors.index.json"
    config = tmp_path / "vit" / "config.json"
    config.write_text(config.read_text().replace('"vit"', '"convnext"'))
    refused = inspect(tmp_path / "vit")
    assert (
        "convolutional trunks saccade reads ResNets" in refused.facts["converted"]
        and not refused.next
    )


def test_weights_that_torch_saved(tmp_path: Path, converted: Callable[[str], Checkpoint]) -> None:
    folder = shutil.copytree(GOLDEN / "vit", tmp_path / "vit")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    report = convert("auto", folder, ConvertOptions(tmp_path / "ours.safetensors"))
    assert report.file == "pytorch_model.bin"
    assert load(tmp_path / "ours.safetensors").sha256 != ""
    ours, whole = load(tmp_path / "ours.safetensors").weights, converted("vit").weights
    assert all(torch.equal(ours[name], whole[name]) for name in whole)
