# SPDX-License-Identifier: Apache-2.0
"""`saccade build`: a file of a runtime's own for each variant of an artefact folder."""

from pathlib import Path

from saccade.errors import MissingPackage, SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.runtimes.options import BuildOptions
from saccade.exporter.runtimes.runtime import Built, Runtime, engine_names, runtime_named


def build(artefact: ArtefactFolder | Path | str, options: BuildOptions) -> Built:
    """Build every variant of an artefact folder for one runtime.

    The folder appears when every variant was built, or not at all.

    Raises: GateFailed if a variant would run in other types than it promises, SaccadeError for
        an option or a file that cannot be built, MissingPackage if the runtime is not installed.
    """
    return builder(options.engine).build(ArtefactFolder.open(artefact), options)


def builder(engine: str | None) -> Runtime:
    """The runtime of that name, or the first that builds and is installed.

    Raises: SaccadeError if it builds nothing, MissingPackage if none is installed.
    """
    if engine is not None:
        runtime = runtime_named(engine)
        if not runtime.builds:
            raise SaccadeError(
                f"--engine {engine}: {runtime.title} runs the exported files as they are, there is "
                f"nothing to build. Expected one of: {', '.join(engine_names())}."
            )
        return runtime
    every = [runtime_named(name) for name in engine_names()]
    if here := next((runtime for runtime in every if runtime.is_here()), None):
        return here
    # It says what is missing, and how to get it.
    every[0].require()
    raise MissingPackage(f"{every[0].title} is not installed.")
