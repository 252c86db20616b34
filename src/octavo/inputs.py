"""The types of prompts, in vLLM's names."""

from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict

# Not a package: so that a name of vLLM's that is missing here is asked for by `octavo._Refusals`.
__path__ = ()


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class _TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


class TokensPrompt(_TokensPrompt, total=False):
    """A prompt as token ids; `prompt` is the text to show for it."""

    prompt: str


PromptType: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt | dict[str, Any]
