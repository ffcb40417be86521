# SPDX-License-Identifier: Apache-2.0
"""Every source from the authors' file to a served answer, by the command line."""

import numpy as np
import pytest
from PIL import Image

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")
ort = pytest.importorskip("onnxruntime", reason="pip install '.[cpu]'")

import official_files  # noqa: E402
from joined_repository import join  # noqa: E402
from quick_gate import quick_gate  # noqa: E402

from saccade.core.errors import SaccadeError  # noqa: E402
from saccade.exporter.artefact.folder import ArtefactFolder  # noqa: E402
from saccade.exporter.gate.metrics import WHOLE, relative_error, tensor_limit  # noqa: E402
from saccade.models.checkpoint import load  # noqa: E402
from saccade.models.image_decoding import fit  # noqa: E402
from saccade.serving.client.client import Client  # noqa: E402
from saccade.serving.commands.cli import run  # noqa: E402
from saccade.serving.server.server import ServeOptions, Server  # noqa: E402

pytestmark = pytest.mark.journey

FILES = official_files.FILES | official_files.FORMS
# A folder of transformers becomes a model of the same families, and
# tests/models/official/test_hugging_face.py exports one. A ResNet is in test_trunk_golden.py there.
del FILES["transformers"], FILES["resnet"]
SOURCES = tuple(FILES)
FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
# The largest budget of each, so that the file's own numerics answer.
BUDGETS = {"sot": "fast", "invariant-slot-attention": "t3", "vit": "exact", "deit": "exact"}
BUDGETS["swin"] = "exact"
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def call(*arguments):
    """Run a command that has to succeed."""
    assert run([str(argument) for argument in arguments]) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source's file, converted, exported, verified and deployed by the command line, once.

    The gate has tests of its own, so it looks at few samples here.
    """
    done = {}

    def make(source):
        if source in done:
            return done[source]
        place = tmp_path_factory.mktemp(source)
        file = FILES[source](place)
        ours, folder = place / f"{source}.safetensors", place / "folder"
        call("convert", file.source or source, file.path, *file.flags, "--out", ours)
        outputs = ("--outputs", "reconstruction") if source.startswith("invariant") else ()
        with quick_gate():
            budget = BUDGETS.get(source, "1")
            call("export", ours, "--out", folder, "--budget", budget, *outputs)
            call("verify", folder)
        call("repository", folder, "--out", place / "repository")
        done[source] = place
        return place

    return make


def files_of(place):
    """By role, the ONNX file of the only variant."""
    return {
        manifest.variant.role: place / "folder" / manifest.file.name
        for manifest in ArtefactFolder(place / "folder").manifests
    }


def answers(path, **inputs):
    """Named outputs of an ONNX file."""
    session = ort.InferenceSession(path)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def answers_of_pixels(path, scaled, checkpoint, **inputs):
    """The same for images that were scaled before they were recorded, and are no whole numbers.

    Shapes: scaled float [b c h w].
    """
    proto = onnx.load(path)
    image = next(value for value in proto.graph.input if value.name == "image")
    image.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    own = checkpoint.preprocessing
    pixels = 255 * (scaled.transpose(0, 2, 3, 1) * np.array(own.std) + np.array(own.mean))
    session = ort.InferenceSession(proto.SerializeToString())
    names = [value.name for value in session.get_outputs()]
    outputs = session.run(names, {"image": pixels.astype(np.float32), **inputs})
    return dict(zip(names, outputs, strict=True))


def recorded(family, case_id):
    case = official_files.golden_case(family, case_id)
    file = case["arrays"]["file"] if "arrays" in case else case.get("data_file", case.get("file"))
    return dict(np.load(official_files.GOLDEN / family / file))


def check_clip(place, checkpoint, case_id):
    data, files = recorded("sparo", case_id), files_of(place)
    answer = answers_of_pixels(files["image"], data["image"], checkpoint)
    np.testing.assert_allclose(answer["embedding"], data["image_features"], **CLOSE)
    answer = answers(files["text"], tokens=data["text"])
    np.testing.assert_allclose(answer["embedding"], data["text_features"], **CLOSE)


def check_sot(place, checkpoint):
    data = recorded("sot", "sot_naive28_sumloss")
    actual = answers_of_pixels(files_of(place)[""], data["image"], checkpoint)
    both = torch.from_numpy(np.stack([data["logits_cls"], data["logits_vis"]]))
    expected = both.softmax(-1).mean(0).numpy()
    np.testing.assert_allclose(actual["probabilities"], expected, **CLOSE)


def check_nac(place, checkpoint):
    case = official_files.golden_case("nac", "model_eval")
    data = np.load(official_files.GOLDEN / "nac" / case["arrays"]["file"])
    image, logits = (data[case["arrays"]["prefix"] + name] for name in ("image", "logits"))
    answer = answers_of_pixels(files_of(place)[""], image, checkpoint)
    np.testing.assert_allclose(answer["logits"], logits, **CLOSE)


def check_vqa(place, checkpoint):
    data = recorded("tvmax_vqa", "model_b")
    answer = answers(files_of(place)[""], **vqa_inputs())
    np.testing.assert_allclose(answer["logits"], data["tvmax/logits"], **CLOSE)
    # The exact solver's answer is another one: these are the authors' numerics.
    assert np.abs(answer["logits"] - data["tvmax_exact/logits"]).max() > 1e-3


def vqa_inputs():
    data = recorded("tvmax_vqa", "model_b")
    sizes = np.stack([data["size_h"], data["size_w"]], -1).astype(np.int64)
    features, question = data["img_feat"].astype(np.float32), data["ques_ix"].astype(np.int64)
    return {"features": features, "sizes": sizes, "question": question}


def check_slots(place, checkpoint):
    data, files = recorded("slot_attention", "model_tssa"), files_of(place)
    scaled = data["inputs/video"][:, 0].transpose(0, 3, 1, 2)
    state = data["inputs/initial_slots"].astype(np.float32)
    answer = answers_of_pixels(files[""], scaled, checkpoint, initial_state=state)
    joined = np.concatenate([answer[name] for name in ("slots", "positions", "scales")], -1)
    np.testing.assert_allclose(joined, data["out/states"][:, 0], **CLOSE)
    np.testing.assert_allclose(answer["masks"], data["out/targets_masks"][:, 0, ..., 0], **CLOSE)
    np.testing.assert_allclose(answer["reconstruction"], data["out/video"][:, 0], **CLOSE)


GOLDEN = {
    "nac": check_nac,
    "sparo-clip": lambda *given: check_clip(*given, "clip_sparo_grouped_sqrtsem"),
    "open-clip": lambda *given: check_clip(*given, "clip_codebook_bottleneck"),
    "attention-pooler": lambda *given: check_clip(*given, "clip_attn_pool_gap"),
    "sot": check_sot,
    "tvmax-vqa": check_vqa,
    "invariant-slot-attention": check_slots,
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_is_converted_exported_verified_and_deployed(source, made):
    place = made(source)
    checkpoint = load(place / f"{source}.safetensors")
    assert checkpoint.card["source"] in (source, "open-clip")
    assert all(manifest.parity.passed for manifest in ArtefactFolder(place / "folder").manifests)
    GOLDEN.get(source, check_checkpoint)(place, checkpoint)


def check_checkpoint(place, checkpoint):
    """Without a recording of the whole network: the file answers as the checkpoint does."""
    image = images_of(checkpoint)
    model = checkpoint.build(torch.float64)
    with torch.no_grad():
        expected = model.components()[0].run(torch.from_numpy(image))
    for name, actual in answers(files_of(place)[""], image=image).items():
        np.testing.assert_allclose(actual, expected[name].numpy(), **CLOSE)


def images_of(checkpoint):
    """Noise of the size that the model takes."""
    own = checkpoint.preprocessing
    shape = (3, own.height_px, own.width_px, own.channels)
    return np.random.default_rng(5).integers(0, 256, shape, dtype=np.uint8)


def inputs_of(checkpoint, role):
    """A request's inputs, by the component that answers it."""
    if checkpoint.family == "vqa":
        return vqa_inputs()
    if role == "text":
        rng, length = np.random.default_rng(7), checkpoint.config["context_length"]
        return {"tokens": rng.integers(1, checkpoint.config["vocabulary"], (3, length))}
    given = {"image": images_of(checkpoint)}
    if checkpoint.family == "slot-attention":
        state = np.random.default_rng(6).normal(size=(3, 4, 20)) / 3
        given["initial_state"] = state.astype(np.float32)
    return given


@pytest.fixture(scope="module")
def server(needs_server, made, tmp_path_factory):
    """One server of the models of all sources: their repositories copied into one folder."""
    places = (made(source) / "repository" for source in SOURCES)
    folder = join(tmp_path_factory.mktemp("served"), places)
    with Server(folder, ServeOptions(**FREE_PORTS)) as running:
        yield running


@pytest.mark.parametrize("source", SOURCES)
def test_the_served_answer_is_the_files(source, server, made):
    place = made(source)
    checkpoint = load(place / f"{source}.safetensors")
    with Client(server.url, source) as client:
        assert client.ready()
        for role, path in files_of(place).items():
            if role == "decode":
                continue
            inputs = inputs_of(checkpoint, role)
            actual = client.infer(inputs)
            if "image" in inputs:  # most sources enlarge it and crop
                wanted = checkpoint.preprocessing.wanted()
                inputs["image"] = np.stack(
                    [fit(Image.fromarray(x), wanted) for x in inputs["image"]]
                )
            expected = answers(path, **inputs)
            for name in expected:
                np.testing.assert_allclose(actual[name], expected[name], **CLOSE, err_msg=name)


@pytest.mark.parametrize("source", sorted({*FILES} & {*official_files.FILES} - {"tvmax-vqa"}))
def test_photographs_are_answered_as_by_their_authors(source, server, made):
    files, pixels = official_files.photographs(source)
    assert len(files) >= 12
    given = {}
    if source == "invariant-slot-attention":
        state = np.random.default_rng(6).normal(size=(len(files), 4, 20)) / 3
        given["initial_state"] = state.astype(np.float32)
    path = next(path for role, path in files_of(made(source)).items() if role in ("", "image"))
    expected = answers(path, image=pixels, **given)
    with Client(server.url, source) as client:
        actual = client.infer({"image": files, **given})
    for name, array in expected.items():
        assert relative_error(actual[name], array, WHOLE) <= tensor_limit("fp32"), name


REFUSED = {
    "a grid larger than the model's": ("sizes", [10, 4], "sizes of sample 1 is 10,4"),
    "no cell": ("sizes", [0, 4], "sizes of sample 1 is 0,4"),
    "more cells than features": ("sizes", [9, 10], "expected at most 80 cells"),
    "no such word": ("question", [50] * 7, "question of sample 1 is 50,50"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_does_not_fit_is_refused(case, server):
    name, row, words = REFUSED[case]
    inputs = vqa_inputs()
    inputs[name][1] = row
    with Client(server.url, "tvmax-vqa") as client:
        with pytest.raises(SaccadeError, match=words) as error:
            client.infer(inputs)
        assert error.value.exit_code == 2
