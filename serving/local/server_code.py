# SPDX-License-Identifier: Apache-2.0
"""Import code that runs inside the server, for one repository, without changing this process.

The router's files import each other by bare names such as `choose`. Each `ServerCode` has its own
copies of them: they are not in `sys.modules`, so several repositories can be open in one process,
next to modules of the application with the same names. What imports the server's own module is not
imported here.
"""

import builtins
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def backend_files(backend: str) -> dict[str, Path]:
    """Return the files of a Python backend of the bundled server, by their names in its folder."""
    package = Path(str(resources.files("saccade.model_repository")))
    shared = [package / "backend" / name for name in ("model.py", "variant.py")]
    own = (package / "router" / "tracing.py", package / f"{backend}_backend" / "runtime.py")
    return {file.name: file for file in (*shared, *own)}


class ServerCode:
    """Modules that import each other, by the files' names."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = {file.removesuffix(".py"): path for file, path in files.items()}
        self._modules: dict[str, ModuleType] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}

    def module(self, name: str) -> Any:
        """Return a module."""
        if name not in self._modules:
            spec = importlib.util.spec_from_file_location(name, self._files[name])
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            # The import statement looks here for what it calls.
            vars(module)["__builtins__"] = self._builtins
            self._modules[name] = module
            spec.loader.exec_module(module)
        return self._modules[name]

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
        if level == 0 and name in self._files:
            return self.module(name)
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    def _imported(self, name: str) -> Any:
        return self.module(name) if name in self._files else importlib.import_module(name)
