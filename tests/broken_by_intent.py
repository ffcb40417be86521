# SPDX-License-Identifier: Apache-2.0
"""Repositories manipulated to run or take more than saccade writes; cases as in BROKEN."""

import os

from broken_changes import also, edit, edit_json, parameter, write
from tiny_artefacts import FULL, MODEL

ROUTES = f"{MODEL}/1/routes.json"
# All hashes match: anyone who can write to a repository can write its description too.
HOSTILE = {
    "a library of another name": (
        also(
            write(f"{FULL}/1/libother.so", b"\x7fELF"),
            edit(lambda it: it.model_operations.op_library_filename.append("libother.so")),
        ),
        "fields", r"\['libother.so'\], expected \['libsaccade_onnxruntime.so'\]",
    ),
    "an environment that the router unpacks": (
        edit(parameter("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/x.tar.gz"), MODEL),
        "fields", "EXECUTION_ENV_PATH is '.*x.tar.gz', which saccade does not write",
    ),
    "an environment that a variant unpacks": (
        edit(parameter("EXECUTION_ENV_PATH", "x.tar.gz")),
        "fields", "EXECUTION_ENV_PATH is 'x.tar.gz', which saccade does not write",
    ),
    "an agent before the router": (
        edit(lambda it: it.model_repository_agents.agents.add(name="checksum"), MODEL),
        "fields", "model_repository_agents.agents is .*checksum",
    ),
    "another runtime of the router": (
        edit(lambda it: setattr(it, "runtime", "libevil.so"), MODEL),
        "fields", "runtime is 'libevil.so', which saccade does not write",
    ),
    "another file as the router": (
        edit(lambda it: setattr(it, "default_model_filename", "routes.json"), MODEL),
        "fields", "default_model_filename is 'routes.json', which saccade does not write",
    ),
    "labels of the router from elsewhere": (
        edit(lambda it: setattr(it.output[0], "label_filename", "../../etc/passwd"), MODEL),
        "fields", r"output\[logits\].label_filename is '../../etc/passwd'",
    ),
    "two routers": (
        edit(lambda it: setattr(it.instance_group[0], "count", 1000), MODEL),
        "fields", "count is 1000, expected 1",
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
    "a warm-up of four billion rounds": (
        edit(lambda it: setattr(it.model_warmup[0], "count", 2**32 - 1)),
        "fields", r"model_warmup\[.*\].count is 4294967295, which saccade does not write",
    ),
    "warm-ups by the dozen": (
        edit(lambda it: it.model_warmup.extend([it.model_warmup[0]] * 12)),
        "fields", r"model_warmup\[6\] is .*, which saccade does not write",
    ),
    "an accelerator": (
        edit(
            lambda it: it.optimization.execution_accelerators.cpu_execution_accelerator.add(
                name="openvino"
            )
        ),
        "fields", "optimization.execution_accelerators.cpu_execution_accelerator is .*openvino",
    ),
    "threads without end": (
        edit(parameter("intra_op_thread_count", "100000")),
        "fields", "intra_op_thread_count is '100000', expected 0 to 256",
    ),
    "a resource of several words": (
        edit(
            lambda it: it.instance_group[0].rate_limiter.resources.add(name="gpu gpu", count=1)
        ),
        "fields", "--rate-limit: found 'gpu gpu', expected a word",
    ),
    "priorities without end": (
        edit(lambda it: setattr(it.dynamic_batching, "priority_levels", 10**9)),
        "fields", "priority_levels is '1000000000', expected 2 to 100",
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
    "images of a terabyte": (
        edit_json(ROUTES, lambda it: it["preprocessing"].update(max_image_mib=2**20)),
        "routes", "max_image_mib is 1048576, expected at most 1024",
    ),
    "images without end": (
        edit_json(ROUTES, lambda it: it["preprocessing"].update(max_megapixels=5_000)),
        "routes", "max_megapixels is 5000, expected at most 1000",
    ),
    "another preprocessing": (
        edit_json(ROUTES, lambda it: it["preprocessing"].update(interpolation="nearest")),
        "routes", "preprocessing.interpolation is 'nearest', expected 'bilinear'",
    ),
    "an input of a billion pixels": (
        edit_json(ROUTES, lambda it: it["preprocessing"].update(height_px=20_000)),
        "routes", "height_px is 20000, expected at most 16384",
    ),
    "routes of another family": (
        edit_json(ROUTES, lambda it: it.update(family="captioner")),
        "routes", "family is 'captioner', expected 'nac'",
    ),
    "a score that is none": (
        edit_json(ROUTES, lambda it: it["variants"][0].update(score="1e9")),
        "routes", "score is '1e9', expected a number",
    ),
    "a route with a key too many": (
        edit_json(ROUTES, lambda it: it["variants"][0].update(more=1)), "routes", "more is 1, whi",
    ),
    "routes with a key too many": (
        edit_json(ROUTES, lambda it: it.update({"variants.score": 1})), "routes", "score' is 1, wh",
    ),
    "routes of a hundred MiB": (
        lambda it: os.truncate(it / ROUTES, 100 << 20), "routes", "bytes, expected at most",
    ),
}  # fmt: skip
