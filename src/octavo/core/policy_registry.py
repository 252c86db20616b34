"""Policies by name: what a text such as `slo,p99_itl_ms=50` or `module:Class` stands for.

Every policy, also an object that a user passes, is checked here before it serves an engine, and
serves one engine at a time.
"""

import contextlib
import inspect
import weakref
from collections.abc import Callable, Collection
from importlib import import_module

from octavo.core.policy import AdaptivePolicy, Gauged, Policy
from octavo.errors import ConfigError, nearest

_POLICIES = {
    "adaptive": "octavo.core.slo:adaptive",
    "fifo": "octavo.core.policy:FIFOScheduler",
    "priority": "octavo.core.policy:PriorityScheduler",
    "slo": "octavo.core.slo:SLOScheduler",
}


def policy_names() -> tuple[str, ...]:
    """The names that `create_policy` knows."""
    return tuple(sorted(_POLICIES))


def create_policy(policy: "str | Policy") -> Policy:
    """The given policy, checked, or one made from text: a name, or `module:Class` for a custom
    class, followed by options, as in `slo,p99_itl_ms=50,shed=true`.

    Raises ConfigError, which lists the known names, or what the object lacks.
    """
    made = _from_text(policy) if isinstance(policy, str) else policy
    _check(made)
    _check_free(made)
    return made  # type: ignore[return-value]  # `_check` has seen its methods


def bind(policy: Policy, scheduler: object) -> None:
    """Reserve `policy` for `scheduler`, until that is closed or gone.

    Raises ConfigError if another one uses it: a policy keeps measurements and rankings of the
    requests of its scheduler, and those of two would mix.
    """
    _check_free(policy)
    with contextlib.suppress(AttributeError, TypeError):  # no place for it: slots, a frozen value
        policy._octavo_scheduler = weakref.ref(scheduler)  # type: ignore[attr-defined]


def unbind(policy: Policy, scheduler: object) -> None:
    """The end of `bind`."""
    if _scheduler_of(policy) is scheduler:
        del policy._octavo_scheduler  # type: ignore[attr-defined]


def _scheduler_of(policy: object) -> object | None:
    reference = getattr(policy, "_octavo_scheduler", None)
    scheduler: object | None = reference() if reference is not None else None
    # A copy of a policy has a copy of the reference, and is free.
    return scheduler if getattr(scheduler, "policy", None) is policy else None


def _check_free(policy: object) -> None:
    if _scheduler_of(policy) is not None:
        raise ConfigError(
            f"this {type(policy).__name__} object serves another engine; give each engine a "
            "scheduler of its own, or close the other engine first"
        )


# Methods of the interfaces, and the number of their arguments.
_REQUIRED = {"order": 2, "victim": 3, "budget": 1}
_OPTIONAL = {"observe": 1, "refusal": 1, "gauges": 0}


def _check(policy: object) -> None:
    """Raises ConfigError unless `policy` has what a policy needs, and can be called so."""
    what = f"a name ({_names()}) or an object with name, order, victim and budget"
    if isinstance(policy, type):
        raise ConfigError(
            f"scheduler must be {what}, not the class {policy.__name__}; pass an object: "
            f"{policy.__name__}()"
        )
    lacking = [name for name in ("name", *_REQUIRED) if _lacks(policy, name)]
    if len(lacking) > len(_REQUIRED) and not isinstance(policy, Policy):
        raise ConfigError(f"scheduler must be {what}, not {policy!r:.80}")
    # An interface's own method does nothing; one that is inherited from it was forgotten.
    lacking += [n for n in _OPTIONAL if getattr(policy, n, None) and _lacks(policy, n)]
    if lacking:
        raise ConfigError(
            f"the scheduler {type(policy).__name__} does not define {', '.join(lacking)}; derive "
            "it from octavo.schedulers.FIFOScheduler to inherit what it leaves out"
        )
    for name, count in {**_REQUIRED, **_OPTIONAL}.items():
        if (method := getattr(policy, name, None)) is not None:
            _check_call(type(policy).__name__, name, method, count)


def _lacks(policy: object, name: str) -> bool:
    if getattr(policy, name, None) is None:
        return True
    own = getattr(type(policy), name, None)
    return any(
        own is getattr(interface, name, _lacks) for interface in (Policy, AdaptivePolicy, Gauged)
    )


def _check_call(owner: str, name: str, method: Callable[..., object], count: int) -> None:
    try:
        inspect.signature(method).bind(*[None] * count)
    except TypeError as error:
        interface = next(kind for kind in (Policy, AdaptivePolicy, Gauged) if hasattr(kind, name))
        wanted = ", ".join(inspect.signature(getattr(interface, name)).parameters)
        raise ConfigError(f"{owner}.{name} must be a method {name}({wanted}): {error}") from error
    except ValueError:
        pass  # a built-in without a signature


def _from_text(text: str) -> object:
    name, *options = (part.strip() for part in text.split(","))
    path = name if ":" in name else _POLICIES.get(name)
    if path is None:
        hint = nearest(name, _POLICIES)
        raise ConfigError(f"unknown scheduler {name!r}; there are {_names()}{hint}")
    module, _, kind = path.partition(":")
    try:
        make = getattr(import_module(module), kind)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"scheduler {name!r} cannot be imported: {error}") from error
    given = dict(_option(option) for option in options)
    _check_options(name, make, given)
    try:
        return make(**given)
    except TypeError as error:
        raise ConfigError(f"scheduler {name!r} does not take {options}: {error}") from error


def _check_options(name: str, make: Callable[..., object], given: Collection[str]) -> None:
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return  # no class or function of Python's: calling it will tell
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # it will tell
    for option in given:
        if option not in parameters:
            known = ", ".join(parameters) or "none"
            raise ConfigError(
                f"scheduler {name!r} does not take the option {option!r}; its options are: "
                f"{known}{nearest(option, parameters)}"
            )


def _option(text: str) -> tuple[str, float | bool | None]:
    name, _, value = text.partition("=")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return name, words[value.lower()]
    try:
        return name, float(value)
    except ValueError as error:
        raise ConfigError(
            f"scheduler options are name=number, name=true or name=none, not {text!r}"
        ) from error


def _names() -> str:
    return ", ".join(policy_names())
