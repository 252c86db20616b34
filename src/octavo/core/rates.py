"""What steps and block copies take, learned from what they took. No clock: times are given."""

from collections import deque

_FAST, _SLOW = 0.5, 0.05  # weight of a new time below, above the mean: outliers are slow ones


class Rates:
    """Seconds of a step by its tokens, and seconds of one block copied to or from the host.

    Step times are kept by powers of two of the token count: a mean count and a mean time each.
    A step takes at most in proportion longer than a smaller one (its fixed costs do not grow),
    which bounds the sizes that have not been measured, from above.
    """

    __slots__ = ("_points", "block_seconds")

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}
        self.block_seconds: float | None = None

    def note_step(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens took `seconds`."""
        if tokens <= 0 or seconds <= 0:
            return
        size = tokens.bit_length()
        count, mean = self._points.get(size, (float(tokens), seconds))
        weight = _FAST if seconds < mean else _SLOW
        self._points[size] = (count + 0.2 * (tokens - count), mean + weight * (seconds - mean))

    def note_copies(self, blocks: int, seconds: float) -> None:
        """Copying `blocks` blocks between pool and host took `seconds`."""
        if blocks > 0:
            each = max(seconds, 0.0) / blocks
            old = each if self.block_seconds is None else self.block_seconds
            self.block_seconds = old + 0.2 * (each - old)

    def seconds(self, tokens: int, near: int) -> float | None:
        """About what a step of `tokens` takes: the nearest measured one of at most `near`.

        None if nothing near has been measured.
        """
        size = tokens.bit_length()
        for bigger in range(size, near.bit_length() + 1):
            if (point := self._points.get(bigger)) and point[0] <= near:
                return point[1]
        for smaller in range(size - 1, 0, -1):
            if point := self._points.get(smaller):
                return point[1] * tokens / point[0]
        return None

    def tokens_within(self, seconds: float) -> int:
        """The most tokens whose step is sure to take at most `seconds`; 0 if not known.

        Grows towards the true number as steps of the size that it gives are measured.
        """
        counts = [c * seconds / mean for c, mean in self._points.values() if mean <= seconds]
        return int(max(counts, default=0.0))

    @property
    def token_seconds(self) -> float | None:
        """Seconds of one token in the most efficient step so far; None before the first."""
        return min((mean / count for count, mean in self._points.values()), default=None)


class Window:
    """Values of the last `span` seconds, each with a count, for percentiles and rates."""

    __slots__ = ("_samples", "span")

    def __init__(self, span: float) -> None:
        self.span = span
        self._samples: deque[tuple[float, float, int]] = deque()

    def add(self, now: float, value: float, count: int = 1) -> None:
        self._samples.append((now, value, count))

    def clear(self) -> None:
        self._samples.clear()

    def trim(self, now: float) -> None:
        while self._samples and self._samples[0][0] < now - self.span:
            self._samples.popleft()

    def percentile(self, share: float) -> float | None:
        """The least value that at least `share` of the counted values do not exceed."""
        total = sum(count for _, _, count in self._samples)
        seen = 0
        for _, value, count in sorted(self._samples, key=lambda sample: sample[1]):
            seen += count
            if seen >= share * total:
                return value
        return None

    def total(self) -> float:
        """The sum of value x count."""
        return sum(value * count for _, value, count in self._samples)

    def __len__(self) -> int:
        return len(self._samples)
