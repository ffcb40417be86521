# SPDX-License-Identifier: Apache-2.0
"""Import the code that runs inside the server, for one repository, without changing this process.

The router's files import each other, and the server's module, by bare names such as `metrics`. Each
`ServerCode` has its own copies of them: they are not in `sys.modules`, so several repositories can
be open in one process, next to modules of the application with the same names.
"""

import builtins
import importlib
import importlib.util
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

SERVER_MODULE = "triton_python_backend_utils"


def backend_files(backend: str) -> dict[str, Traversable]:
    """Return the files of a Python backend of the bundled server, by their names in its folder."""
    package = resources.files("saccade.model_repository")
    shared = [package / "backend" / "backend_model.py", package / "router" / "tracing.py"]
    return {file.name: file for file in (*shared, package / f"{backend}_backend" / "model.py")}


class ServerCode:
    """The modules of one repository: files of `folder`, and `server` as the server's module."""

    def __init__(self, folder: Path, server: ModuleType) -> None:
        self._folder = folder
        self._modules = {SERVER_MODULE: server}
        self._builtins = {**vars(builtins), "__import__": self._import}

    def module(self, name: str, path: Path | None = None) -> Any:
        """Return a module of the folder, or of another file that imports modules of the folder."""
        if name not in self._modules:
            path = path or self._path(name)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            # The import statement looks here for what it calls.
            vars(module)["__builtins__"] = self._builtins
            self._modules[name] = module
            spec.loader.exec_module(module)
        return self._modules[name]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.py"

    def _is_own(self, name: str) -> bool:
        return name in self._modules or (name.isidentifier() and self._path(name).is_file())

    def _import(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if name == "importlib" and fromlist == ("import_module",):
            return SimpleNamespace(import_module=self._imported)
        if level == 0 and self._is_own(name):
            return self.module(name)
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    def _imported(self, name: str) -> Any:
        return self.module(name) if self._is_own(name) else importlib.import_module(name)
