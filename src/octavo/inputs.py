"""The types of prompts, in vLLM's names."""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict

# Not a package. With a `__path__`, an import of a name that is missing here asks the finders, of
# which `octavo._Refusals` knows the reason for vLLM's names.
__path__ = ()


class _Options(TypedDict, total=False):
    cache_salt: str


class _Text(TypedDict):
    prompt: str


class _Tokens(TypedDict):
    prompt_token_ids: Sequence[int]


class TextPrompt(_Text, _Options):
    """A prompt as text. Only prompts with equal `cache_salt` share cached prefixes."""


class TokensPrompt(_Tokens, _Options, total=False):
    """A prompt as token ids; `prompt` is the text to show for it."""

    prompt: str


PromptType: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | dict[str, Any]
