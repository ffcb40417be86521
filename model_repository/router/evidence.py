# SPDX-License-Identifier: Apache-2.0
"""Evidence that a policy loses more answers than its certificate allows; valid at any time.

Standard library only.
"""

from collections import deque
from typing import Any

# What is bet on: the odds of a lost answer, in times those of the certificate.
ODDS = (1.5, 2.0, 3.0, 5.0, 10.0)
# The part of the money that is bet on the first sample. The rest waits for changes: after n
# samples, (1 + n / WAIT) ** -FADE of it is left. A slow fade keeps some for changes after years.
AT_FIRST, WAIT, FADE = 0.5, 100.0, 0.5
RECENT = 200  # answers for the estimate that people read
LEAST_RISK = 1e-6  # a smaller one would be refuted by a single answer


class Evidence:
    """The money of a gambler who bets that answers are lost more often than `risk`.

    It begins at 1. If each answer, given those before, is lost with a chance of at most `risk`, no
    bet has a gain on average, so the chance that it ever reaches 1 / alpha is at most alpha
    (Ville's inequality). Money that is bet later is money that old, good answers did not cost: so
    a change after a long calm is noticed, too.
    Source: Waudby-Smith and Ramdas 2020 (arXiv 2010.09686), section 4: bets, and mixtures of them.
            Shin, Ramdas and Rinaldo 2022 (arXiv 2203.03532): mixtures over the time of a change.
    """

    def __init__(self, risk: float, alpha: float, state: dict[str, Any] | None = None) -> None:
        """`state` is that of an earlier process."""
        self._risk, self._alpha = max(risk, LEAST_RISK), alpha
        state = state or {}
        self.samples, self.lost = int(state.get("samples", 0)), int(state.get("lost", 0))
        self._bets = [
            float(money) for money in state.get("bets", [AT_FIRST / len(ODDS)] * len(ODDS))
        ]
        self.recent = deque[int](state.get("recent", ()), maxlen=RECENT)

    def add(self, *, lost: bool) -> None:
        """Take one more sampled answer."""
        begun = (self._waits(self.samples) - self._waits(self.samples + 1)) / len(ODDS)
        self.samples, self.lost = self.samples + 1, self.lost + lost
        self.recent.append(int(lost))
        for at, odds in enumerate(ODDS):
            # A bet at these odds is the likelihood ratio of the two chances of a loss.
            gain = (odds if lost else 1.0) / (1.0 + (odds - 1.0) * self._risk)
            self._bets[at] = (self._bets[at] + begun) * gain

    @property
    def money(self) -> float:
        """The gambler's money: evidence against the certificate."""
        return sum(self._bets) + self._waits(self.samples)

    @property
    def refutes(self) -> bool:
        """Whether the certificate is refuted; once it is, add no more."""
        return self.money >= 1.0 / self._alpha

    @property
    def state(self) -> dict[str, Any]:
        """Plain values for JSON, from which another process continues."""
        return {
            "samples": self.samples,
            "lost": self.lost,
            "bets": self._bets,
            "recent": list(self.recent),
        }

    @staticmethod
    def _waits(samples: int) -> float:
        return (1.0 - AT_FIRST) * float((1.0 + samples / WAIT) ** -FADE)
