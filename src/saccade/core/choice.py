# SPDX-License-Identifier: Apache-2.0
"""Options that accept one of several names, which the command line lists in its help."""

from typing import Any


class _Texts(type):
    """Metaclass whose classes have every string as an instance."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, str)


def choice_of(names: str) -> Any:
    """Return a type for strings that are one of the names returned by `module:function`.

    The type only affects the help; the owner of the option refuses other names.
    """
    return _Texts("Choice", (str,), {"names": names})
