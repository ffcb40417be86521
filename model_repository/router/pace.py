# SPDX-License-Identifier: Apache-2.0
"""The measured pace of a lane: seconds per row of the model, and per megapixel of images."""

KEEP = 0.9  # weight of the old mean at each measurement: about the last ten count
IMAGE_MEGAPIXELS = 0.02  # opening an image costs as much as decoding this


class Mean:
    """Mean seconds per unit, in which old measurements fade."""

    def __init__(self) -> None:
        self._seconds, self._amount = 0.0, 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Record that an amount took some seconds."""
        if amount > 0:
            self._seconds = KEEP * self._seconds + seconds
            self._amount = KEEP * self._amount + amount

    def of(self, amount: float) -> float:
        """Return the expected time for an amount; 0 until something was measured."""
        return amount * self._seconds / self._amount if self._amount else 0.0


class Pace:
    """The two means of a lane: for running and for decoding."""

    def __init__(self) -> None:
        self.run, self.decode = Mean(), Mean()

    def seconds(self, work: float, megapixels: float) -> float:
        """Return the expected time for a request of this cost."""
        return self.run.of(work) + self.decode.of(megapixels)
