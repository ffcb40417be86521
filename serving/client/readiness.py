# SPDX-License-Identifier: Apache-2.0
"""Readiness of a server: whether every variant answers, and new callers can connect."""

import threading
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["starting", "serving", "restarting", "stopped", "failed"]


@dataclass(frozen=True)
class Readiness:
    """Models that answered the last probe, and why the others did not; true if all did."""

    state: State
    model: str
    router: bool
    variants: dict[str, bool]
    reasons: dict[str, str] = field(default_factory=dict)
    new_connections: bool = True  # whether they are accepted
    busy: dict[str, str] = field(default_factory=dict)  # models that answer, but with a delay
    repository: str = ""  # SHA-256 of its saccade.json; empty if only the supervisor knows it

    @property
    def ready(self) -> bool:
        """True if the router and every variant answer, and new callers can connect."""
        answer = self.router and all(self.variants.values())
        return self.state == "serving" and answer and self.new_connections

    def __bool__(self) -> bool:
        return self.ready

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"ready": self.ready, **asdict(self)}


class Board:
    """What the supervisor knows about the models, readable from any thread."""

    def __init__(self, model: str, variants: tuple[str, ...], repository: str = "") -> None:
        self.model = model
        self.variants = variants
        self.repository = repository
        self._lock = threading.Lock()
        self._state: State = "starting"
        self._reasons: dict[str, str] = {}
        self._busy: dict[str, str] = {}
        self.reset("starting")

    def reset(self, state: State) -> None:
        """Enter a state in which no model answers."""
        with self._lock:
            self._state = state
            self._reasons = dict.fromkeys((self.model, *self.variants), state)
            self._busy = {}

    def enter(self, state: State) -> None:
        """Enter a state and keep what is known about each model."""
        with self._lock:
            self._state = state

    def describe(self, model: str, variants: tuple[str, ...], repository: str) -> None:
        """Switch to another repository, whose models all answer."""
        with self._lock:
            self.model, self.variants, self.repository = model, variants, repository
            self._reasons = {}

    def answering(self) -> set[str]:
        """Return the models that answered the last probe."""
        with self._lock:
            reasons = self._reasons
            return {name for name in (self.model, *self.variants) if not reasons.get(name)}

    def mark(self, name: str, reason: str) -> bool:
        """Note why a model does not answer, or `""` if it does; return whether that is new."""
        with self._lock:
            before = self._reasons.get(name, "")
            self._reasons[name] = reason
            return before != reason

    def mark_busy(self, name: str, text: str) -> None:
        """Note how many requests wait for a model that answers, or `""` if none do."""
        with self._lock:
            self._busy[name] = text

    def readiness(self) -> Readiness:
        """Return the current state."""
        with self._lock:
            reasons = {name: reason for name, reason in self._reasons.items() if reason}
            busy = {name: text for name, text in self._busy.items() if text}
            return Readiness(
                self._state,
                self.model,
                self.model not in reasons,
                {name: name not in reasons for name in self.variants},
                reasons,
                busy=busy,
                repository=self.repository,
            )
