"""What a weight format is, and which GEMMs of a model are computed on quantized weights.

A component is a GEMM of the model by the name it has in a checkpoint, joined ones by their
joint name: "layers.3.self_attn.qkv_proj", "layers.3.self_attn.o_proj",
"layers.3.mlp.gate_up_proj", "layers.3.mlp.down_proj", "lm_head".

The one form that all 4- and 8-bit formats share is `kernels.codes.Codes`. Formats are files beside
this one, known by name to `quant.registry`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Protocol

import torch

from octavo.errors import CheckpointError, ConfigError, nearest, shown
from octavo.kernels.codes import Codes as Codes
from octavo.kernels.codes import Form

NONE, INT8, INT4, FP8 = "none", "int8", "int4", "fp8"
STORED = "stored"  # blocks of a file, each product in the types that it is stored in
W8A8, W4A8 = "w8a8", "w4a8"  # with activations that are rounded to 8 bits
GGUF = "gguf"  # asks for STORED by its name
METHODS = (INT8, INT4, FP8, W8A8, W4A8)  # names that `quantization=` takes
_HEADS = {INT4: INT8, W4A8: W8A8}  # 4 bits are too few for a head
HEAD = "lm_head"


# stored blocks, uint8 [n, bytes of a block] -> their values, fp32 [n, values of a block]
Decode = Callable[[torch.Tensor], torch.Tensor]
# (begin, end) of each dimension of a tensor
Region = tuple[tuple[int, int], ...]
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """How blocks of one tensor are decoded.

    form: in which their values are codes, to the bit; codes: blocks -> the codes in it, uint8
    [n, values of a block], with the terms [n, groups of a block, Form.num_terms] and, of "super"
    terms, the factors [n, 1, Form.num_terms].
    """

    decode: Decode
    form: Form
    codes: Callable[[torch.Tensor], Parts]

    @property
    def is_int4(self) -> bool:
        """Whether blocks hold affine codes of 4 bits in groups of 32, as `Codes` are."""
        return (self.form.bits, self.form.group) == (4, 32) and self.form.is_linear


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One of the tensors that a quantized weight is stored as.

    dtype: what it is read as. A float type takes any stored float, rounded; an integer type takes
    stored integers that it can represent, float8 only itself.
    outputs, inputs: the dimension that runs over the weight's rows or columns, counted from the
    last (-1), and how many of them an index stands for; None: the part is the same for all of
    them. A format none of whose parts has one is read whole, and its values are cut.
    together: inputs that no cut separates, although the part itself is not cut.
    also: other shapes that it may have, which are the same for all rows and columns. needed:
    whether it must be there; decoding gets those that are.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    outputs: tuple[int, int] | None = None
    inputs: tuple[int, int] | None = None
    together: int = field(default=1, kw_only=True)
    also: tuple[tuple[int, ...], ...] = field(default=(), kw_only=True)
    needed: bool = field(default=True, kw_only=True)

    def region(self, weight: Region) -> Region:
        """What stores a region of the weight, at least."""
        found = [(0, size) for size in self.shape]
        for side, (begin, end) in ((self.outputs, weight[-2]), (self.inputs, weight[-1])):
            if side is not None:
                at, each = side
                found[at] = (begin // each, -(-end // each))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class QuantizationFields:
    """`quantization_config` of the config.json at `source`."""

    source: str
    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def wrong(self, name: str, right: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: quantization_config.{name} is {shown(self.get(name))}; "
            f"it must be {right}"
        )


class CheckpointQuantization(Protocol):
    """How a checkpoint stores the weights of its GEMMs; an instance describes one checkpoint."""

    METHOD: ClassVar[str]  # `quant_method` in config.json

    @classmethod
    def from_config(cls, fields: QuantizationFields) -> "CheckpointQuantization":
        """Raises CheckpointError for a field of a value that is not understood."""
        ...

    @property
    def computed_as(self) -> str:
        """The engine's own method (`METHODS`) that computes on what `decode` gives; NONE: the
        weights are dequantized when they are loaded."""
        ...

    def explain(self) -> str:
        """For the log: the format, and how the engine computes on it."""
        ...

    def parts(self, shape: tuple[int, ...]) -> Mapping[str, StoredPart]:
        """What stores a weight [..., N, K], by the endings that replace "weight" in its name."""
        ...

    def decode(self, parts: Mapping[str, torch.Tensor]) -> Codes | torch.Tensor:
        """A matrix [N, K] of its parts, as codes or as values.

        Raises CheckpointError for parts that contradict each other.
        """
        ...


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """The method of each component: that of the last of `overrides` (pattern, method) that matches
    it, else `head` for the head and `default` for the others.

    as_stored: `default` is how a checkpoint stores its products; those that it stores as floats
    stay floats.
    """

    default: str = NONE
    head: str = NONE
    overrides: tuple[tuple[str, str], ...] = ()
    as_stored: bool = False

    @property
    def methods(self) -> frozenset[str]:
        """Every method that is asked for."""
        return frozenset((self.default, self.head, *(how for _, how in self.overrides)))

    def method(self, component: str) -> str:
        matching = [how for pattern, how in self.overrides if fnmatchcase(component, pattern)]
        return matching[-1] if matching else self.head if component == HEAD else self.default

    def method_of(self, component: str, weight: torch.Tensor | Codes) -> str:
        """The method of a component whose weight is loaded."""
        asked = any(fnmatchcase(component, pattern) for pattern, _ in self.overrides)
        if self.as_stored and not asked and isinstance(weight, torch.Tensor):
            return NONE
        return self.method(component)

    def check(self, components: Collection[str]) -> None:
        """Raise ConfigError for a pattern that no component matches."""
        for pattern, _ in self.overrides:
            if not any(fnmatchcase(component, pattern) for component in components):
                known = sorted({_numberless(component) for component in components})
                raise ConfigError(
                    f"quantization_override: no part of the model is called {pattern!r}; "
                    f"there are {', '.join(known)}"
                )


def quant_config(
    quantization: str | None, override: str | None, stored: str | None = None
) -> QuantConfig:
    """What the two options ask for. Raises ConfigError for an unknown name.

    stored: the method that computes on a checkpoint's own quantized weights; its head is as
    stored. The head stays at 8 bits under int4 and w4a8: its errors reach the tokens undamped.
    """
    if stored is None and quantization not in (None, NONE, *METHODS):
        raise ConfigError(
            f"quantization {quantization!r} is not supported{nearest(str(quantization), METHODS)}; "
            f"known: {', '.join((*METHODS, NONE))}"
        )
    pairs = tuple(_override(part) for part in (override or "").split(",") if part.strip())
    if stored is not None:
        return QuantConfig(stored, STORED if stored == STORED else NONE, pairs, as_stored=True)
    default = quantization or NONE
    return QuantConfig(default, _HEADS.get(default, default), pairs)


def _override(part: str) -> tuple[str, str]:
    pattern, equals, method = (text.strip() for text in part.partition("="))
    methods = (NONE, *METHODS)
    if not (pattern and equals and method in methods):
        raise ConfigError(
            f"quantization_override {part.strip()!r} is not PATTERN=METHOD with a method of "
            f"{', '.join(methods)}{nearest(method, methods)}"
        )
    return pattern, method


def _numberless(component: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in component.split("."))
