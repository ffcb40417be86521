# SPDX-License-Identifier: Apache-2.0
"""Files that deploy writes, what it refuses, that nothing is left half, what is believed later."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from support.serving.frontiers import frontier_entry, point
from support.serving.repositories import config_of, routes_of

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import grouped
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.description import read_repository
from saccade.serving.repository.options import RepositoryOptions

NAMES = ("nac-b1000-fp32", "nac-b0500-fp32", "nac-b0250-fp32", "nac-b0125-fp32")


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy of the tiny model's folder, to be changed."""
    copy = tmp_path / "artefacts"
    copy.mkdir()
    for path in tiny_folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def measured(folder, *, device="a CPU, 2 cores", best_batch=16):
    """An entry for each variant: score and speed that differ by variant."""
    return [
        frontier_entry(
            manifest.variant.name, manifest.file.sha256, batch=best_batch, device=device,
            budget=manifest.variant.budget,
            grpc={"concurrency_1": point(p95_ms=5 * manifest.variant.budget)},
        )
        for manifest in ArtefactFolder(folder).manifests
    ]  # fmt: skip


def test_writes_what_the_server_loads(folder, out):
    deployment = deploy(folder, RepositoryOptions(out))
    assert (deployment.model, deployment.variants, deployment.unmeasured) == ("nac", NAMES, NAMES)
    assert json.loads(json.dumps(deployment.to_dict()))["variants"] == list(NAMES)
    assert {path.name for path in out.iterdir()} == {"nac", "saccade.json", *NAMES}
    for manifest in ArtefactFolder(folder).manifests:
        place = out / manifest.variant.name
        assert sha256_of(place / "1" / "model.onnx") == manifest.file.sha256
        assert (place / "labels.txt").read_text().splitlines() == list(manifest.labels)
    for source in ("model.py", "choose.py", "image_decoding.py", "lane.py"):
        assert (out / "nac" / "1" / source).is_file()


def test_a_variants_config(folder, out):
    deploy(folder, RepositoryOptions(out, run_batch=16, cores=2))
    config = config_of(out, "nac-b0250-fp32")
    assert (config.name, config.backend) == ("nac-b0250-fp32", "onnxruntime")
    assert (config.default_model_filename, config.max_batch_size) == ("model.onnx", 64)
    assert [(tensor.name, list(tensor.dims)) for tensor in config.input] == [("image", [8, 8, 1])]
    labels = {tensor.name: tensor.label_filename for tensor in config.output}
    assert labels == {"logits": "", "probabilities": "labels.txt", "embedding": ""}
    batching = config.dynamic_batching
    assert list(batching.preferred_batch_size) == [16]
    assert batching.max_queue_delay_microseconds == 0
    # Any queue policy makes some requests of a lone client wait 500 ms.
    assert not batching.HasField("default_queue_policy")
    assert [(group.count, group.kind) for group in config.instance_group] == [(1, 2)]  # KIND_CPU
    assert [warmup.batch_size for warmup in config.model_warmup] == [1, 16]
    assert [warmup.inputs["image"].input_data_file for warmup in config.model_warmup] == [
        "image"
    ] * 2
    parameters = {key: parameter.string_value for key, parameter in config.parameters.items()}
    assert parameters["intra_op_thread_count"] == "1"


def test_the_routers_config(folder, out):
    deploy(folder, RepositoryOptions(out, max_images=32))
    config = config_of(out, "nac")
    assert (config.backend, config.max_batch_size) == ("python", 32)
    outputs = ["logits", "probabilities", "embedding", "variant", "variant_sha256"]
    outputs.append("saccade_lanes")
    assert [tensor.name for tensor in config.output] == outputs
    # With a warm-up the start fails: the variants are not ready yet.
    assert not config.model_warmup
    assert config.parameters["variants"].string_value == ",".join(NAMES)


def test_config_uses_only_fields_that_the_oldest_server_knows(folder, out):
    # A field that it does not know stops the load: these came after the 24.10 line.
    deploy(folder, RepositoryOptions(out))
    for model in ("nac", *NAMES):
        text = (out / model / "config.pbtxt").read_text()
        fields = set(re.findall(r"^([a-z_]+)", text, re.MULTILINE))
        assert fields <= {
            "name", "backend", "max_batch_size", "input", "output", "instance_group",
            "default_model_filename", "dynamic_batching", "parameters", "model_warmup",
            "version_policy", "response_cache",
        }  # fmt: skip


def test_the_frontier_reaches_the_router_and_the_batch_sizes(folder, out):
    ArtefactFolder(folder).merge(measured(folder))
    deployment = deploy(folder, RepositoryOptions(out))
    assert deployment.unmeasured == ()
    assert sha256_of(out / "frontier.json") == sha256_of(folder / "frontier.json")
    routes = {variant["name"]: variant for variant in routes_of(out, "nac")["variants"]}
    assert routes["nac-b0500-fp32"]["lower_bound"] == 0.88
    assert routes["nac-b0500-fp32"]["p95_ms"] == 2.5
    assert routes["nac-b0500-fp32"]["run_batch"] == 16
    assert list(config_of(out, NAMES[0]).dynamic_batching.preferred_batch_size) == [16]


def test_the_server_joins_no_calls_of_single_images_if_those_run_fastest(folder, out):
    deploy(folder, RepositoryOptions(out, run_batch=1, instance_count=2))
    batching = config_of(out, NAMES[0]).dynamic_batching
    assert list(batching.preferred_batch_size) == [1], "else one instance would run both calls"


def test_measurements_of_several_devices(folder, out):
    ArtefactFolder(folder).merge(measured(folder))
    ArtefactFolder(folder).merge(measured(folder, device="another", best_batch=4))
    with pytest.raises(SaccadeError, match=r"a CPU, 2 cores.*another.*--device"):
        deploy(folder, RepositoryOptions(out))
    deploy(folder, RepositoryOptions(out, device="another"))
    assert {variant["run_batch"] for variant in routes_of(out, "nac")["variants"]} == {4}
    with pytest.raises(SaccadeError, match="'a third'"):
        deploy(folder, RepositoryOptions(out, device="a third", force=True))


def test_an_empty_frontier_measured_nothing(folder, out):
    ArtefactFolder(folder).merge([])
    assert deploy(folder, RepositoryOptions(out)).unmeasured == NAMES
    assert not (out / "frontier.json").exists()


def test_a_frontier_of_other_bytes_is_refused(folder, out):
    first, *rest = measured(folder)
    ArtefactFolder(folder).merge([replace(first, sha256="f" * 64), *rest])
    with pytest.raises(SaccadeError, match=r"nac-b1000-fp32 with SHA-256 ffff.*saccade bench"):
        deploy(folder, RepositoryOptions(out))
    assert not out.exists()


def test_a_file_that_does_not_fit_its_manifest_is_refused(folder, out):
    (folder / "nac-b0250-fp32.onnx").write_bytes(b"other")
    with pytest.raises(SaccadeError, match=r"nac-b0250-fp32\.onnx: SHA-256"):
        deploy(folder, RepositoryOptions(out))
    assert not out.exists()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("labels", ["x"] * 10, r"/\w+: nac-b0250-fp32 .*differ in labels"),
        ("opset", 18, "nac-b0250-fp32.*opset 18 and IR version 10"),
        ("ir_version", 11, "nac-b0250-fp32.*opset 20 and IR version 11"),
    ],
)
def test_a_variant_that_does_not_fit_is_refused(folder, out, field, value, words):
    path = folder / "nac-b0250-fp32.manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(SaccadeError, match=f"{words}.*Export"):
        deploy(folder, RepositoryOptions(out))
    assert not out.exists()


def test_a_captioner_needs_both_of_its_components(folder):
    (first, *_) = ArtefactFolder(folder).manifests
    alone = replace(first, variant=replace(first.variant, family="captioner", role="encode"))
    with pytest.raises(SaccadeError, match=r"only encode, expected .* encode and step"):
        grouped([alone])
    step = replace(alone, variant=replace(alone.variant, role="step"))
    assert set(grouped([alone, step])[0].components) == {"encode", "step"}


def test_an_existing_output_is_refused_before_any_work_and_replaced_with_force(folder, out):
    out.mkdir()
    (out / "precious").write_text("mine")
    with pytest.raises(SaccadeError, match="--force"):
        deploy(folder / "is not even looked at", RepositoryOptions(out))
    with pytest.raises(SaccadeError):
        deploy(folder / "missing", RepositoryOptions(out, force=True))
    assert (out / "precious").exists()
    deploy(folder, RepositoryOptions(out, force=True))
    assert not (out / "precious").exists() and (out / "nac").is_dir()


@pytest.mark.parametrize("place", [".", "..", "link"])
def test_force_does_not_replace_what_is_read(folder, place):
    (folder.parent / "link").symlink_to(folder)
    out = folder.parent / "link" if place == "link" else folder / place
    before = sorted(folder.iterdir())
    with pytest.raises(SaccadeError, match=r"would remove the input .*artefacts"):
        deploy(folder, RepositoryOptions(out, force=True))
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_images": 65}, "max_images is 65"),
        ({"max_images": 0}, "max_images is 0"),
        ({"max_side_px": -1}, "max_side_px is -1"),
        ({"max_megapixels": 5_000}, "max_megapixels is 5000, expected at most 1000"),
        ({"run_batch": 65}, "run_batch is 65"),
        ({"run_batch": 0}, "run_batch is 0"),
    ],
)
def test_caps_out_of_range_are_refused(folder, out, options, words):
    with pytest.raises(SaccadeError, match=words):
        deploy(folder, RepositoryOptions(out, **options))
    assert not list(out.parent.glob("*repository*"))


def test_caps_of_the_options_reach_the_router(folder, out):
    caps = {"max_image_mib": 2, "max_megapixels": 3, "max_side_px": 400, "min_side_px": 5}
    deploy(folder, RepositoryOptions(out, **caps))
    routes = routes_of(out, "nac")["preprocessing"]
    assert {name: routes[name] for name in caps} == caps
    assert routes["resize_mode"] == "shortest"


def test_the_same_folder_gives_the_same_bytes(folder, out, tmp_path):
    for place in (out, tmp_path / "again"):
        deploy(folder, RepositoryOptions(place))
    first, second = (
        {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}
        for place in (out, tmp_path / "again")
    )
    assert first == second


LABELLINGS = {
    "no text component": ("red\nblue\n", "a {}\n", "no text component"),
    "no place for the label": ("red\n", "a thing\n", "place"),
    "a label twice": ("red\nred\n", None, "more than once"),
    "no label": ("\n", None, "empty"),
    "templates alone": (None, "a {}\n", "without --labels"),
}


@pytest.mark.parametrize("case", LABELLINGS)
def test_labels_that_cannot_be_deployed_leave_nothing(folder, out, tmp_path, case):
    given, words = {}, LABELLINGS[case][2]
    for name, text in zip(("labels", "templates"), LABELLINGS[case][:2], strict=True):
        if text is not None:
            given[name] = tmp_path / f"{name}.txt"
            given[name].write_text(text)
    with pytest.raises(SaccadeError, match=words):
        deploy(folder, RepositoryOptions(out, **given))
    assert not out.exists()


def test_an_axis_that_differs_between_variants_is_open_in_the_router(folder, out):
    path = folder / f"{NAMES[1]}.manifest.json"
    content = json.loads(path.read_text())
    content["outputs"][2]["axes"] = "b 7"
    path.write_text(json.dumps(content))
    deploy(folder, RepositoryOptions(out))
    dims = {tensor.name: list(tensor.dims) for tensor in config_of(out, "nac").output}
    assert (dims["logits"], dims["embedding"]) == ([10], [-1])
    content["outputs"][2]["axes"] = "b 7 2"
    path.write_text(json.dumps(content))
    with pytest.raises(SaccadeError, match="embedding"):
        deploy(folder, RepositoryOptions(out, force=True))


FULL = "nac-b1000-fp32"


def a_file_instead(out):
    shutil.rmtree(out)
    out.write_bytes(b"")


def another_version(out):
    path = out / "saccade.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: (out / FULL / "1" / "model.onnx").write_bytes(b"other"), "was changed"),
        (lambda out: (out / "nac" / "1" / "model.py").write_text("\n"), r"model\.py was changed"),
        (lambda out: (out / "nac" / "1" / "choose.py").unlink(), "is missing"),
        (lambda out: (out / "nac" / "1" / "more.py").touch(), "was not written by saccade"),
        (another_version, "does not describe a model repository"),
        (lambda out: (out / "saccade.json").unlink(), r"it has no saccade\.json\."),
        (shutil.rmtree, r"repository: no such folder\. Write one with: .* FOLDER --out"),
        (a_file_instead, "it is not a folder"),
        (lambda out: (out / "saccade.json").write_text("{}"), r"no 'schema'\)"),
    ],
)
def test_a_repository_is_believed_only_as_it_was_written(tiny_folder, out, spoil, words):
    assert deploy(tiny_folder, RepositoryOptions(out)) == read_repository(out)
    spoil(out)
    with pytest.raises(SaccadeError, match=words) as refused:
        read_repository(out)
    assert "saccade repository" in str(refused.value)
