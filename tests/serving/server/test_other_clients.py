# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/serving.md for those who have no saccade: run as they are written."""

import http.client
import json
import re
import shutil
import subprocess

import pytest
from places import ROOT

PAGE = (ROOT / "docs" / "serving.md").read_text("utf-8")
SECTION = PAGE.split("\n## Without saccade\n")[1].split("\n### ")[0]
SHELL = re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
(NODE,) = re.findall(r"```js\n(.*?)```", SECTION, re.DOTALL)
IMAGE = ROOT / "docs" / "examples" / "seven.png"


def program(name):
    if not (found := shutil.which(name)):
        pytest.skip(f"{name} is not installed: apt-get install {name.replace('node', 'nodejs')}")
    return found


def best_of(labels):
    """Probabilities of `probability:index:label`, which come best first."""
    values = [float(label.split(":")[0]) for label in labels]
    assert len(values) == 3 and values == sorted(values, reverse=True)
    return labels[0].split(":")[2]


@pytest.fixture
def here(server):
    """A block with the address of the test's server."""
    return lambda block: block.replace("127.0.0.1:8000", server.http_url.removeprefix("http://"))


def test_an_image_is_a_body_by_curl(server, client, here, tmp_path):
    program("curl")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    raw, with_json = (
        subprocess.run(
            ["sh", "-e", "-c", here(block)], cwd=tmp_path, capture_output=True, check=True
        )
        for block in SHELL
    )
    assert raw.stdout == b""
    first, _ = json.JSONDecoder().raw_decode((tmp_path / "answer.bin").read_text("latin-1"))
    assert {output["name"] for output in first["outputs"]} >= {"probabilities", "variant"}
    (output,) = json.loads(with_json.stdout)["outputs"]
    (answer,) = client.classify([IMAGE], budget=0.5)
    assert best_of(output["data"]) == answer.labels[0][0]


def test_the_same_bytes_without_curl(server):
    host = server.http_url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    headers = {"Inference-Header-Content-Length": "0"}
    assert all(f"{name}: {value}" in SHELL[0] for name, value in headers.items())
    connection.request("POST", f"/v2/models/{server.model}/infer", IMAGE.read_bytes(), headers)
    answer = connection.getresponse()
    length = int(answer.headers["Inference-Header-Content-Length"])
    assert answer.status == 200 and json.loads(answer.read()[:length])["model_name"] == server.model
    connection.close()


def test_node_asks_without_a_package(server, client, here):
    node = program("node")
    done = subprocess.run(
        [node, "-e", here(NODE)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    labels = json.loads(done.stdout.replace("'", '"'))
    (answer,) = client.classify([IMAGE], budget=0.5)
    assert best_of(labels) == answer.labels[0][0]
