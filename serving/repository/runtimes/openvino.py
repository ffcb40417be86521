# SPDX-License-Identifier: Apache-2.0
"""OpenVINO in the bundled server: the graph that OpenVINO reads, for saccade's Python backend."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.files import sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.graph.trial import refuse_untried
from saccade.exporter.runtimes.gpu import Gpu
from saccade.exporter.runtimes.openvino.runtime import (
    SOURCE,
    changed_graph,
    computes_bf16,
    is_changed,
    openvino_runner,
)
from saccade.exporter.runtimes.runners import Runner
from saccade.serving.repository.model_config import MODEL_FILE, RUN_BATCH
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.model_checks import answer_differences
from saccade.serving.repository.preflight.repository import NotChecked, RepositoryModel, Target
from saccade.serving.repository.runtimes.served_runtime import (
    ONNXRUNTIMES_OWN,
    ModelCheck,
    ServedFiles,
    ServedRuntime,
    StoredFile,
    exported_files,
    refuse_options,
)

_BF16, _THREADS = "HINT_BF16", "INFERENCE_NUM_THREADS"


def check_model(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the ONNX file is the exported one, or was made from it, and can be read."""
    if not model.model.is_file():
        return
    proto = model.proto
    sources = {prop.value for prop in proto.metadata_props if prop.key == SOURCE}
    expected = model.manifest.file.sha256
    if (digest := sha256_of(model.model)) != expected and sources != {expected}:
        yield (
            f"{MODEL_FILE} has the SHA-256 {digest[:12]}..., expected {expected[:12]}... from its "
            "manifest, or a file made from that one: it is another model's file."
        )
    if odd := sorted({node.domain for node in proto.graph.node} - {"", "ai.onnx"}):
        yield f"{MODEL_FILE} has nodes of the domain {odd[0]}, which OpenVINO does not know."


def check_answer(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the model loads and gives the stored answer for the stored sample."""
    assert model.proto.graph.node, "a file beyond the limits of graphs is not loaded"
    yield from answer_differences(model, SERVED.runner(model))


class ServedOpenVino(ServedRuntime):
    """saccade's Python backend in the bundled server.

    Its parameters are those of NVIDIA's backend of the same name, and have the same meaning.
    """

    backend = "openvino"
    bundled = True
    only_bundled = (
        "NVIDIA's backend for OpenVINO compiles for one batch size and fills every smaller request "
        "up to it."
    )
    models_title = "ONNX files for OpenVINO"
    checks: Mapping[str, ModelCheck] = {"model": check_model, "answer": check_answer}
    option_fields: Mapping[str, str] = {"threads": f"parameters.{_THREADS}"}

    def check_options(self, options: RepositoryOptions) -> None:
        if options.instances == "gpu":
            raise SaccadeError("--instances is gpu, but OpenVINO runs on CPUs here. Leave it out.")
        refuse_options(options, "tensorrt", "engines")
        refuse_options(options, "onnxruntime", *ONNXRUNTIMES_OWN)

    def component_files(
        self, folder: ArtefactFolder, options: RepositoryOptions, max_images: int
    ) -> dict[str, ServedFiles]:
        served = {}
        for manifest in folder.manifests:
            if is_changed(manifest):
                refuse_untried(folder, [manifest])  # the file is parsed and expanded here
                graph = StoredFile(changed_graph(folder.file(manifest), manifest))
                files = {f"1/{MODEL_FILE}": graph}
            else:
                files = exported_files(manifest, folder.path.joinpath)
            served[manifest.variant.name] = ServedFiles(
                files,
                partial(_fields_of, computes_bf16(manifest)),
                "bodies" if manifest.custom_ops else None,
            )
        return served

    def config_fields(
        self, model: RepositoryModel, options: RepositoryOptions, run_batch: int
    ) -> dict[str, Any]:
        return _fields_of(computes_bf16(model.manifest), run_batch, options.threads or 0)

    def files(self, model: RepositoryModel) -> set[str]:
        with suppress(NotChecked):  # without a manifest, only the file's name is known
            if is_changed(model.manifest):
                return {f"1/{MODEL_FILE}"}
        return super().files(model)

    def check_gpus(self, model: RepositoryModel, gpus: Sequence[Gpu]) -> None:
        raise SaccadeError(f"{model.name}: OpenVINO runs on CPUs here. Leave out --instances gpu.")

    def runner(self, model: RepositoryModel) -> Runner:
        threads = model.config.parameters[_THREADS].string_value
        return openvino_runner(model.model, model.manifest, threads=int(threads))


def _fields_of(bf16: bool, run_batch: int, threads: int) -> dict[str, Any]:
    """Return the configuration fields of a graph; `threads` is the number of threads of one run."""
    parameters = {
        _THREADS: str(threads),
        "NUM_STREAMS": "1",  # instances run in parallel; a run has all threads of its instance
        "PERFORMANCE_HINT": "LATENCY",
        **({_BF16: "YES"} if bf16 else {}),
        RUN_BATCH: str(run_batch),
    }
    return {
        "backend": ServedOpenVino.backend,
        "default_model_filename": MODEL_FILE,
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }


SERVED = ServedOpenVino()
