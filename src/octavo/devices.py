"""The registry of devices.

A device is an object that implements `octavo.runner.device.Device`: memory, allocation, ops,
linear products, sampling. It is imported when an engine is created, so this file needs no torch.
"""

import importlib
import re
from collections.abc import Callable
from typing import Any

from octavo.errors import ConfigError, nearest

# Maps the engine's configuration to a device.
Factory = Callable[[Any], Any]

# Name -> module and factory; "auto" is the first.
_BUILT_IN = {
    "cpu": "octavo.runner.device:cpu",
    "cuda": "octavo.runner.device:cuda",
    "interpret": "octavo.runner.device:interpret",
}
# Devices of which there may be several: "cuda:1" is the second.
_NUMBERED = re.compile(r"(cuda):[0-9]+")
# Compute capability of the oldest GPU with kernels: asynchronous copies, and bfloat16 in the matrix
# units.
OLDEST_GPU = (8, 0)
# Changed at run time by `register` only.
_registered: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Make `LLM(device=name)` compute on the device that `factory(config)` returns.

    Raises ConfigError for an empty name, "auto" or a built-in one. Registering a name again
    replaces the factory.
    """
    if not name or name == "auto" or name in _BUILT_IN:
        raise ConfigError(
            f"device name {name!r} is taken or empty; choose another than "
            f"'auto', {', '.join(map(repr, sorted(_BUILT_IN)))}"
        )
    _registered[name] = factory


def kind(name: str) -> str:
    """The name without a number: "cuda" of "cuda:1"."""
    numbered = _NUMBERED.fullmatch(name)
    return numbered[1] if numbered else name


def names() -> tuple[str, ...]:
    """Every valid value of `device`, "auto" first; "cuda" may be followed by a number."""
    return ("auto", *_BUILT_IN, *sorted(_registered))


def create(name: str, config: Any) -> Any:
    """The device called `name`. Raises ConfigError, listing the known names, if there is none."""
    if name == "auto":
        name = next(iter(_BUILT_IN))
    if name in _registered:
        return _registered[name](config)
    if kind(name) not in _BUILT_IN:
        known = names()
        raise ConfigError(
            f"unknown device {name!r}; known: {', '.join(known)}{nearest(name, known)}"
        )
    module, _, attribute = _BUILT_IN[kind(name)].partition(":")
    return getattr(importlib.import_module(module), attribute)(config)
