# SPDX-License-Identifier: Apache-2.0
"""`saccade explore`: its page in Chromium, before the embedded server, and without a browser."""

import http.client
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import picture_files
import pytest
from browsers import Tab, browser, chromium_or_skip, tab
from chaos.slow_variant import Scene
from family_folders import family_folder
from joined_repository import join
from PIL import Image

from saccade.core.errors import SaccadeError
from saccade.serving.client.client import Change, Client
from saccade.serving.commands.cli import run
from saccade.serving.commands.explore.explorer import Explorer, ExploreRequest
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.server import ServeOptions, Server

FREE_PORTS = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "ready_port": 0}
FAMILIES = ("vqa", "slot-attention", "captioner", "sparo")
HARMLESS = ("debug:", "info:", "log:", "warning:")  # lines of a console


@pytest.fixture(scope="module")
def server(needs_server, tiny_folder, tmp_path_factory) -> Iterator[Server]:
    """One server of a tiny model of most families."""
    place = tmp_path_factory.mktemp("explored")
    folders = {family: family_folder(family) for family in FAMILIES} | {"nac": tiny_folder}
    for family, folder in folders.items():
        deploy(folder, RepositoryOptions(out=place / family))
    (place / "all").mkdir()
    with Server(
        join(place / "all", (place / family for family in folders)), ServeOptions(**FREE_PORTS)
    ) as running:
        yield running


@pytest.fixture
def explorer(server) -> Iterator[Callable[[str], Explorer]]:
    """Make the requests of the page without a page."""
    opened: list[Explorer] = []

    def make(model: str) -> Explorer:
        opened.append(Explorer(server.url, model, 30))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def png(*shape: int) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    return picture_files.png(pixels)


def test_answers_are_the_served_ones(explorer, server):
    image = png(16, 16)
    one = explorer("nac")
    replies = one.at_every_budget(ExploreRequest(image, ""))
    with Client(server.url, "nac") as client:
        for reply in replies:
            (expected,) = client.classify([image], reply.budget, top=5)
            assert reply.lines == expected.labels and reply.variant == expected.variant
    assert [one.title(reply.budget) for reply in replies] == ["0.125", "0.25", "0.5", "1"]
    assert all(reply.latency_ms > 0 for reply in replies)


def test_each_family_is_asked_in_its_own_way(explorer):
    image = png(16, 16)
    vqa, slots, captioner, sparo = map(explorer, FAMILIES)
    assert vqa.asks_question and vqa.missing(" ") and not captioner.missing("")
    (budget,) = vqa.budgets
    asked = vqa.answer(ExploreRequest(image, budget, "what is left ?"))
    assert len(asked.lines) == 5 and asked.lines[0] == (asked.best, asked.confidence)
    assert captioner.answer(ExploreRequest(image, captioner.budgets[0])).confidence is None
    assert slots.edits_slots and len(slots.answer(ExploreRequest(image, "t2")).lines) == 3
    changed = [
        slots.edit(ExploreRequest(image, "t2"), Change(1, remove=gone)) for gone in (True, False)
    ]
    assert changed[0] != changed[1]
    assert sparo.takes_labels and sparo.answer(ExploreRequest(image, "b1000")).confidence is None
    labelled = sparo.answer(ExploreRequest(image, "b1000", "red circle, blue square,"))
    assert {name for name, _ in labelled.lines} == {"red circle", "blue square"}


def test_pictures_are_those_of_show(explorer):
    pytest.importorskip("matplotlib")
    one = explorer("vqa")
    picture = one.picture(ExploreRequest(png(16, 16), one.budgets[0], "what is left ?"))
    assert picture.startswith(b"\x89PNG")
    with pytest.raises(SaccadeError, match="--outputs attention"):
        explorer("nac").picture(ExploreRequest(png(8, 8), "b1000"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "neither an artefact nor --url"),
        (("FOLDER", "--url", "127.0.0.1:1"), "both an artefact and --url"),
        (("FOLDER",), "found no artefact"),
        (("FILE",), "found a file, expected a folder"),
        (
            ("--url", "127.0.0.1:1", "--port", "70000"),
            "found 70000, expected a whole number",
        ),
    ],
)
def test_wrong_input_is_refused(words, message, tmp_path, capsys):
    pytest.importorskip("nicegui", reason="not installed: pip install '.[explore]'")
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    named = {"FOLDER": str(tmp_path), "FILE": str(file)}
    assert run(["explore", *(named.get(word, word) for word in words)]) == 2
    assert message in capsys.readouterr().err


@contextmanager
def page(*words: str, log: Path, number: int = signal.SIGINT, ends_s: float = 60) -> Iterator[str]:
    """The command as a user starts it; the address of its page. It has to end in order."""
    pytest.importorskip("nicegui", reason="not installed: pip install '.[explore]'")
    command = [sys.executable, "-m", "saccade", "explore", *words]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=log.parent)
    try:
        yield address_in(log, process)
        process.send_signal(number)
        assert process.wait(ends_s) == 0, log.read_text()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def address_in(log: Path, process: "subprocess.Popen[bytes]") -> str:
    """Wait for the line with the address."""
    while process.poll() is None:
        if found := re.search(r"http://(\S+)/", log.read_text()):
            return found[1]
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    pytest.fail(log.read_text())


@contextmanager
def opened(address: str) -> Iterator[Tab]:
    """The page in a tab; in the end nothing went wrong in it, nor did it ask beyond loopback."""
    own = (f"http://{address}/", f"ws://{address}/", f"blob:http://{address}/", "data:")
    with browser() as running, tab(running, f"http://{address}/") as shown:
        yield shown
        assert not [fault for fault in shown.faults if not fault.startswith(HARMLESS)]
        assert not [request for request in shown.requests if not request.startswith(own)]


def give(shown: Any, name: str, content: bytes) -> None:
    """Choose a file, as a drop does; another one is taken once the browser has the response."""
    file = {"name": name, "mimeType": "image/png", "buffer": content}
    with shown.expect_event("requestfinished", lambda request: "/upload/" in request.url):
        shown.set_input_files("input[type=file]", file)


def choose(shown: Any, model: str) -> None:
    shown.get_by_label("model").click()
    shown.get_by_role("option", name=model, exact=True).click()
    shown.locator(f"[data-model='{model}']").wait_for()


BAD = {
    "notes.png": (b"not an image\n", "not a JPEG, PNG or WebP file"),
    "empty.png": (b"", "0 bytes"),
    "huge.png": (picture_files.png(Image.new("1", (20_000, 20_000))), "at most 50 megapixels"),
    "cut.png": (png(64, 64)[:3000], "truncated or corrupt"),
}


def test_page_in_chromium(server, tmp_path):
    chromium_or_skip()
    log = tmp_path / "log"
    with page("--url", server.url, log=log) as address:
        refuses_other_names(address)
        with opened(address) as seen:
            shown = seen.page
            choose(shown, "nac")
            shown.get_by_text("Drop an image to start").wait_for()
            for name, (content, message) in BAD.items():
                give(shown, name, content)
                shown.get_by_role("alert").get_by_text(
                    re.compile(f"^{name}: .*{message}")
                ).wait_for()
            give(shown, "small.png", png(8, 8))
            shown.get_by_text(re.compile(r"nac-b1000-fp32 in [\d.]+ ms")).wait_for()
            assert not shown.get_by_role("alert").count()
            slider = shown.get_by_role("slider", name="budget")
            slider.locator("[tabindex]").first.press("ArrowLeft")
            shown.get_by_text(re.compile(r"nac-b0500-fp32 in [\d.]+ ms")).wait_for()
            shown.get_by_text("0.125", exact=True).last.wait_for()  # the table of all budgets
            drags_a_slot(shown)
            asks_a_question(shown)
    assert "Traceback" not in log.read_text() and "Error" not in log.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.mark.journey
def test_the_end_waits_for_no_call_of_the_page(needs_server, tmp_path):
    chromium_or_skip()
    scene = Scene(tmp_path, batch_s=0.5)  # slow enough that a long call is not taken for death
    ending = page(str(scene.repository), log=tmp_path / "log", number=signal.SIGTERM, ends_s=15)
    with browser() as running, ExitStack() as tabs:
        with ending as address:
            shown = tabs.enter_context(tab(running, f"http://{address}/")).page
            shown.get_by_text("Drop an image to start").first.wait_for()
            (tmp_path / "pace-1").unlink()
            scene.pace(120.0)
            give(shown, "small.png", picture_files.png(Image.new("L", (4, 4))))
            scene.wait_for(1)


def drags_a_slot(shown: Any) -> None:
    choose(shown, "slot-attention")
    give(shown, "dot.png", png(1, 1))
    shown.get_by_text(re.compile(r"slot-attention-t2-fp32 in|dot.png: .*pixels")).first.wait_for()
    give(shown, "scene.png", png(16, 16))
    drawn = shown.get_by_alt_text("the image with the slot changed")
    drawn.wait_for()
    before = drawn.get_attribute("src")
    board = shown.get_by_alt_text("the image, one color per slot").bounding_box()
    middle = board["x"] + board["width"] / 2, board["y"] + board["height"] / 2
    shown.mouse.move(*middle)
    shown.mouse.down()
    shown.mouse.move(middle[0] + 0.04 * board["width"], middle[1])
    shown.mouse.up()
    shown.wait_for_function(
        "before => document.querySelector('[alt$=\"slot changed\"]').src !== before", arg=before
    )
    slider = shown.get_by_role("slider", name="right")
    moved = float(slider.get_attribute("aria-valuenow"))
    assert 0.02 < moved < 0.2


def asks_a_question(shown: Any) -> None:
    choose(shown, "vqa")
    give(shown, "scene.png", png(16, 16))
    shown.get_by_text("Type a question about the image.").wait_for()
    shown.get_by_label("question").fill("what is left ?")
    shown.get_by_text(re.compile(r"vqa-b1000-fp32 in [\d.]+ ms")).wait_for()
    shown.get_by_alt_text("what the model looked at").wait_for()


def refuses_other_names(address: str) -> None:
    """A site whose name leads to this machine gets nothing, and no body beyond any image."""
    for method, headers, status in (
        ("GET", {"Host": "example.org"}, 400),
        ("GET", {"Origin": "http://example.org"}, 403),
        ("GET", {"Origin": f"http://{address}"}, 200),
        ("POST", {"Content-Length": str(2**40)}, 413),
    ):
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.putrequest(method, "/", skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.getresponse().status == status
        connection.close()
    # The page's own socket is refused too, and says no other site may use it.
    socket = "/_nicegui_ws/socket.io/?EIO=4&transport="
    connection = http.client.HTTPConnection(address, timeout=60)
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    for way, headers in (
        ("polling", {}),
        ("websocket", upgrade | {"Sec-WebSocket-Key": "A" * 22 + "=="}),
    ):
        connection.request("GET", socket + way, headers=headers | {"Origin": "http://a.example"})
        answer = connection.getresponse()
        assert answer.status == 403 and not answer.headers["Access-Control-Allow-Origin"]
        answer.read()
    connection.close()
