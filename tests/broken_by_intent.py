# SPDX-License-Identifier: Apache-2.0
"""Repositories manipulated to run or take more than saccade writes; cases as in BROKEN."""

import os

from broken_changes import ROUTES, also, edit, edit_json, fields, routes, write
from tiny_artefacts import FULL, MODEL

# All hashes match: anyone who can write to a repository can write its description too.
HOSTILE = {
    "a library of another name": (
        also(
            write(f"{FULL}/1/libother.so", b"\x7fELF"),
            edit(lambda it: it.model_operations.op_library_filename.append("libother.so")),
        ),
        "fields", r"\['libother.so'\], expected \['libsaccade_onnxruntime.so'\]",
    ),
    "a router that tells of another family": (
        edit(
            lambda it: setattr(
                it.parameters["saccade"], "string_value",
                it.parameters["saccade"].string_value.replace('"nac"', '"sot"'),
            ),
            MODEL,
        ),
        "fields", "parameters.saccade.family is 'sot', expected 'nac'",
    ),
    "a router that tells two families": (
        edit(
            lambda it: setattr(
                it.parameters["saccade"], "string_value",
                it.parameters["saccade"].string_value.replace("{", '{"family": "sot", ', 1),
            ),
            MODEL,
        ),
        "fields", "parameters.saccade is .*sot.*, expected '{",
    ),
    "warm-ups by the dozen": (
        edit(lambda it: it.model_warmup.extend([it.model_warmup[0]] * 12)),
        "fields", r"model_warmup\[6\] is .*, which saccade does not write",
    ),
    "a library that the server looks for": (
        write(f"{FULL}/1/libtriton_onnxruntime.so", b"\x7fELF"), "content", "not a file that",
    ),
    "code beside a model": (write(f"{FULL}/1/model.py", b"import os"), "content", "1/model.py"),
    "a stub in the router": (
        write(f"{MODEL}/triton_python_backend_stub", b"\x7fELF"), "content", "backend_stub",
    ),
    "another configuration of the router": (
        write(f"{MODEL}/configs/fast.pbtxt", b'name: "x"'), "content", "configs/fast.pbtxt",
    ),
    "vectors that no route names": (
        write(f"{MODEL}/1/more.npy", b"x"), "content", "1/more.npy",
    ),
    "warm-up data that no input has": (
        write(f"{FULL}/warmup/more", b"x"), "content", "warmup/more",
    ),
    "a file beside the models": (write("sitecustomize.py", b"import os"), "top", "sitecustomize"),
    "models by the thousand": (
        edit_json("saccade.json", lambda it: it["variants"].extend(f"a{n}" for n in range(1000))),
        "models", "names 1003 models, expected at most 512",
    ),
    "routes with a key too many": (
        edit_json(ROUTES, lambda it: it.update({"variants.score": 1})), "routes", "score' is 1, wh",
    ),
    "routes of a hundred MiB": (
        lambda it: os.truncate(it / ROUTES, 100 << 20), "routes", "bytes, expected at most",
    ),
}  # fmt: skip
UNKNOWN = "which saccade does not write"
UNPACKED = "parameters[EXECUTION_ENV_PATH].string_value"  # an environment that a server unpacks
THREADS = "parameters[intra_op_thread_count].string_value"
ACCELERATORS = "optimization.execution_accelerators.cpu_execution_accelerator"
RESOURCES = "instance_group[0].rate_limiter.resources"
HOSTILE |= fields(
    MODEL,
    (UNPACKED, "$$TRITON_MODEL_DIRECTORY/x.tar.gz", f"^.*ENV_PATH is '.*x.tar.gz', {UNKNOWN}"),
    ("model_repository_agents.agents", {"name": "checksum"}, "is .*checksum"),
    ("runtime", "libevil.so", f"is 'libevil.so', {UNKNOWN}"),
    ("default_model_filename", "routes.json", f"is 'routes.json', {UNKNOWN}"),
    ("output[0].label_filename", "../../etc/passwd", "is '../../etc/passwd'"),
    ("instance_group[0].count", 1000, "is 1000, expected 1"),
)
HOSTILE |= fields(
    FULL,
    (UNPACKED, "x.tar.gz", f"^.*EXECUTION_ENV_PATH is 'x.tar.gz', {UNKNOWN}"),
    ("model_warmup[0].count", 2**32 - 1, f"is 4294967295, {UNKNOWN}"),
    (ACCELERATORS, {"name": "openvino"}, "is .*openvino"),
    (THREADS, "100000", "^.*intra_op_thread_count is '100000', expected 0 to 256"),
    (RESOURCES, {"name": "a b", "count": 1}, "^.*--rate-limit: found 'a b', expected a word"),
    ("dynamic_batching.priority_levels", 10**9, "is '1000000000', expected 2 to 100"),
)
HOSTILE |= routes(
    ("preprocessing.max_image_mib", 2**20, "is 1048576, expected at most 1024"),
    ("preprocessing.max_megapixels", 5_000, "is 5000, expected at most 1000"),
    ("preprocessing.interpolation", "nearest", "is 'nearest', expected 'bilinear'"),
    ("preprocessing.height_px", 20_000, "is 20000, expected at most 16384"),
    ("family", "captioner", "is 'captioner', expected 'nac'"),
    ("variants[0].score", "1e9", "is '1e9', expected a number"),
    ("variants[0].more", 1, "is 1, whi"),
)
