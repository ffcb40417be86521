# SPDX-License-Identifier: Apache-2.0
"""All faults, by their names in the table."""

from collections.abc import Callable
from types import ModuleType

from chaos import connection_faults, file_faults, process_faults, request_faults
from chaos.scene import Scene


def _public(module: ModuleType) -> dict[str, Callable[[Scene], None]]:
    return {
        name: value
        for name, value in vars(module).items()
        if callable(value)
        and getattr(value, "__module__", "") == module.__name__
        and list(getattr(value, "__annotations__", ())) == ["scene", "return"]
        and not name.startswith("_")
    }


FAULTS: dict[str, Callable[[Scene], None]] = {
    name: fault
    for module in (process_faults, request_faults, connection_faults, file_faults)
    for name, fault in _public(module).items()
}
