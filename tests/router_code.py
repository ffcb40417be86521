# SPDX-License-Identifier: Apache-2.0
"""Import the router's code as the server does: by bare names, from its own folder."""

import importlib
import importlib.util
import sys
from types import ModuleType

from places import PACKAGE

ROUTER = PACKAGE / "model_repository" / "router"


def router_module(name: str) -> ModuleType:
    """Import a file of the router."""
    sys.path.insert(0, str(ROUTER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROUTER))


def backend_module(runtime: str, name: str = "model") -> ModuleType:
    """Import a file of a runtime's backend, whose own files lie beside the shared ones there."""
    folders = [str(ROUTER.parent / f"{runtime}_backend"), str(ROUTER.parent / "backend")]
    for module in ("model", "runtime", "variant"):  # the router's, another runtime's
        sys.modules.pop(module, None)
    sys.path[:0] = folders
    try:
        return importlib.import_module(name)
    finally:
        for folder in folders:
            sys.path.remove(folder)


def family_module(package: str) -> ModuleType:
    """Import the files of a family: `family.py` next to the router, `router.py` in its folder."""
    source = PACKAGE / "models" / package / "router.py"
    spec = importlib.util.spec_from_file_location(f"router_of_{package}", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # What it brings more lies beside it there, and so do the shared files of saccade.models.
    folders = [str(ROUTER), str(source.parent), str(PACKAGE / "models")]
    sys.path[:0] = folders
    try:
        spec.loader.exec_module(module)
    finally:
        for folder in folders:
            sys.path.remove(folder)
    return module
