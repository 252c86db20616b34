"""Checked access to the fields of a config: each getter checks type and range, and names the field.

Files are not to be believed: an integer has an upper bound, so that nothing is made of a size that
no model has, and a number is finite.
"""

import sys
from collections.abc import Mapping
from typing import Any

from octavo.errors import CheckpointError, shown

# Larger than any size, count or length of a model: 2**31 tokens, values or heads.
MOST = 2**31
# Layers are made one by one. The deepest known models have fewer than 200.
MOST_LAYERS = 4096
_LARGEST = sys.float_info.max


def is_number(value: object) -> bool:
    """Whether a value is a finite number, and no bool."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and -_LARGEST <= value <= _LARGEST
    )


class Fields:
    """The values of a config, or else its family's defaults. `source` names it in errors."""

    def __init__(
        self, source: str, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.source = source
        self._values = values
        self._defaults = defaults or {}

    def get(self, name: str) -> Any:
        return self._values.get(name, self._defaults.get(name))

    def given(self, name: str) -> Any:
        """The config's own value, without its family's default."""
        return self._values.get(name)

    def integer(self, name: str, low: int = 1, most: int = MOST) -> int:
        value = self.optional(name, low, most)
        if value is None:
            raise CheckpointError(f"{self.source} lacks {name!r}")
        return value

    def optional(self, name: str, low: int = 1, most: int = MOST) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.wrong(name, value, f"an integer of at least {low}")
        if value > most:
            raise self.wrong(name, value, f"at most {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not is_number(value) or not value > 0:
            raise self.wrong(name, value, "a number above 0")
        return float(value)

    def maybe_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers above 0."""
        value = self.get(name)
        items = value if isinstance(value, list) else []
        fine = all(is_number(v) and v > 0 for v in items)
        if len(items) != count or not fine:
            raise self.wrong(name, value, f"a list of {count} numbers above 0")
        return tuple(map(float, items))

    def items(self, name: str, kind: type) -> list[Any]:
        """A list of values of one type; [] where there is none."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.wrong(name, value, f"a list of {kind.__name__}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def choice(self, name: str, choices: Mapping[str, Any]) -> Any:
        """The meaning of a name that must be one of `choices`."""
        value = self.get(name)
        if not isinstance(value, str) or value not in choices:
            listed = ", ".join(repr(choice) for choice in choices)
            raise self.wrong(name, value, listed if len(choices) == 1 else f"one of {listed}")
        return choices[value]

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i < MOST for i in items):
            raise self.wrong(name, value, "a token id or a list of them")
        return tuple(i for i in items if i >= 0)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def wrong(self, name: str, value: object, right: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {name} is {shown(value)}; it must be {right}")
