# SPDX-License-Identifier: Apache-2.0
"""saccade turns a checkpoint of an attention-structured vision model into a served one.

Every command is also a function with the same name: `saccade export` is `saccade.export(path,
saccade.ExportOptions(...))`. The exception is `saccade models`, which is `list_models`, because
`models` is a package. Public names are imported on first use, so that `import saccade` needs only
the standard library, and a client does not load torch.
"""

import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

# ONNX Runtime sends telemetry about sessions to its maker, from 1.29 on Linux too, unless this is
# set before it is imported. Set it to 0 to allow the telemetry.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"

# The module of each public name, from the imports that type checkers read.
_HOME = {
    name: module
    for module, name in re.findall(
        r"^from (\S+) import (\w+)", Path(__file__).with_name("__init__.pyi").read_text(), re.M
    )
}
__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'saccade' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
