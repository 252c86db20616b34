"""The formats of tool calls, by name and by chat template."""

from octavo.errors import ConfigError, nearest, shown
from octavo.text.tools.base import ToolFormat
from octavo.text.tools.deepseek import DeepSeekV3, DeepSeekV31
from octavo.text.tools.functiongemma import FunctionGemma
from octavo.text.tools.gemma4 import Gemma4
from octavo.text.tools.glm4 import Glm45, Glm47
from octavo.text.tools.granite import Granite
from octavo.text.tools.harmony import Harmony
from octavo.text.tools.hermes import Hermes
from octavo.text.tools.kimi_k2 import KimiK2
from octavo.text.tools.lfm2 import Lfm2
from octavo.text.tools.llama3 import Llama3Json
from octavo.text.tools.llama4_pythonic import Llama4Pythonic
from octavo.text.tools.minimax_m2 import MinimaxM2
from octavo.text.tools.mistral import Mistral, MistralList, MistralSpacedList, MistralWithIds
from octavo.text.tools.olmo3 import Olmo3
from octavo.text.tools.phi4_mini import Phi4MiniJson
from octavo.text.tools.pythonic import Pythonic
from octavo.text.tools.qwen3_coder import Qwen3Coder

# The first whose template matches is taken. Formats of one name are layouts of one family.
FORMATS: tuple[ToolFormat, ...] = (
    Lfm2(),
    Olmo3(),
    FunctionGemma(),
    Gemma4(),
    Qwen3Coder(),
    Glm47(),
    Glm45(),
    MinimaxM2(),
    Hermes(),
    Llama3Json(),
    Mistral(),
    MistralWithIds(),
    MistralList(),
    MistralSpacedList(),
    Granite(),
    Phi4MiniJson(),
    DeepSeekV3(),
    DeepSeekV31(),
    KimiK2(),
    Llama4Pythonic(),
    Pythonic(),
    Harmony(),
)


def names() -> list[str]:
    """All names and aliases."""
    return sorted({name for format in FORMATS for name in (format.name, *format.aliases)})


def find(name: str, template: str = "") -> ToolFormat:
    """The format of this name or alias; of several layouts, the one that the template has, or the
    newest. Raises ConfigError for a name that is not known."""
    found = [format for format in FORMATS if name in (format.name, *format.aliases)]
    if not found:
        raise ConfigError(
            f"no format of tool calls is called {shown(name)}{nearest(name, names())}; "
            f"there are {', '.join(names())}"
        )
    return next((format for format in found if format.matches(template)), found[0])


def detect(template: str) -> ToolFormat | None:
    """The format in which a model with this chat template writes calls."""
    return next((format for format in FORMATS if format.matches(template)), None)
