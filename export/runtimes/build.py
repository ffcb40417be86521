# SPDX-License-Identifier: Apache-2.0
"""`saccade build`: build each variant of an artefact folder for one runtime."""

from pathlib import Path

from saccade.core.errors import MissingPackage, SaccadeError
from saccade.core.progress import Report, bar, reporting
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.runtimes.options import BuildOptions
from saccade.exporter.runtimes.runtime import BuiltFolder, Runtime, engine_names, runtime_named


def build(
    artefact: ArtefactFolder | Path | str,
    options: BuildOptions,
    *,
    progress: Report | None = bar,
) -> BuiltFolder:
    """Build every variant of an artefact folder for one runtime.

    The output folder is created only when every variant was built.

    Raises: GateFailed if a variant would compute in other types than it promises, SaccadeError for
        an option or a file that cannot be built, MissingPackage if the runtime is not installed.
    """
    with reporting(progress):
        return builder(options.engine).build(ArtefactFolder.open(artefact), options)


def builder(engine: str | None) -> Runtime:
    """Return the runtime named `engine`; by default the first installed one that builds engines.

    Raises: SaccadeError if it does not build engines, MissingPackage if none is installed.
    """
    if engine is not None:
        runtime = runtime_named(engine)
        if not runtime.builds:
            raise SaccadeError(
                f"--engine {engine}: {runtime.title} runs the exported files directly, so there is "
                f"nothing to build. Expected one of: {', '.join(engine_names())}."
            )
        return runtime
    every = [runtime_named(name) for name in engine_names()]
    if here := next((runtime for runtime in every if runtime.is_here()), None):
        return here
    # `require` reports what is missing and how to install it.
    every[0].require()
    raise MissingPackage(f"{every[0].title} is not installed.")
