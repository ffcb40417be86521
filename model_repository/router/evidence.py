# SPDX-License-Identifier: Apache-2.0
"""Evidence that a policy loses more answers than its certificate allows; valid at any time.

Standard library only.
"""

from dataclasses import dataclass, field

# What is bet on: the odds of a lost answer, in times those of the certificate.
ODDS = (1.5, 2.0, 3.0, 5.0, 10.0)
# The part of the money that is bet on the first sample. The rest waits for changes: after n
# samples, (1 + n / WAIT) ** -FADE of it is left. A slow fade keeps some for changes after years.
AT_FIRST, WAIT, FADE = 0.5, 100.0, 0.5
RECENT = 200  # answers for the estimate that people read
LEAST_RISK = 1e-6  # a smaller one would be refuted by a single answer


@dataclass
class Evidence:
    """The money of a gambler who bets that answers are lost more often than `risk`.

    It begins at 1. If each answer, given those before, is lost with a chance of at most `risk`, no
    bet has a gain on average, so the chance that the money ever reaches 1 / alpha is at most alpha
    (Ville's inequality). What is bet later did not shrink with the good answers before, so a change
    after a long calm is noticed, too. The fields are plain values, with which another process
    continues.
    Source: Waudby-Smith and Ramdas 2020 (arXiv 2010.09686): bets, and mixtures of them. Timans et
            al. 2025 (arXiv 2506.16416): monitoring the risk of a model. Shin, Ramdas and Rinaldo
            2022 (arXiv 2203.03532): mixtures over the time of a change.
    """

    risk: float
    alpha: float
    samples: int = 0
    lost: int = 0
    bets: list[float] = field(default_factory=lambda: [AT_FIRST / len(ODDS) for _ in ODDS])
    recent: list[int] = field(default_factory=list)  # 1 for a lost answer, the newest last

    def add(self, *, lost: bool) -> None:
        """Take one more sampled answer."""
        waited, risk = self._waits, max(self.risk, LEAST_RISK)
        self.samples, self.lost = self.samples + 1, self.lost + lost
        self.recent = [*self.recent, int(lost)][-RECENT:]
        begun = (waited - self._waits) / len(ODDS)
        # A bet at these odds is the likelihood ratio of the two chances of a loss.
        gains = [(odds if lost else 1.0) / (1.0 + (odds - 1.0) * risk) for odds in ODDS]
        self.bets = [(bet + begun) * gain for bet, gain in zip(self.bets, gains, strict=True)]

    @property
    def money(self) -> float:
        """The gambler's money: evidence against the certificate."""
        return sum(self.bets) + self._waits

    @property
    def refutes(self) -> bool:
        """Whether the certificate is refuted."""
        return self.money >= 1.0 / self.alpha

    @property
    def _waits(self) -> float:
        return (1.0 - AT_FIRST) * float((1.0 + self.samples / WAIT) ** -FADE)
