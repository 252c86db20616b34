"""Names of devices, and where the code of each is.

A device is a value that has what `octavo.runner.device.Device` says: memory, allocation, ops,
linear products, sampling. It is imported when an engine is made, so this file needs no torch.
"""

import importlib
from collections.abc import Callable
from typing import Any

from octavo.errors import ConfigError, nearest

# Takes the engine's configuration, gives a device.
Factory = Callable[[Any], Any]

# Name -> where its factory is; "auto" is the first.
_BUILT_IN = {"cpu": "octavo.runner.device:cpu"}
# Grows at run time by `register` only.
_registered: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Make `LLM(device=name)` compute on what `factory(config)` gives.

    Raises ConfigError for an empty name, "auto" or a built-in one. A name given again replaces
    the factory.
    """
    if not name or name == "auto" or name in _BUILT_IN:
        raise ConfigError(
            f"device name {name!r} is taken or empty; choose another than "
            f"'auto', {', '.join(map(repr, sorted(_BUILT_IN)))}"
        )
    _registered[name] = factory


def names() -> tuple[str, ...]:
    """Every name that `device` may have, "auto" first."""
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
