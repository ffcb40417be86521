# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime in a server: the exported file, and the library with its custom ops' kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.gpu import Gpu
from saccade.exporter.runtimes.onnxruntime import ONNXRUNTIME
from saccade.exporter.runtimes.runners import (
    CPU,
    CUDA,
    Runner,
    check_provider,
    onnx_runner,
    onnx_session,
)
from saccade.exporter.runtimes.runtime import has_custom_ops, ops_of
from saccade.plugins.native.library import available_library
from saccade.serving.repository.model_config import MODEL_FILE, OP_LIBRARY_FILE, RUN_BATCH, on_gpu
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight import model_checks
from saccade.serving.repository.preflight.model_checks import IR_VERSION, OPSET
from saccade.serving.repository.preflight.repository import RepositoryModel
from saccade.serving.repository.runtimes.served_runtime import (
    ModelCheck,
    ServedFiles,
    ServedRuntime,
    StoredFile,
    exported_files,
    refuse_options,
)


class ServedOnnxRuntime(ServedRuntime):
    """NVIDIA's backend for ONNX Runtime, and saccade's Python backend in the bundled server."""

    backend = "onnxruntime"
    bundled = True
    models_title = "ONNX files"
    checks: Mapping[str, ModelCheck] = {
        "model": model_checks.check_model,
        "library": model_checks.check_library,
        "answer": model_checks.check_answer,
    }
    option_fields: Mapping[str, str] = {
        "threads": "parameters.intra_op_thread_count",
        "inter_op_threads": "parameters.inter_op_thread_count",
        "parallel_nodes": "parameters.execution_mode",
        "graph_level": "optimization.graph.level",
    }

    def check_options(self, options: RepositoryOptions) -> None:
        refuse_options(options, "tensorrt", "engines")

    def check_manifest(self, manifest: Manifest) -> None:
        if (manifest.opset, manifest.ir_version) != (OPSET, IR_VERSION):
            raise SaccadeError(
                f"{manifest.variant.name}: has opset {manifest.opset} and IR version "
                f"{manifest.ir_version}, expected opset {OPSET} and IR version {IR_VERSION}, which "
                "all servers read. Export again."
            )

    def component_files(
        self, folder: ArtefactFolder, options: RepositoryOptions, max_images: int
    ) -> dict[str, ServedFiles]:
        ops = ops_of(ONNXRUNTIME, folder.manifests, kernels=options.op_library)
        library = available_library() if ops == "kernels" else None
        served = {}
        for manifest in folder.manifests:
            files = exported_files(manifest, folder.path.joinpath)
            own = ops if has_custom_ops([manifest]) else None
            if library and own:
                files[f"1/{OP_LIBRARY_FILE}"] = StoredFile(library.resolve())
            fields = partial(_fields_of, options, f"1/{OP_LIBRARY_FILE}" in files)
            served[manifest.variant.name] = ServedFiles(files, fields, own)
        return served

    def config_fields(
        self, model: RepositoryModel, options: RepositoryOptions, run_batch: int
    ) -> dict[str, Any]:
        return config_fields(options, _names_library(model), run_batch)

    def files(self, model: RepositoryModel) -> set[str]:
        library = {f"1/{OP_LIBRARY_FILE}"} if _names_library(model) else set()
        return super().files(model) | library

    def check_gpus(self, model: RepositoryModel, gpus: Sequence[Gpu]) -> None:
        check_provider(CUDA)

    def runner(self, model: RepositoryModel) -> Runner:
        threads = model.config.parameters["intra_op_thread_count"].string_value
        library = model.version / OP_LIBRARY_FILE if _names_library(model) else None
        # The same session as `saccade verify` compares with the reference.
        session = onnx_session(
            model.model,
            threads=int(threads),
            kernels=library,
            provider=CUDA if on_gpu(model.config) else CPU,
        )
        return onnx_runner(session)


def _names_library(model: RepositoryModel) -> bool:
    return bool(model.config.model_operations.op_library_filename)


def _fields_of(
    options: RepositoryOptions, op_library: bool, run_batch: int, threads: int
) -> dict[str, Any]:
    return config_fields(replace(options, threads=threads), op_library, run_batch)


def config_fields(
    options: RepositoryOptions | None, op_library: bool, run_batch: int
) -> dict[str, Any]:
    """Return the configuration fields of an exported file; without options, the defaults."""
    threads = options.threads if options else None
    numbers = {
        "intra_op_thread_count": 1 if threads is None else threads,
        "inter_op_thread_count": options.inter_op_threads if options else 1,
        "execution_mode": int(options.parallel_nodes) if options else 0,
        RUN_BATCH: run_batch,
    }
    fields: dict[str, Any] = {
        "backend": ServedOnnxRuntime.backend,
        "default_model_filename": MODEL_FILE,
        "parameters": {key: {"string_value": str(number)} for key, number in numbers.items()},
    }
    if op_library:
        # A bare name: the bundled server finds it next to the model, a container in its loader's
        # folders. A path would be valid on one machine only.
        fields["model_operations"] = {"op_library_filename": [OP_LIBRARY_FILE]}
    if options and options.graph_level:
        fields["optimization"] = {"graph": {"level": options.graph_level}}
    return fields


SERVED = ServedOnnxRuntime()
