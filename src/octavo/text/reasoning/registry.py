"""The formats of reasoning, by name and by chat template."""

from octavo.errors import ConfigError, nearest, shown
from octavo.text.reasoning.base import ReasoningFormat
from octavo.text.reasoning.deepseek_r1 import DeepSeekR1
from octavo.text.reasoning.deepseek_v3 import DeepSeekV3
from octavo.text.reasoning.gemma4 import Gemma4
from octavo.text.reasoning.glm45 import Glm45
from octavo.text.reasoning.gpt_oss import GptOss
from octavo.text.reasoning.granite import Granite
from octavo.text.reasoning.mistral import Mistral
from octavo.text.reasoning.olmo3 import Olmo3
from octavo.text.reasoning.qwen3 import Qwen3

# The first whose template matches is taken: the more particular ones come first.
FORMATS: tuple[ReasoningFormat, ...] = (
    GptOss(), Gemma4(), Mistral(), Granite(), DeepSeekV3(), Glm45(), Olmo3(), Qwen3(), DeepSeekR1(),
)  # fmt: skip


def names() -> list[str]:
    """All names and aliases."""
    return sorted(name for format in FORMATS for name in (format.name, *format.aliases))


def find(name: str) -> ReasoningFormat:
    """The format of this name or alias. Raises ConfigError for one that is not known."""
    for format in FORMATS:
        if name in (format.name, *format.aliases):
            return format
    raise ConfigError(
        f"no format of reasoning is called {shown(name)}{nearest(name, names())}; "
        f"there are {', '.join(names())}"
    )


def detect(template: str) -> ReasoningFormat | None:
    """The format in which a model with this chat template reasons; None if it does not."""
    return next((format for format in FORMATS if format.matches(template)), None)
