# SPDX-License-Identifier: Apache-2.0
"""What a user's JSON says of a file, held against what the file's tensors tell."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import SaccadeError


def check_claims(path: str, claims: Mapping[str, tuple[Any, Any]]) -> None:
    """Every value that the JSON gives is the one in the file; by name, (said, found).

    Raises: SaccadeError naming the first that differs.
    """
    for name, (said, found) in claims.items():
        if said is not None and said != found:
            raise SaccadeError(
                f"{path}: --config says {name} {said!r:.60}, the file's tensors say {found}. "
                "Pass the JSON of this model."
            )


def whole_number(value: Any, name: str, *, least: int = 1) -> int:
    """A count from the JSON.

    Raises: SaccadeError if it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SaccadeError(
            f"--config: {name} is {value!r:.60}, expected a whole number of at least {least}. "
            "Correct it in the JSON."
        )
    return value
