# SPDX-License-Identifier: Apache-2.0
"""Pace of a lane, as measured: seconds a row of the model, seconds a megapixel of images."""

KEEP = 0.9  # of what was known stays with each measurement: the last ten or so count
IMAGE_MEGAPIXELS = 0.02  # opening any image costs as decoding so much


class Mean:
    """Seconds for one of something, by a mean in which old measurements fade."""

    def __init__(self) -> None:
        self._seconds, self._amount = 0.0, 0.0

    def add(self, amount: float, seconds: float) -> None:
        """So many took so long."""
        if amount > 0:
            self._seconds = KEEP * self._seconds + seconds
            self._amount = KEEP * self._amount + amount

    def of(self, amount: float) -> float:
        """Time for so many; 0 while nothing was measured."""
        return amount * self._seconds / self._amount if self._amount else 0.0


class Pace:
    """A lane's two means."""

    def __init__(self) -> None:
        self.run, self.decode = Mean(), Mean()

    def seconds(self, work: float, megapixels: float) -> float:
        """Time for a request of that cost."""
        return self.run.of(work) + self.decode.of(megapixels)
