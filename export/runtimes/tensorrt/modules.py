# SPDX-License-Identifier: Apache-2.0
"""The two modules that build engines: which is installed, and for which GPUs each builds."""

import importlib.util
import re
from types import ModuleType

from saccade.core.errors import MissingPackage, SaccadeError, install
from saccade.exporter.runtimes.gpu import gpu_at_hand

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
NAMES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
INSTALL = (
    f"Install TensorRT-RTX, which builds without a GPU, with: {install('rtx')}, or "
    f"TensorRT, which has to build on the target GPU, with: {install('gpu')}"
)
# If no capability is given and there is no GPU.
_USUAL = "8.9"
_SM = re.compile(r"SM(\d+)(\d)")


def chosen_engine(wanted: str | None) -> str:
    """Return the wanted engine; by default TensorRT if it is usable here, else TensorRT-RTX.

    Raises: MissingPackage, with what to install, if it is not importable.
    """
    for engine in (wanted,) if wanted else tuple(MODULES):
        if importlib.util.find_spec(MODULES[engine]) is not None:
            return engine
    missing = MODULES[wanted] if wanted else " and ".join(MODULES.values())
    raise MissingPackage(f"{missing}: not importable. {INSTALL}.")


def takes_plugins(engine: str) -> bool:
    """True if the engine uses saccade's plugins; TensorRT-RTX uses the function bodies."""
    return engine == "tensorrt"


def module_of(engine: str) -> ModuleType:
    """Import TensorRT's module.

    Raises: MissingPackage, with what to install, if it cannot be imported.
    """
    try:
        return importlib.import_module(MODULES[engine])
    except ImportError as error:
        raise MissingPackage(
            f"{MODULES[engine]} is not importable ({error}). {INSTALL}."
        ) from error


def chosen_capabilities(engine: str, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Return the compute capabilities to build for; default: the GPU's, or 8.9 without a GPU.

    Raises: SaccadeError if the engine cannot build for one of them on this machine, MissingPackage
        if its module cannot be imported.
    """
    gpu = gpu_at_hand()
    if engine == "tensorrt":
        module_of(engine)
        if gpu is None:
            raise SaccadeError(
                "TensorRT has to build on the target GPU, but no GPU or driver was found. "
                "Build on a machine with that GPU, or without a GPU with: --engine tensorrt-rtx"
            )
        if wanted not in ((), (gpu.capability,)):
            raise SaccadeError(
                f"--compute-capability {','.join(wanted)}: TensorRT builds only for this machine's "
                f"GPU, {gpu.name} with {gpu.capability}. Leave the option out, or build on the "
                "other GPU."
            )
        return (gpu.capability,)
    supported = rtx_capabilities()
    at_hand = _USUAL if gpu is None else gpu.capability
    chosen = tuple(dict.fromkeys(wanted)) or (at_hand,)
    for capability in chosen:
        if capability not in supported:
            raise SaccadeError(
                f"compute capability {capability}: TensorRT-RTX builds for {', '.join(supported)}. "
                "Pass some of these with --compute-capability, or build with TensorRT on that GPU: "
                "--engine tensorrt"
            )
    return tuple(sorted(chosen, key=lambda capability: supported.index(capability)))


def rtx_capabilities() -> tuple[str, ...]:
    """Return the compute capabilities that the installed TensorRT-RTX lists as supported."""
    known = module_of("tensorrt-rtx").ComputeCapability.__members__
    matches = [_SM.fullmatch(name) for name in known]
    pairs = sorted((int(match[1]), int(match[2])) for match in matches if match)
    return tuple(f"{major}.{minor}" for major, minor in pairs)
