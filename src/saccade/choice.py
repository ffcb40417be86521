# SPDX-License-Identifier: Apache-2.0
"""An option that is one of some names, which the command line shows in its help."""

from typing import Any


class _Texts(type):
    """Of classes that any text is an instance of."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, str)


def choice_of(names: str) -> Any:
    """A type of texts: one of the names that `module:function` gives.

    Whoever has the option refuses others: the type is for the help alone.
    """
    return _Texts("Choice", (str,), {"names": names})
