# SPDX-License-Identifier: Apache-2.0
"""How many failures of a server are borne: each counts for less the longer it served since."""

FORGIVEN_AFTER_S = 30.0  # of service, one failure each
MOST = 5


class Patience:
    """A count that a failure raises by one and service lowers, never below nothing."""

    def __init__(self) -> None:
        self._troubles = 0.0

    def after(self, served_s: float) -> float | None:
        """Seconds to wait before the next start, after a failure; none if it is the last.

        Units: served_s is the seconds of service before this failure.
        """
        self._troubles = 1 + max(0.0, self._troubles - served_s / FORGIVEN_AFTER_S)
        if self._troubles > MOST:
            return None
        return 0.0 if self._troubles < 2 else 2.0 ** (int(self._troubles) - 2)
