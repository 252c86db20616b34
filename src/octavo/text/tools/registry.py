"""The formats of tool calls, by name and by chat template."""

from octavo.errors import ConfigError, nearest, shown
from octavo.text.tools.base import ToolFormat
from octavo.text.tools.hermes import Hermes

# The first whose template matches is taken: the more particular ones come first.
FORMATS: tuple[ToolFormat, ...] = (Hermes(),)


def names() -> list[str]:
    """All names and aliases."""
    return sorted(name for format in FORMATS for name in (format.name, *format.aliases))


def find(name: str) -> ToolFormat:
    """The format of this name or alias. Raises ConfigError for one that is not known."""
    for format in FORMATS:
        if name in (format.name, *format.aliases):
            return format
    raise ConfigError(
        f"no format of tool calls is called {shown(name)}{nearest(name, names())}; "
        f"there are {', '.join(names())}"
    )


def detect(template: str) -> ToolFormat | None:
    """The format in which a model with this chat template writes calls."""
    return next((format for format in FORMATS if format.matches(template)), None)
