"""Declares the memory layouts shared by Python and compiled kernels: once, by field.

A layout is a list of 8-byte fields, each of a kind. From it a caller packs its arguments by
keyword, a kernel reads its constant offsets, a planner gets a NumPy dtype, and a captured step
knows which fields to rewrite. The layouts themselves are in `abi`. Imports no Numba.
"""

import enum
import struct
from collections import namedtuple
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, NewType

import numpy as np

Address = NewType("Address", int)


class Kind(enum.Enum):
    """The kind of a field; a signed 8-byte integer unless noted."""

    COUNTER = enum.auto()  # zero when a kernel is called; its threads count in it
    POINTER = enum.auto()  # an address, or 0 where something is absent
    ROWS = enum.auto()  # the rows of this call: in a captured step, the tokens of the step
    CHUNK = enum.auto()  # rows that a thread claims at a time
    I64 = enum.auto()
    U64 = enum.auto()
    F64 = enum.auto()


# Letters of `struct`, types of NumPy.
_LETTERS = {Kind.U64: "Q", Kind.F64: "d"}
_TYPES = {Kind.U64: "u8", Kind.F64: "f8"}


class Record:
    """Fields in memory, in order. `offset.name` is a field's byte offset, for kernels."""

    def __init__(self, **kinds: Kind) -> None:
        self.names = tuple(kinds)
        self.kinds = tuple(kinds.values())
        self.nbytes = 8 * len(kinds)

    @cached_property
    def offset(self) -> Any:
        """A named tuple, because Numba treats its fields as constants."""
        return namedtuple("Offsets", self.names)(*range(0, self.nbytes, 8))

    @cached_property
    def dtype(self) -> np.dtype[np.void]:
        """A structured type, to fill arrays of records."""
        fields = zip(self.names, self.kinds, strict=True)
        return np.dtype([(name, _TYPES.get(kind, "i8")) for name, kind in fields])

    def words_of(self, kind: Kind) -> tuple[int, ...]:
        """The indices of the fields of `kind`."""
        return tuple(i for i, found in enumerate(self.kinds) if found is kind)


class Arguments(Record):
    """The arguments of `kernel`, a "module:maker" (see `kernel.Kernel`). Counters come first."""

    def __init__(self, kernel: str, **kinds: Kind) -> None:
        super().__init__(**kinds)
        self.kernel = kernel
        self._struct = struct.Struct("<" + "".join(_LETTERS.get(k, "q") for k in self.kinds))

    def packer(self, **fixed: float) -> Callable[..., bytes]:
        """A function of keywords, one for each field that is neither a counter nor `fixed`.

        It returns a new object at each call, since a kernel writes to its counters.
        """
        return _packer(self.names, self.kinds, tuple(fixed))(self._struct.pack, **fixed)


@cache
def _packer(
    names: tuple[str, ...], kinds: tuple[Kind, ...], fixed: tuple[str, ...]
) -> Callable[..., Callable[..., bytes]]:
    """(struct's pack, **fixed) -> packer. Generated as code, because a step without
    capture packs 270 times: so keywords cost no more than those of any Python function."""
    counters = [name for name, kind in zip(names, kinds, strict=True) if kind is Kind.COUNTER]
    given = [name for name in names if name not in (*counters, *fixed)]
    if unknown := set(fixed) - set(names):
        raise TypeError(f"no such fields: {', '.join(sorted(unknown))}; there are {names}")
    values = ", ".join("0" if name in counters else name for name in names)
    code = (
        f"def make(pack{', *, ' if fixed else ''}{', '.join(fixed)}):\n"
        f"    def packed({'*, ' if given else ''}{', '.join(given)}):\n"
        f"        return pack({values})\n"
        "    return packed\n"
    )
    scope: dict[str, Any] = {}
    exec(code, scope)
    made: Callable[..., Callable[..., bytes]] = scope["make"]
    return made
