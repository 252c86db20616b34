"""Which weights are multiplied as integers.

The one form that all 4- and 8-bit formats share is `kernels.codes.Codes`.

A component is a product of the model by the name it has in a checkpoint, joined ones by their
joint name: "layers.3.self_attn.qkv_proj", "layers.3.self_attn.o_proj",
"layers.3.mlp.gate_up_proj", "layers.3.mlp.down_proj", "lm_head".
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from octavo.errors import ConfigError, nearest
from octavo.kernels.codes import Codes as Codes

# stored blocks, uint8 [n, bytes of a block] -> their values, fp32 [n, values of a block]
Decode = Callable[[torch.Tensor], torch.Tensor]

NONE, INT8, INT4 = "none", "int8", "int4"
METHODS = (INT8, INT4)  # names that `quantization=` takes
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The method of each component: the last of `overrides` (pattern, method) that fits it, else
    `head` for the head and `default` for the others."""

    default: str = NONE
    head: str = NONE
    overrides: tuple[tuple[str, str], ...] = ()

    def method(self, component: str) -> str:
        fitting = [how for pattern, how in self.overrides if fnmatchcase(component, pattern)]
        return fitting[-1] if fitting else self.head if component == HEAD else self.default

    def check(self, components: Collection[str]) -> None:
        """Raise ConfigError for a pattern that no component fits."""
        for pattern, _ in self.overrides:
            if not any(fnmatchcase(component, pattern) for component in components):
                known = sorted({_numberless(component) for component in components})
                raise ConfigError(
                    f"quantization_override: no part of the model is called {pattern!r}; "
                    f"there are {', '.join(known)}"
                )


def recipe(quantization: str | None, override: str | None, stored: str | None = None) -> Recipe:
    """What the two options ask for. Raises ConfigError for a name that is not known.

    stored: the method that computes on a checkpoint's own quantized products; its head is as
    stored. The head stays at 8 bits under int4: its errors reach the tokens undamped.
    """
    if stored is None and quantization is not None and quantization not in METHODS:
        raise ConfigError(
            f"quantization {quantization!r} is not supported{nearest(quantization, METHODS)}; "
            f"known: {', '.join(METHODS)}"
        )
    pairs = tuple(_override(part) for part in (override or "").split(",") if part.strip())
    if stored is not None:
        return Recipe(stored, NONE, pairs)
    default = quantization or NONE
    return Recipe(default, INT8 if default == INT4 else default, pairs)


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
