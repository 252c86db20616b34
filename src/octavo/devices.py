"""The registry of devices.

A device is an object that implements `octavo.runner.device.Device`: memory, allocation, ops,
linear products, sampling. It is imported when an engine is created, so this file needs no torch.
"""

import importlib
from collections.abc import Callable
from typing import Any

from octavo.errors import ConfigError, nearest

# Maps the engine's configuration to a device.
Factory = Callable[[Any], Any]

# Name -> module and factory; "auto" is the first.
_BUILT_IN = {"cpu": "octavo.runner.device:cpu"}
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


def names() -> tuple[str, ...]:
    """Every valid value of `device`, "auto" first."""
    return ("auto", *_BUILT_IN, *sorted(_registered))


def create(name: str, config: Any) -> Any:
    """The device called `name`. Raises ConfigError, listing the known names, if there is none."""
    if name == "auto":
        name = next(iter(_BUILT_IN))
    if name in _registered:
        return _registered[name](config)
    if name not in _BUILT_IN:
        known = names()
        raise ConfigError(
            f"unknown device {name!r}; known: {', '.join(known)}{nearest(name, known)}"
        )
    module, _, attribute = _BUILT_IN[name].partition(":")
    return getattr(importlib.import_module(module), attribute)(config)
