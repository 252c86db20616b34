"""Estimates of step and block-copy times, from measured ones. Reads no clock."""

from collections import deque

# Weights of a new sample that is faster, or slower, per token than the mean: outliers are slow.
_FAST, _SLOW = 0.5, 0.05
_MEMORY = 100  # steps that a StepModel weighs; half a minute or less
_PULL, _LEAST = 1e-3, 1e-12  # towards its last estimate: relative to what steps say, and at least


class Rates:
    """Step time as a function of its tokens, and the time to copy one block to or from the host.

    Step times are grouped by powers of two of the token count; each group keeps a mean count
    and a mean time. Step time grows at most in proportion to the tokens (fixed costs do not
    grow), which bounds unmeasured sizes from above.
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
        # Both means move by the same weight, so that together they stay a point of the curve.
        weight = _FAST if seconds * count < mean * tokens else _SLOW
        self._points[size] = (count + weight * (tokens - count), mean + weight * (seconds - mean))

    def note_copies(self, blocks: int, seconds: float) -> None:
        """Copying `blocks` blocks between pool and host took `seconds`."""
        if blocks > 0:
            each = max(seconds, 0.0) / blocks
            old = each if self.block_seconds is None else self.block_seconds
            self.block_seconds = old + 0.2 * (each - old)

    def seconds(self, tokens: int) -> float | None:
        """Estimated seconds of a step of `tokens`, by the nearest sizes measured, or None."""
        points = sorted(self._points.values())
        below = [point for point in points if point[0] <= tokens]
        above = points[len(below) :]
        if not above:
            return below[-1][1] * tokens / below[-1][0] if below else None
        if below:
            return _line(below[-1], above[0], tokens)
        first = above[0]
        if len(above) == 1:  # the fixed cost is unknown
            return first[1] if first[0] <= 4 * tokens else None
        return min(max(_line(first, above[1], tokens), first[1] * tokens / first[0]), first[1])

    def tokens_within(self, seconds: float) -> int:
        """The most tokens whose step takes at most `seconds`, by the upper bound; 0 if unknown.

        Converges to the true value as steps of the returned size are measured.
        """
        counts = [c * seconds / mean for c, mean in self._points.values() if mean <= seconds]
        return int(max(counts, default=0.0))

    @property
    def token_seconds(self) -> float | None:
        """Seconds of one token in the most efficient step so far; None before the first."""
        return min((mean / count for count, mean in self._points.values()), default=None)


def _line(left: tuple[float, float], right: tuple[float, float], x: float) -> float:
    slope = (right[1] - left[1]) / (right[0] - left[0])
    return left[1] + slope * (x - left[0])


class StepModel:
    """Step time as a linear function of its tokens, fitted to the steps so far.

    seconds = fixed + row * due + token * others: `due` are the next tokens of requests that lag
    by one, `others` the tokens of prompts. Least squares on relative errors with exponential
    forgetting; a weak pull towards the last estimate holds what the latest steps do not
    determine. steps: how many were seen. largest: the most tokens of one of them.
    """

    __slots__ = ("_left", "_right", "fixed", "largest", "row", "steps", "token")

    def __init__(self) -> None:
        self.fixed = self.row = self.token = 0.0
        self.largest = 0
        self.steps = 0
        # The normal equations: left @ (fixed, row, token) = right.
        self._left = [[0.0] * 3 for _ in range(3)]
        self._right = [0.0] * 3

    def note(self, due: int, others: int, seconds: float) -> None:
        """A step of `due` and `others` tokens took `seconds`."""
        if seconds <= 0:
            return
        self.steps += 1
        self.largest = max(self.largest, due + others)
        # Divided by the time: every step counts alike, and one that stalled counts little.
        x = (1 / seconds, due / seconds, others / seconds)
        keep = 1 - 1 / min(self.steps, _MEMORY)
        for i, row in enumerate(self._left):
            row[:] = [keep * value + x[i] * x[j] for j, value in enumerate(row)]
            self._right[i] = keep * self._right[i] + x[i]
        left, right = [row.copy() for row in self._left], self._right.copy()
        for i, value in enumerate((self.fixed, self.row, self.token)):
            pull = _PULL * left[i][i] + _LEAST
            left[i][i] += pull
            right[i] += pull * value
        self.fixed, self.row, self.token = [max(value, 0.0) for value in _solve(left, right)]

    def seconds(self, due: int, others: int) -> float:
        """Expected seconds of a step."""
        return self.fixed + self.row * due + self.token * others


def _solve(left: list[list[float]], right: list[float]) -> list[float]:
    """x of left @ x = right, for a positive definite 3 x 3 matrix (Cramer's rule)."""
    whole = _determinant(left)
    found = []
    for i in range(3):
        part = [[*row[:i], value, *row[i + 1 :]] for row, value in zip(left, right, strict=True)]
        found.append(_determinant(part) / whole)
    return found


def _determinant(m: list[list[float]]) -> float:
    return (
        m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1])
        - m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0])
        + m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0])
    )


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
