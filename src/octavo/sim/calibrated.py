"""The cost of a step on a device that was measured: terms with a meaning, fitted to probes.

    seconds = step + alone + rows(r) + head(s) + read * kv + shared * kv_shared + pair * pairs
              + host_step + host_row * sequences + copy * blocks

`rows` and `head` are lines with a kink at each of KNOTS, never falling: a product of few rows
takes the time of reading its weights, one of many a time for each row. Not here: what is
measured, which `sim.calibration` decides.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError, brief
from octavo.sim.cost import StepShape

# Rows of a step, and logit rows, where the slope may change. The last slope goes on.
KNOTS = (1, 4, 16, 64, 256)
HEAD_KNOTS = (1, 8, 32)
FORM = 2  # of calibration files

_PLAIN = ("step", "alone", "head", "read", "shared", "pair", "host_step", "host_row", "copy")

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds. step: of any step, with what it reads of weights for one row; alone: more, if it has
    one row only, whose products are of another kind (less is none); slopes: of a row, from each of
    KNOTS on. head: of a step that draws, with one row of logits; head_slopes: of a row of
    them, from each of HEAD_KNOTS on. read: of a token of context, of a row of one token; shared:
    the same where other rows of the step read the token too. pair: of a prompt's token and one
    that it attends to. host_step, host_row: what the host takes between steps, and for each
    sequence. copy: of a block copied.
    """

    step: float
    alone: float
    slopes: tuple[float, ...]
    head: float
    head_slopes: tuple[float, ...]
    read: float
    shared: float
    pair: float
    host_step: float = 0.0
    host_row: float = 0.0
    copy: float = 0.0

    def times(self, factor: float) -> "Terms":
        """Of a machine that takes `factor` times as long."""
        return replace(
            self,
            slopes=tuple(factor * slope for slope in self.slopes),
            head_slopes=tuple(factor * slope for slope in self.head_slopes),
            **{name: factor * getattr(self, name) for name in _PLAIN},
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """A step that was run. seconds: of the runner alone."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Terms, and what they were measured with. error: median of how far a fitted probe is from its
    measurement, as a share; unsteadiness: by how much steps took longer on average than typically,
    which the terms include. settings: others that the times depend on, as they were given."""

    model: str
    dtype: str
    kv_cache_dtype: str
    device: str
    terms: Terms
    error: float
    unsteadiness: float
    settings: Mapping[str, str | int | None] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> "Calibration":
        """As `save` has written it. Raises ConfigError."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_File)
        except OSError as error:
            raise ConfigError(f"cannot read calibration {path}: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} is no calibration as octavo simulate saves them: {brief(error)}"
            ) from None
        if found.octavo_calibration != FORM:
            raise ConfigError(
                f"calibration {path} is of form {found.octavo_calibration}, and this version reads "
                f"{FORM}; measure again"
            )
        _check(found.calibration.terms, path)
        return found.calibration

    def save(self, path: Path) -> None:
        """As JSON. Raises ConfigError."""
        text = msgspec.json.encode(_File(FORM, self))
        try:
            path.write_bytes(msgspec.json.format(text, indent=2) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write calibration {path}: {error.strerror}") from None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """What is saved."""

    octavo_calibration: int
    calibration: Calibration


def _check(terms: Terms, path: Path) -> None:
    """Raise ConfigError for terms that no machine has."""
    counts = {"slopes": len(KNOTS), "head_slopes": len(HEAD_KNOTS)}
    for name, value in asdict(terms).items():
        values = value if isinstance(value, (tuple, list)) else (value,)
        if len(values) != counts.get(name, 1):
            raise ConfigError(
                f"calibration {path}: {name} has {len(values)} values and needs {counts[name]}"
            )
        for each in values:
            if not 0 <= each < math.inf:
                raise ConfigError(f"calibration {path}: {name} is {each}, not seconds from 0 on")
    if terms.step <= 0:
        raise ConfigError(f"calibration {path}: step is {terms.step}; a step takes some time")


class CalibratedCost:
    """StepCost from measured terms."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._rows = _Line(terms.step + terms.host_step, KNOTS, terms.slopes)
        self._head = _Line(terms.head, HEAD_KNOTS, terms.head_slopes)

    def seconds(self, shape: StepShape) -> float:
        """See StepCost."""
        terms = self._terms
        copies = terms.copy * shape.swapped_blocks
        if not shape.rows:
            return copies + terms.host_step
        head = self._head.at(shape.samples) if shape.samples else 0.0
        own = shape.kv_read - shape.kv_shared
        alone = terms.alone if shape.rows == 1 else 0.0
        return (
            self._rows.at(shape.rows) + alone + head + terms.read * own
            + terms.shared * shape.kv_shared + terms.pair * shape.prefill_pairs
            + terms.host_row * shape.sequences + copies
        )  # fmt: skip


class _Line:
    """A line through `first` at the first knot, with a slope from each knot on."""

    __slots__ = ("_knots", "_slopes", "_values")

    def __init__(self, first: float, knots: Sequence[int], slopes: Sequence[float]) -> None:
        self._knots, self._slopes = tuple(knots), tuple(slopes)
        values = [first]
        for (low, high), slope in zip(pairwise(knots), slopes, strict=False):
            values.append(values[-1] + slope * (high - low))
        self._values = tuple(values)

    def at(self, x: int) -> float:
        i = max(bisect_right(self._knots, x) - 1, 0)
        return self._values[i] + self._slopes[i] * max(x - self._knots[i], 0)


def fit(measured: Sequence[Measured]) -> tuple[Terms, float]:
    """The terms that give these times, and the median of the relative errors.

    Least squares of relative errors; no term is negative. Terms of the host and of copies are not
    part of it. Raises ConfigError if a step took no time.
    """
    seconds = np.array([m.seconds for m in measured])
    if not len(measured) or not (seconds > 0).all():
        raise ConfigError("a step took no time at all: it cannot be calibrated with")
    columns = np.array([_columns(m.shape) for m in measured], np.float64)
    found = _least_squares(columns / seconds[:, None], np.ones(len(measured)))
    error = float(np.median(np.abs(columns @ found / seconds - 1)))
    values = [float(value) for value in found]
    rows, head = len(KNOTS), len(HEAD_KNOTS)
    (step, alone), slopes, values = values[:2], values[2 : 2 + rows], values[2 + rows :]
    first, head_slopes, values = values[0], values[1 : 1 + head], values[1 + head :]
    return Terms(step, alone, tuple(slopes), first, tuple(head_slopes), *values), error


def _columns(shape: StepShape) -> list[float]:
    """What each term of `fit` is multiplied by."""
    draws = float(shape.samples > 0)
    return [
        1.0, float(shape.rows == 1), *_parts(shape.rows, KNOTS),
        draws, *_parts(shape.samples, HEAD_KNOTS),
        shape.kv_read - shape.kv_shared, shape.kv_shared, shape.prefill_pairs,
    ]  # fmt: skip


def _parts(x: int, knots: Sequence[int]) -> list[float]:
    """How much of x is between each knot and the next."""
    ends = (*knots[1:], math.inf)
    return [max(min(x, end) - knot, 0.0) for knot, end in zip(knots, ends, strict=True)]


def _least_squares(left: Matrix, right: Matrix) -> Matrix:
    """x >= 0 for which |left x - right| is small: terms that would be negative are left out, the
    worst first."""
    scale = np.linalg.norm(left, axis=0)
    used = np.flatnonzero(scale > 0)
    x = np.zeros(left.shape[1])
    while len(used):
        found, *_ = np.linalg.lstsq(left[:, used] / scale[used], right, rcond=None)
        if found.min() >= 0:
            x[used] = found / scale[used]
            break
        used = np.delete(used, found.argmin())
    return x
