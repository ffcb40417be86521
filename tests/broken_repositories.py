# SPDX-License-Identifier: Apache-2.0
"""Broken repositories: what is wrong -> the change, the check that must fail, and its message."""

import os
import shutil

from broken_changes import (
    ROUTES,
    also,
    call_a_foreign_op,
    edit,
    edit_json,
    edit_onnx,
    fields,
    foreign_library,
    link_out,
    other_answer,
    pipe,
    put_weights_elsewhere,
    remove,
    routes,
    spoil_weights,
    swap,
    swap_models,
    swap_models_and_hashes,
    truncate,
    with_library,
    write,
)
from tiny_artefacts import FULL, HALF, MODEL

MANIFEST = f"{FULL}/{FULL}.manifest.json"

# All hashes match: the fault itself has to be detected.
BROKEN = {
    "an empty model": (write(f"{FULL}/1/model.onnx", b""), "files", "is empty"),
    "a truncated model": (truncate(f"{FULL}/1/model.onnx"), "model", "not a complete ONNX model"),
    "models of two variants swapped": (swap_models, "model", "another model's file"),
    "swapped, manifests too": (swap_models_and_hashes, "answer", "from the stored answer"),
    "a weight that is NaN": (edit_onnx(spoil_weights), "answer", "contains NaN"),
    "weights in a file beside it": (
        edit_onnx(put_weights_elsewhere), "model", "weights in another file",
    ),
    "another opset": (
        edit_onnx(lambda it: setattr(it.opset_import[0], "version", 18)), "model", "opset 18",
    ),
    "a newer IR version": (
        edit_onnx(lambda it: setattr(it, "ir_version", 11)), "model", "IR version 11",
    ),
    "an op that no server has": (edit_onnx(call_a_foreign_op), "answer", "com.example"),
    "a renamed input": (
        edit_onnx(lambda it: setattr(it.graph.input[0], "name", "picture")),
        "answer", "output of a previous node",
    ),
    "no version": (
        lambda it: (it / FULL / "1").rename(it / FULL / "one"), "versions", "are none",
    ),
    "two versions": (write(f"{FULL}/2/model.onnx", b"x"), "versions", "1, 2, expected 1"),
    "a version put aside": (write(f"{FULL}/1.old/model.onnx", b"x"), "versions", "1.old"),
    "changed code": (
        write(f"{MODEL}/1/choose.py", b"import os"),
        "content", "choose.py is not what this release.* line 1 is 'import os'",
    ),
    "missing code": (remove(f"{MODEL}/1/lane.py"), "content", "lane.py is missing"),
    "code that shadows a package": (
        write(f"{MODEL}/1/numpy.py", b"print()"), "content", "numpy.py is not a file",
    ),
    "too few labels": (
        write(f"{FULL}/labels.txt", b"circle\n"), "content", "line 2 is '', expected 'square",
    ),
    "no library of ops": (with_library(None), "library", "is missing"),
    "a text as library": (with_library(lambda: b"hello"), "library", "was not loaded"),
    "another library": (with_library(foreign_library), "library", "was not loaded"),
    "a configuration that is none": (
        write(f"{FULL}/config.pbtxt", b"name: {"), "configuration", "not a valid ModelConfig",
    ),
    "an unknown field": (
        write(f"{FULL}/config.pbtxt", b'name: "x"\nfoo: 1\n'), "configuration", "foo",
    ),
    "a field of a newer server": (
        edit(lambda it: it.model_metrics.metric_control.add()),
        "fields", "model_metrics.metric_control is .*, which saccade does not write",
    ),
    "warm-up data missing": (remove(f"{FULL}/warmup/image"), "content", "image is missing"),
    "other warm-up data": (
        write(f"{FULL}/warmup/image", bytes(16)),
        "content", "warmup/image is not what this release",
    ),
    "too little warm-up data": (
        write(f"{FULL}/warmup/image", bytes(15)), "warm-up", "takes 16 bytes of 'image', .* has 15",
    ),
    "no sample": (remove(f"{FULL}/warmup/sample.safetensors"), "sample", "not a stored sample"),
    "another answer": (other_answer, "answer", "'logits' is 0.0"),
    "an ensemble": (
        edit(lambda it: (it.ClearField("backend"), setattr(it, "platform", "ensemble"))),
        "fields", "platform is 'ensemble', which saccade does not write",
    ),
    "budgets in the wrong order": (
        edit_json(ROUTES, lambda it: it["variants"].reverse()),
        "routes", r"variants\[tiny-b1000-fp32\].budget is 0.5, expected 1.0",
    ),
    "components that are not the models'": (
        edit_json(ROUTES, lambda it: it["parts"][""]["inputs"][0].update(axes="b 9 9 1")),
        "routes", "axes is 'b 9 9 1', expected 'b 4 4 1'",
    ),
    "labels in another order": (
        write(f"{MODEL}/labels.txt", b"square\ncircle\nstar\n"),
        "content", "labels.txt is not .* line 1 is 'square.*, expected 'circle",
    ),
    "labels that are no text": (
        write(f"{FULL}/labels.txt", b"circle\nsquare\n\xff\n"), "content", "line 3 is .*dcff",
    ),
    "routes that are no JSON": (write(ROUTES, b"{"), "routes", "cannot be read"),
    "a router beyond its variants": (
        edit(lambda it: setattr(it, "max_batch_size", 32)), "router", "is 64, .* takes at most 32",
    ),
    "a manifest of a failed gate": (
        edit_json(MANIFEST, lambda it: it["parity"].update(passed=False)), "manifest", "gate",
    ),
    "a manifest of the future": (
        edit_json(MANIFEST, lambda it: it.update(version=99)), "manifest", "version 99",
    ),
    "a model that nobody named": (
        lambda it: shutil.copytree(it / FULL, it / "Tiny-b1000-fp32"),
        "models", "differs from tiny-b1000-fp32 in case only",
    ),
    "a model without a folder": (
        edit_json("saccade.json", lambda it: it["variants"].append("tiny-b0250-fp32")),
        "models", "tiny-b0250-fp32 has no folder",
    ),
}  # fmt: skip
UNKNOWN = "which saccade does not write"
OUTPUT = {"name": "more", "data_type": "TYPE_FP32", "dims": [1]}
BROKEN |= fields(
    FULL,
    ("input[0].dims[0]", 8, r"is \[8, 4, 1\], expected \[4, 4, 1\]"),
    ("input[0].data_type", 11, "is 'TYPE_FP32', expected 'TYPE_UINT8'"),
    ("output", OUTPUT, f"is .*'more'.*, {UNKNOWN}"),
    ("version_policy.specific.versions[0]", 3, r"is \[3\], expected \[1\]"),
    ("model_operations.op_library_filename", "/opt/x/lib.so", r"is \['/opt/x.* \['libsaccade_onnx"),
    ("max_batch_size", 0, "is missing, expected 1 to 64"),
    ("dynamic_batching.preferred_batch_size", 65, r"is \[8, 65\], expected \[8\]"),
    # Without a default.
    ("dynamic_batching.priority_levels", 3, "^.*default_priority_level is missing, expected '2'"),
    ("parameters[saccade_run_batch].string_value", "0", "^.*run_batch is '0', expected '8'"),
    ("instance_group", {"count": 1, "kind": "KIND_CPU"}, f"is .*, {UNKNOWN}"),
    ("default_model_filename", "../../x.onnx", "is '../../x.onnx', expected 'model.onnx'"),
    (
        "model_warmup[0].inputs[image].input_data_file",
        "/etc/hostname",
        "is '/etc/hos.* expected 'im",
    ),
    ("model_warmup[0].inputs[image].dims[0]", 8, r"is \[8, 4, 1\], expected \[4, 4, 1\]"),
    ("name", "other", f"is 'other', expected '{FULL}'"),
    ("backend", "python", "is 'python', expected 'onnxrunt"),
    ("response_cache.enable", True, f"is True, {UNKNOWN}"),
    ("parameters[cudnn].string_value", "1", f"^.*parameters.cudnn is '1', {UNKNOWN}"),
    ("parameters[execution_mode].string_value", "x", "^.*execution_mode is 'x', expected 0 to 1"),
)
BROKEN |= fields(
    MODEL,
    ("input[0].data_type", 2, "is 'TYPE_UINT8', expected 'TYPE_STRING'"),
    ("model_warmup", {"name": "w", "batch_size": 1}, f"is .*, {UNKNOWN}"),
)
BROKEN |= routes(
    ("variants[0].name", "tiny-b0750-fp32", "is 'tiny-b0750-fp32', expected 'tiny-b1000-fp32'"),
    ("variants[0].sha256", "f" * 64, "^.*sha256 is 'ffffffffffff"),
    ("variants[0].parts", {"": HALF}, f"is '{HALF}', expected '{FULL}'"),
    ("variants[1].facts", {"logit_scale": 3}, f"is 3, {UNKNOWN}"),
    ("variants[1].run_batch", 65, "is 65, expected 8"),
)
BROKEN_PLANS = {
    "a plan without a manifest": (
        write(f"{FULL}/1/model-8.9.plan", b"ftrt else"), "engines", "executable code",
    ),
    "a plan of TensorRT-RTX": (
        edit_json(
            f"{FULL}/engine-8.9.json", lambda it: it["engine"].update(engine="tensorrt-rtx")
        ),
        "engines", "Triton's TensorRT backend loads only plans of TensorRT",
    ),
    "a plan of another model": (
        edit_json(
            f"{FULL}/engine-8.9.json", lambda it: it["engine"]["parent"].update(sha256="f" * 64)
        ),
        "engines", "built from an ONNX file with SHA-256 ffff",
    ),
    "half a manifest of a plan": (truncate(f"{FULL}/engine-8.9.json"), "engines", "cannot be read"),
    "a profile below the batch": (
        edit_json(
            f"{FULL}/engine-8.9.json",
            lambda it: it["engine"]["profiles"]["image"].update(max=[32, 4, 4, 1]),
        ),
        "profiles", "max_batch_size is 64, .* takes 1 to 32",
    ),
    "a profile without the sample's size": (
        edit_json(
            f"{FULL}/engine-8.9.json",
            lambda it: it["engine"]["profiles"]["image"].update(
                min=[1, 5, 4, 1], opt=[8, 5, 4, 1], max=[64, 5, 4, 1]
            ),
        ),
        "profiles", r"sample's 'image' is \[1, 4, 4, 1\]",
    ),
    "plans of two GPUs swapped": (
        edit(
            lambda it: (
                it.cc_model_filenames.update({"8.9": "model-12.0.plan", "12.0": "model-8.9.plan"})
            )
        ),
        "fields", "'8.9' is 'model-12.0.plan', expected 'model-8.9.plan'",
    ),
    "files of plans swapped": (
        lambda it: swap(it / FULL / "1" / "model-8.9.plan", it / FULL / "1" / "model-12.0.plan"),
        "engines", "model-8.9.plan is not the plan of engine-8.9.json",
    ),
    "a GPU without a plan": (
        edit(lambda it: it.cc_model_filenames.pop("12.0")),
        "fields", "'12.0' is missing, expected 'model-12.0.plan'",
    ),
    "plans of different plugins": (
        lambda repository: [
            edit_json(
                f"{FULL}/engine-{each}.json",
                lambda it, each=each: it["engine"].update(
                    plugins={"libsaccade_tensorrt.so": each[0] * 64}
                ),
            )(repository)
            for each in ("8.9", "12.0")
        ],
        "plugins", "built with different libsaccade_tensorrt.so",
    ),
    **fields(
        FULL,
        ("cc_model_filenames[sm89]", "model-8.9.plan", f"^.*filenames.sm89 is .*, {UNKNOWN}"),
        ("cc_model_filenames[8.9]", "../../1/model.plan", "^.*'../../1.* expected 'model-8.9.p"),
        ("instance_group[0].kind", 2, "is 'KIND_CPU', expected 'KIND_GPU'"),
    ),
}  # fmt: skip
# Manipulated to run or take more than saccade writes: whoever can write to a repository can write
# its description too.
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
# Only hashes, or the files that they belong to.
HASHES = {
    "changed": (
        write(f"{FULL}/labels.txt", b"a\nb\nc\n"),
        "labels.txt: was changed after it was written",
    ),
    "missing": (remove(f"{FULL}/1/model.onnx"), "model.onnx: is missing"),
    "added": (write(f"{MODEL}/1/sitecustomize.py", b"x"), "was not written by saccade"),
    "a link out": (link_out, "is a link to"),
    "a pipe": (pipe, "is neither a file nor a folder"),
    "a name out": (
        edit_json("saccade.json", lambda it: it["files"].update({"../x": "f" * 64})),
        r"\.\./x leads out",
    ),
}
