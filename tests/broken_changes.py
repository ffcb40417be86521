# SPDX-License-Identifier: Apache-2.0
"""Ways to break a repository, each a function of its folder."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import tiny_artefacts as tiny
from tiny_artefacts import FULL, HALF, MODEL

from saccade.serving.repository.model_config import config_text, parse_config

LIBRARY = "libsaccade_onnxruntime.so"
ROUTES = f"{MODEL}/1/routes.json"


def edit(change, model=FULL):
    """Change the protobuf message of a model's configuration."""

    def apply(repository):
        path = repository / model / "config.pbtxt"
        config = parse_config(path.read_text())
        change(config)
        path.write_text(config_text(config))

    return apply


def put(place, path, value):
    """Set what a path of names, [indices] and [keys] leads to; add to what has many."""
    *way, (key, name) = re.findall(r"\[([^\]]+)\]|([^.\[\]]+)", path)
    for inner, named in way:
        if isinstance(place, dict | list) or inner:
            place = place[int(inner) if inner.isdecimal() else inner or named]
        else:
            place = getattr(place, named)
    if isinstance(place, dict) or key:
        place[int(key) if key.isdecimal() else key or name] = value
    elif hasattr(getattr(place, name), "add") and isinstance(value, dict):
        getattr(place, name).add(**value)
    elif hasattr(getattr(place, name), "append"):
        getattr(place, name).append(value)
    else:
        setattr(place, name, value)


def fields(model, *rows):
    """Cases of a configuration: a path in it, what is put there, and what is said of that field."""
    return _cases(f"{model} ", "fields", lambda change: edit(change, model), rows)


def routes(*rows):
    """Cases of the router's routes: the same."""
    return _cases("routes ", "routes", lambda change: edit_json(ROUTES, change), rows)


def _cases(of, check, edited, rows):
    return {
        of + at: (edited(lambda it, at=at, to=to: put(it, at, to)), check, said_of(at, words))
        for at, to, words in rows
    }


def said_of(path, words):
    """The words behind the last name of the path, unless they are said of another one."""
    return words if words[0] == "^" else f"{re.findall(r'[a-z_]+', path)[-1]}.* {words}"


def also(*changes):
    """Make several changes one after the other."""
    return lambda repository: [change(repository) for change in changes]


def edit_json(name, change):
    """Change a JSON file of the repository."""

    def apply(repository):
        path = repository / name
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return apply


def edit_onnx(change):
    """Change the full model's file, and its manifest so that the hash matches."""

    def apply(repository):
        path = repository / FULL / "1" / "model.onnx"
        proto = onnx.load_model_from_string(path.read_bytes())
        change(proto)
        path.write_bytes(proto.SerializeToString())
        tell_manifest(repository)

    return apply


def tell_manifest(repository, model=FULL):
    """Set the manifest's hash to that of the existing file."""
    digest = tiny.sha256_of(repository / model / "1" / "model.onnx")
    edit_json(f"{model}/{model}.manifest.json", lambda it: it["file"].update(sha256=digest))(
        repository
    )


def swap_models(repository):
    swap(*(repository / name / "1" / "model.onnx" for name in (FULL, HALF)))


def swap(one, other):
    """Swap the contents of two files."""
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second), other.write_bytes(first)


def swap_models_and_hashes(repository):
    swap_models(repository)
    tell_manifest(repository, FULL)
    tell_manifest(repository, HALF)


def with_library(data):
    """Add a library of custom ops with these bytes."""

    def apply(repository):
        edit(lambda it: it.model_operations.op_library_filename.append(LIBRARY))(repository)
        if data is not None:
            (repository / FULL / "1" / LIBRARY).write_bytes(data())

    return apply


def foreign_library():
    """Return a shared library that exists on every machine but is not for ONNX Runtime."""
    libraries = (Path(np.__file__).parent / "random").glob("*.so")
    return min(libraries, key=lambda path: path.stat().st_size).read_bytes()


def spoil_weights(proto):
    values = onnx.numpy_helper.to_array(proto.graph.initializer[0]).copy()
    values[0, 0] = np.nan
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values, "embed"))


def put_weights_elsewhere(proto):
    onnx.external_data_helper.set_external_data(proto.graph.initializer[0], "weights.bin")


def call_a_foreign_op(proto):
    proto.graph.node[-1].domain = "com.example"
    proto.opset_import.add(domain="com.example", version=1)


def other_answer(repository):
    from safetensors.numpy import load, save

    path = repository / FULL / "warmup" / "sample.safetensors"
    arrays = load(path.read_bytes())
    arrays["output/logits"] = arrays["output/logits"] * 1.01
    path.write_bytes(save(arrays, metadata={"saccade": "real"}))


def write(name, data):
    """Write a file of the repository."""

    def apply(repository):
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return apply


def remove(name):
    return lambda repository: (repository / name).unlink()


def truncate(name):
    path_of = lambda repository: repository / name  # noqa: E731
    return lambda it: path_of(it).write_bytes(path_of(it).read_bytes()[:100])


def link_out(repository):
    path = repository / FULL / "labels.txt"
    path.unlink()
    path.symlink_to(sys.executable)


def pipe(repository):
    path = repository / FULL / "labels.txt"
    path.unlink()
    os.mkfifo(path)
