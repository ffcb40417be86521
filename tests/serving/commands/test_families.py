# SPDX-License-Identifier: Apache-2.0
"""Every family behind a server: what the client gets is what its files answer in this process."""

import json
import re
from contextlib import suppress

import numpy as np
import pytest
from bulk_jobs import in_this_process
from family_server import FAMILIES, FOLLOWING, LABELS, MANY, TEMPLATES, options_of, serving
from local_parity import as_deployed, check_alike
from metric_pages import numbers_in, page_of
from picture_files import picture_files
from PIL import Image
from router_code import router_module

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.models.captioner.caption_search import beam_search, greedy_search, step_of
from saccade.models.slot_attention.initial import initial_states
from saccade.models.sparo.text_tokens import encode_texts
from saccade.models.sparo.zero_shot import class_vectors
from saccade.models.vqa.questions import question_tokens
from saccade.serving.bulk.bulk import bulk
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.client.client import Change, Client
from saccade.serving.client.readiness import small_picture
from saccade.serving.commands import cli
from saccade.serving.commands.pictures import masks_png
from saccade.serving.local import artefact

IMAGES = np.random.default_rng(7).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def served(needs_server, tmp_path_factory):
    """By family: the one server of all of them, and the files behind it."""
    with serving(tmp_path_factory.mktemp("families")) as by_family:
        yield by_family


@pytest.fixture
def asked(served):
    """A client of the family's server and its files, to be run by role and budget."""
    ort = pytest.importorskip("onnxruntime")
    opened = []

    def ask(family):
        running, folder = served(family)
        client = Client(running.url, family)
        opened.append(client)
        variants = {variant.name: variant for variant in ArtefactFolder(folder).variants}

        def run(variant, role, **inputs):
            manifest = variants[variant].components[role]
            session = ort.InferenceSession(folder / manifest.file.name)
            names = [value.name for value in manifest.outputs]
            return dict(zip(names, session.run(names, inputs), strict=True))

        return client, run

    yield ask
    for client in opened:
        client.close()


def test_sot_answers_at_each_of_its_heads(asked):
    client, run = asked("sot")
    assert client.ready()
    budgets = {1.0: "sot-exact-fp32", 0.4: "sot-class-fp32", "class": "sot-class-fp32"}
    for budget, name in budgets.items():
        actual = client.infer({"image": IMAGES}, budget=budget)
        expected = run(name, "", image=IMAGES)
        for output, array in expected.items():
            np.testing.assert_allclose(actual[output], array, **CLOSE)
        assert client.classify(IMAGES, budget=budget)[0].variant == name
    with pytest.raises(SaccadeError, match=r"budget is 'slow', expected .* a budget's name"):
        client.classify(IMAGES, budget="slow")


def test_sparo_embeds_images_and_texts_by_the_same_variant(asked):
    client, run = asked("sparo")
    assert client.ready()
    for budget, budget_name in ((1.0, "b1000"), ("1/6", "b0167"), (2 / 3, "b0667")):
        name = f"sparo-{budget_name}-fp32"
        images = client.embed(IMAGES, budget)
        texts = client.embed_text(["a red circle", "blue square"], budget)
        assert images.variant == texts.variant == name
        np.testing.assert_allclose(
            images.vectors, run(name, "image", image=IMAGES)["embedding"], **CLOSE
        )
        assert images.similarity(texts).shape == (3, 2)
    with pytest.raises(SaccadeError, match="different slots"):
        client.embed(IMAGES, 1.0).similarity(texts)


def test_sparo_labels_of_the_request_and_of_the_deployment_agree(asked):
    client, run = asked("sparo")
    deployed = client.classify(IMAGES, top=3)
    given = client.classify(IMAGES, top=3, labels=LABELS, templates=TEMPLATES)
    metadata = client.view().runtime_metadata("sparo-b1000-fp32")
    prompts = [template.replace("{}", label) for label in LABELS for template in TEMPLATES]
    codes = run("sparo-b1000-fp32", "text", tokens=encode_texts(metadata, prompts))["embedding"]
    classes = class_vectors(codes.reshape(3, 2, -1))
    logits = metadata["logit_scale"] * client.embed(IMAGES).vectors @ classes.T
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for row, one, other in zip(chances, deployed, given, strict=True):
        expected = dict(zip(LABELS, row, strict=True))
        for actual in (one, other):
            assert dict(actual.labels) == pytest.approx(expected, abs=1e-4)
    # Its tokenizer is a list of words, which has no "photo".
    (usual,) = client.classify(IMAGES[:1], top=3, labels=LABELS)
    (said,) = client.classify(IMAGES[:1], top=3, labels=LABELS, templates=("a {}",))
    assert dict(usual.labels) == pytest.approx(dict(said.labels), abs=1e-6)


@pytest.mark.parametrize("family", FOLLOWING)
def test_a_policy_answers_each_image_as_its_chain_does_offline(asked, served, family, eventually):
    client, _ = asked(family)
    confidence = router_module("confidence").confidence
    place = served(family)[0].repository / family / "1"
    (policy,) = json.loads((place / "routes.json").read_text())["policies"]
    names = [step["variant"] for step in policy["steps"]]
    assert len(names) > 1 and client.view().policies == (policy["name"],)
    alone = [
        client.infer({"image": MANY}, ["logits"], budget=client.view().budget(name))["logits"]
        for name in names
    ]
    ends = np.full(len(MANY), len(names) - 1)
    for at in reversed(range(len(names) - 1)):
        step = policy["steps"][at]
        sure = confidence(policy["measure"], alone[at], step["temperature"])
        ends[sure >= step["threshold"]] = at
    assert len({*ends}) == len(names)
    outputs = ["logits", "probabilities", "variant", "variant_sha256", "steps", "certified"]
    actual = client.infer({"image": MANY}, outputs, parameters={"policy": policy["name"]})
    expected = np.array(alone)[ends, np.arange(len(MANY))]
    np.testing.assert_allclose(actual["logits"], expected, **CLOSE)
    np.testing.assert_array_equal(actual["steps"][:, 0], ends + 1)
    assert actual["certified"].all() and actual["certified"].dtype == bool
    answers = client.classify(MANY, policy=policy["name"], strict=True)
    assert [answer.variant for answer in answers] == [names[end] for end in ends]
    assert [answer.steps for answer in answers] == (ends + 1).tolist()
    assert all(answer.certified for answer in answers)
    counted = {"model": family, "policy": policy["name"], "certified": "true"}
    for at, name in enumerate(names):
        labels = {**counted, "step": str(at + 1), "variant": name}
        rows = 2 * int((ends == at).sum())  # of both requests
        eventually(lambda labels=labels, rows=rows: followed(served(family)[0], labels) == rows, 5)
    best = [answer.labels[0][0] for answer in client.classify(MANY, max_risk=0)]
    answers = client.classify(MANY)
    assert best == [answer.labels[0][0] for answer in answers]
    own = client.classify(MANY[:2], policy=policy["name"], max_latency_ms=50_000)
    said = {(one.steps, one.certified, one.degraded) for one in answers}
    if family == "sot":
        assert client.view().slo_ms == 60_000 and said == {(1, True, False)}
        eventually(lambda: adapted(served(family)[0], family) >= 1, 5)
    else:
        assert client.view().slo_ms is None and said == {(None, None, None)}
    assert {one.degraded for one in own} == {False}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_artefact_answers_as_its_server_does(asked, served, family, tmp_path, monkeypatch):
    running, folder = served(family)
    repository = running.repository / family
    as_deployed(monkeypatch, repository, alike=family != "sot")  # that has an objective
    files = [*picture_files(tmp_path), *MANY]
    with artefact.load_artefact(folder, **options_of(family, tmp_path)) as local:
        check_alike(local, asked(family)[0], family, files)
        if family in FOLLOWING:
            (policy,) = json.loads((repository / "1" / "routes.json").read_text())["policies"]
            steps = {one.steps for one in local.classify(files, policy="auto")}
            assert steps == set(range(1, len(policy["steps"]) + 1)) != {1}


def test_images_follow_a_policy_of_rounds(asked, served):
    client, run = asked("slot-attention")
    place = served("slot-attention")[0].repository / "slot-attention" / "1"
    (policy,) = json.loads((place / "routes.json").read_text())["policies"]
    first, last = (step["variant"] for step in policy["steps"])
    rule = client.view().runtime_metadata(first)["initial_state"]
    states = initial_states(rule, len(MANY), 3, seed=4)
    expected = [run(name, "", image=MANY, initial_state=states) for name in (first, last)]
    sure = router_module("confidence").mask_confidence(policy["measure"], expected[0]["masks"])
    ends = np.where(sure >= policy["steps"][0]["threshold"], 0, 1)
    assert 0 < ends.sum() < len(MANY)
    actual = client.segment(MANY, seed=4, policy="auto", strict=True)
    for row, (one, end) in enumerate(zip(actual, ends.tolist(), strict=True)):
        assert (one.variant, one.steps, one.certified) == ((first, last)[end], end + 1, True)
        for name in ("masks", "slots", "positions", "scales", "reconstruction"):
            np.testing.assert_allclose(getattr(one, name), expected[end][name][row], **CLOSE)
    full = client.segment(MANY[:2], seed=4, max_risk=0)
    assert [one.variant for one in full] == [last] * 2 and full[0].to_dict()["certified"]


def test_texts_follow_no_policy(asked):
    tokens = np.ones((1, 8), np.int64)
    with pytest.raises(
        SaccadeError, match="inputs tokens: the answer has no logits, which a policy"
    ):
        asked("sparo")[0].infer({"tokens": tokens}, ["logits"], parameters={"policy": "auto"})


def followed(running, labels):
    """Samples that the server's page counts as answered by a step of a policy."""
    return numbers_in(page_of(running.metrics_url))("saccade_policy_answers_total", **labels)


def adapted(running, family):
    """Requests that the page counts as answered by the full variant, without degradation."""
    labels = {"model": family, "choice": "sot-exact-fp32", "degraded": "false"}
    return numbers_in(page_of(running.metrics_url))("saccade_adaptive_answers_total", **labels)


def test_classes_of_the_outputs_of_a_policy_end_no_server(asked, served):
    grpc = pytest.importorskip("tritonclient.grpc")
    client, running = asked("sot")[0], served("sot")[0]
    pid, given = running.pid, grpc.InferInput("image", [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([[small_picture()]], dtype=object))
    with grpc.InferenceServerClient(running.url) as connection:
        for output in ("steps", "certified", "degraded"):
            for count in (1, 1000, 2**62):
                wanted = grpc.InferRequestedOutput(output)
                wanted._get_tensor().parameters["classification"].int64_param = count
                with suppress(grpc.InferenceServerException):
                    connection.infer("sot", [given], outputs=[wanted], parameters={"max_risk": 0.5})
    assert client.ready() and running.pid == pid


def test_policies_on_the_command_line(served, tmp_path, capsys):
    files = [str(tmp_path / f"{index}.png") for index in range(8)]
    for file, pixels in zip(files, MANY, strict=False):
        Image.fromarray(pixels).save(file)
    where = ["--model", "sot", "--url", served("sot")[0].url, "--timeout-s", "60"]
    assert cli.run(["classify", *files, *where, "--policy", "auto"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(re.search(r"\(sot-.*, step [12]\)$", line) for line in lines)
    assert cli.run(["classify", *files, *where, "--max-risk", "0", "--strict", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert (first["variant"], first["steps"], first["certified"]) == ("sot-exact-fp32", 1, True)
    assert cli.run(["classify", *files, *where, "--policy", "lunch"]) == 2
    assert "unknown policy 'lunch', expected one of:" in capsys.readouterr().err
    where[1] = "vqa"
    assert cli.run(["answer", *files, *where, "--question", "left ?", "--policy", "auto"]) == 2
    assert "vqa has no policies. Run `saccade calibrate`" in capsys.readouterr().err
    assert cli.run(["embed", *files, *where, "--policy", "auto"]) == 2
    assert "vqa is a model of family vqa, which does not embed images" in capsys.readouterr().err


def test_slots_are_drawn_by_seed_and_place_and_painted_again(asked):
    client, run = asked("slot-attention")
    assert client.ready()
    rule = client.view().runtime_metadata("slot-attention-t2-fp32")["initial_state"]
    for seed, slots in ((0, None), (5, 4)):
        states = initial_states(rule, 3, slots or 3, seed=seed)
        expected = run("slot-attention-t2-fp32", "", image=IMAGES, initial_state=states)
        actual = client.segment(IMAGES, seed=seed, slots=slots)
        for index, one in enumerate(actual):
            for name in ("masks", "slots", "positions", "scales"):
                np.testing.assert_allclose(getattr(one, name), expected[name][index], **CLOSE)
    state = {name: expected[name][:1] for name in ("slots", "positions", "scales")}
    painted = client.infer(state)["reconstruction"]
    again = run("slot-attention-t2-fp32", "decode", **state)["reconstruction"]
    np.testing.assert_allclose(painted, again, **CLOSE)
    same = client.edit(IMAGES[0], Change(slot=1))
    removed = client.edit(IMAGES[0], Change(slot=1, remove=True))
    assert same.shape == (16, 16, 3) and not np.array_equal(same, removed)


def test_the_command_line_writes_masks_and_pictures(served, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    running, _ = served("slot-attention")
    scene = tmp_path / "scene.png"
    Image.fromarray(IMAGES[0]).save(scene)
    where = ("--model", "slot-attention", "--url", running.url, "--json")

    def call(command, *arguments):
        assert cli.run([command, str(scene), *map(str, arguments), *where]) == 0
        return json.loads(capsys.readouterr().out)

    (one,) = call("segment", "--out", tmp_path / "first", "--policy", "auto", "--strict")
    assert one["certified"] and one["steps"] in (1, 2)
    (answers,) = call("segment", "--out", tmp_path / "drawn", "--slots", 2)
    with Image.open(tmp_path / "drawn" / "scene-slots.png") as drawn:
        assert drawn.mode == "RGB" and drawn.height == 256 and drawn.width >= 2 * 256
        left = np.asarray(drawn)[::16, :256:16]
    np.testing.assert_array_equal(left, IMAGES[0])  # the image itself, a square per pixel
    (answers,) = call("segment", "--raw", "--out", tmp_path / "masks", "--slots", 2)
    assert [slot["slot"] for slot in answers["slots"]] == [0, 1]
    assert sum(slot["share"] for slot in answers["slots"]) == pytest.approx(1)
    with Image.open(tmp_path / "masks" / "scene-slots.png") as masks:
        assert masks.mode == "P" and masks.size == (16, 16)
    call("edit", "--slot", 1, "--move", "-0.01,0.02", "--out", tmp_path / "edited.png")
    call("show", "--out", tmp_path / "looked.png")
    for name in ("edited.png", "looked.png"):
        with Image.open(tmp_path / name) as picture:
            picture.load()
    with Image.open(tmp_path / "edited.png") as edited:
        assert edited.height == 256
    call("edit", "--remove", "--raw", "--out", tmp_path / "raw.png")
    with Image.open(tmp_path / "raw.png") as raw:
        assert raw.size == (16, 16)
    assert cli.run(["edit", str(scene), "--out", str(tmp_path / "same.png"), *where]) == 2
    assert "Found no change" in capsys.readouterr().err and not (tmp_path / "same.png").exists()
    before = (tmp_path / "edited.png").read_bytes()
    code = cli.run(["edit", str(scene), "--remove", "--out", str(tmp_path / "edited.png"), *where])
    assert code == 2 and (tmp_path / "edited.png").read_bytes() == before


@pytest.mark.parametrize(
    "family, ask", [("captioner", "saccade caption"), ("vqa", "saccade answer"),
                    ("slot-attention", "saccade segment")],
)  # fmt: skip
def test_images_are_classified_and_embedded_by_who_can(asked, family, ask):
    client, _ = asked(family)
    for call in (client.classify, client.embed):
        with pytest.raises(SaccadeError, match=f"of family {family}, which does not.*{ask}"):
            call(IMAGES)


def test_words_that_a_model_does_not_know_are_told(served, tmp_path, capsys):
    running, folder = served("vqa")
    image = tmp_path / "image.png"
    Image.fromarray(IMAGES[0]).save(image)
    known = ArtefactFolder(folder).variants[0].runtime_metadata["words"][0]
    where = (str(image), "--model", "vqa", "--url", running.url)
    for question, unknown in ((f"{known} elephant Moon", ["elephant", "moon"]), (known, [])):
        assert cli.run(["answer", *where, "--question", question, "--json"]) == 0
        captured = capsys.readouterr()
        (one,) = json.loads(captured.out)
        assert one["unknown_words"] == unknown
        assert ("does not know 'elephant', 'moon'" in captured.err) == bool(unknown)
        strict = cli.run(["answer", *where, "--question", question, "--strict"])
        assert strict == (2 if unknown else 0)
        capsys.readouterr()


def test_masks_are_a_palette_of_the_slots(tmp_path):
    owners = np.array([[0, 1], [2, 9]], np.uint8)
    (tmp_path / "masks.png").write_bytes(masks_png(owners))
    with Image.open(tmp_path / "masks.png") as image:
        assert image.mode == "P"
        np.testing.assert_array_equal(np.asarray(image), owners)
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_bulk_answers_are_the_served_ones(asked, served, family, tmp_path):
    """Bit for bit, of images that come one by one and as arrays, with what else a family takes."""
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    client, _ = asked(family)
    images = {"slot-attention": MANY[:20]}.get(family, IMAGES)
    questions = np.resize(["what is left ?", "red circle", "blue ?"], len(images))
    np.savez(tmp_path / "inputs.npz", image=images, question=questions)
    own = {"slot-attention": {"seed": 5, "policy": "auto"}, "captioner": {"beam": 2}}
    own = own.get(family, {})
    options = BulkOptions(
        str(tmp_path / "inputs.npz"), str(tmp_path / "out"), workers="1", top=100, **own
    )
    with in_this_process():
        bulk(served(family)[1], options)
    rows = pq.read_table(tmp_path / "out" / "answers").to_pylist()
    assert [row["id"] for row in rows] == [f"inputs.npz#{i}" for i in range(len(images))]
    if family == "captioner":
        assert [row["caption"] for row in rows] == [
            caption.text for caption in client.caption(images, **own)
        ]
        return
    if family == "slot-attention":
        assert {row["steps"] for row in rows} == {1, 2}
        for row, answer in zip(rows, client.segment(images, **own), strict=True):
            assert (row["variant"], row["steps"]) == (answer.variant, answer.steps)
            assert np.array_equal(np.uint8(row["owners"]), answer.owners.ravel())
            assert np.array_equal(np.float32(row["slots"]), answer.slots.ravel())
        return
    inputs = {"image": list(images)}
    if family == "vqa":
        metadata = client.view().runtime_metadata("vqa-b1000-fp32")
        inputs["question"] = np.stack([question_tokens(metadata, text) for text in questions])
    output = "embedding" if family == "sparo" else "probabilities"
    answers = client.infer(inputs, [output])[output]
    if output == "probabilities":
        answers = -np.sort(-answers, axis=1)
    assert np.array_equal(np.array([row[output] for row in rows], np.float32), answers)


def test_questions_are_answered(asked):
    client, run = asked("vqa")
    questions = ["what is left ?", "red circle", "blue ?"]
    metadata = client.view().runtime_metadata("vqa-b1000-fp32")
    tokens = np.stack([question_tokens(metadata, question) for question in questions])
    expected = run("vqa-b1000-fp32", "", image=IMAGES, question=tokens)
    actual = client.answer(IMAGES, questions, top=5)
    for one, row in zip(actual, expected["probabilities"], strict=True):
        served = dict(one.labels)
        assert [served[f"answer {index}"] for index in range(5)] == pytest.approx(row, abs=1e-5)
    maps = client.infer({"image": list(IMAGES), "question": tokens}, ["attention"])["attention"]
    np.testing.assert_allclose(maps, expected["attention"], **CLOSE)


def test_captions_are_those_of_the_search_in_process(asked):
    client, run = asked("captioner")
    assert client.ready()
    name = "captioner-b1000-fp32"
    metadata = client.view().runtime_metadata(name)
    step = step_of(lambda arrays: run(name, "step", **arrays))
    settings = {"start": metadata["start"], "max_length": 4}
    encoded = run(name, "encode", image=IMAGES)
    # No word is likelier than the end in a model that was never trained: take one as the end.
    for end in (metadata["end"], 5):
        greedy = greedy_search(step, encoded, end=end, **settings)
        actual = client.caption(IMAGES, beam=1, max_length=4, end=str(end))
        for one, expected in zip(actual, greedy, strict=True):
            assert len(one.text.split()) == len(expected.tokens)
            np.testing.assert_allclose(one.attention, expected.attention, **CLOSE)
    first = {key: value[:1] for key, value in encoded.items()}
    best = beam_search(step, first, end=metadata["end"], beam=3, **settings)[0]
    (one,) = client.caption(IMAGES[:1], beam=3, max_length=4)
    words = [metadata["words"][token - 4] for token in best.tokens]
    assert one.text.split() == words
    np.testing.assert_allclose(one.attention, best.attention, **CLOSE)


REFUSED = {
    "both towers": (
        "sparo", {"image": IMAGES, "tokens": np.ones((3, 8), int)}, {},
        "inputs are image, tokens; expected image, or tokens",
    ),
    "slots without their place": (
        "slot-attention", {"slots": np.zeros((1, 3, 12))}, {},
        "expected image \\[and initial_state\\], or slots and positions and scales",
    ),
    "as many places as slots": (
        "slot-attention",
        {"slots": np.ones((1, 3, 12)), "positions": np.ones((1, 2, 2)),
         "scales": np.ones((1, 3, 2))},
        {}, "positions has shape \\[1, 2, 2\\], expected \\[b k 2\\], k = 3",
    ),
    "a seed with a state": (
        "slot-attention", {"image": IMAGES[:1], "initial_state": np.zeros((1, 3, 16))},
        {"seed": "1"}, "leave one of them out",
    ),
    "no slot": ("slot-attention", {"image": IMAGES}, {"slots": "0"}, "from 1 to 64"),
    "another family's parameter": ("vqa", {"image": IMAGES}, {"seed": "1"}, "unknown parameter"),
    "no question": ("vqa", {"image": IMAGES}, {}, "expected image and question"),
    "no such word": (
        "vqa", {"image": IMAGES, "question": np.full((3, 6), 99)}, {}, "expected 0 to 15",
    ),
    "no word of the model": ("captioner", {"image": IMAGES}, {"end": "zebra"}, "'zebra'"),
    "longer than was trained": ("captioner", {"image": IMAGES}, {"max_length": "99"}, "1 to 6"),
    "an unknown input": ("captioner", {"images": IMAGES}, {}, "no input 'images'"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(REFUSED, key=lambda case: REFUSED[case][0]))
def test_refuses_and_says_what_was_expected(asked, case):
    family, inputs, parameters, words = REFUSED[case]
    client, _ = asked(family)
    with pytest.raises(SaccadeError, match=words) as error:
        client.infer(inputs, parameters=parameters)
    assert error.value.exit_code == 2
    assert "/" not in str(error.value).replace("127.0.0.1", "")
