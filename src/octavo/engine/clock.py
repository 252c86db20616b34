"""The time of another machine: seconds of its monotonic clock from ours, and back.

Monotonic clocks count from different moments and drift apart by some 50 us a second, so the
offset is measured again and again. A message that carries the sender's time arrives later than
that, never earlier: the smallest difference of the last ones is the offset, but for the shortest
time on the way.
"""

from collections import deque

_SAMPLES = 64


class RemoteClock:
    """Converts times between this machine's clock and another's; equal until observed."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._offset = 0.0

    def observe(self, theirs: float, ours: float) -> None:
        """A message sent at `theirs` arrived at `ours`."""
        self._samples.append(ours - theirs)
        self._offset = min(self._samples)

    def theirs(self, ours: float) -> float:
        return ours - self._offset

    def ours(self, theirs: float) -> float:
        return theirs + self._offset
