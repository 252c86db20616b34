"""How stored bytes become a tensor: the place where every weight format plugs in.

Today all formats are decoded while loading. A format that stays packed while it is multiplied
(int8, int4, AWQ, GPTQ) adds a file here with a function from packed weights to a
`layers.linear.Product`, and its name to `METHODS`.
"""

from collections.abc import Callable

import torch

from octavo.errors import ConfigError, nearest

# stored blocks, uint8 [n, bytes of a block] -> their values, fp32 [n, values of a block]
Decode = Callable[[torch.Tensor], torch.Tensor]

METHODS: tuple[str, ...] = ()  # names that `quantization=` takes


def check_method(name: str | None) -> None:
    """Raise ConfigError unless `name` is None or a known way to quantize at load."""
    if name is not None and name not in METHODS:
        known = ", ".join(METHODS) or "none yet"
        raise ConfigError(
            f"quantization {name!r} is not supported{nearest(name, METHODS)}; known: {known}"
        )
