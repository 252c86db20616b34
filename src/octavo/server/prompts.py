"""From a request's text to token ids: tokenizing and chat templates, on threads.

Long texts are worked on there, so that the event loop stays free for other requests; a text that
cannot fit into the model's window is refused before that. What the engine makes of the ids is
`server.generation`'s part.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from octavo.config import EngineConfig
from octavo.errors import ContextLengthError, RequestError, counted
from octavo.models.files import resolve_tokenizer
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.chat import ChatPrompt, encode_chat, read_chat_template
from octavo.text.grammar import grammar_of
from octavo.text.placement import Placement, placement
from octavo.text.tokenizer import Tokenizer, bad_words_ids, load_tokenizer

GRAMMAR_SECONDS = 5.0  # for what a request says of its answer's form
T = TypeVar("T")


class PromptEncoder:
    """The served model's tokenizer and chat template. Use it after `load` and `fit`."""

    tokenizer: Tokenizer

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(2, "octavo-text")
        self._template = read_chat_template(config.chat_template) if config.chat_template else None
        self._window = 0
        self._longest = 1  # characters of the vocabulary's longest token

    def load(self) -> Tokenizer:
        config = self._config
        source = resolve_tokenizer(config.model, config.revision, config.tokenizer)
        self.tokenizer = load_tokenizer(source)
        ids = range(self.tokenizer.vocab_size)
        self._longest = max((len(self.tokenizer.token_text(i)) for i in ids), default=1)
        return self.tokenizer

    def fit(self, max_model_len: int) -> None:
        """Refuse texts that must be longer than this many tokens."""
        self._window = max_model_len

    @cached_property
    def placement(self) -> Placement:
        """What the chat template does with messages in unusual places."""
        return placement(self.tokenizer, self._template)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(*args, **options))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._check_length(len(text), "prompt")
        return await self.in_thread(self.tokenizer.encode, text, add_special_tokens)

    async def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """The prompt of a chat; options: those of `encode_chat`. Raises RequestError for messages
        that cannot be rendered."""
        self._check_length(sum(_characters(m.get("content")) for m in messages), "messages")
        options["chat_template"] = self._template
        return await self.in_thread(encode_chat, self.tokenizer, messages, **options)

    async def bad_words(self, texts: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
        """Each banned text as token sequences."""
        return await self.in_thread(bad_words_ids, self.tokenizer, texts) if texts else ()

    async def grammar(self, form: StructuredOutputsParams | None) -> str | None:
        """What a text of this form must match. Raises RequestError if that cannot be enforced."""
        if form is None:
            return None
        try:
            return await asyncio.wait_for(self.in_thread(grammar_of, form), GRAMMAR_SECONDS)
        except asyncio.TimeoutError:
            raise RequestError(
                f"{form.param} is too complex: it was not checked within {GRAMMAR_SECONDS:g} s",
                form.param,
            ) from None

    def _check_length(self, characters: int, param: str) -> None:
        at_least = characters // self._longest
        if at_least >= self._window:
            raise ContextLengthError(
                f"the prompt has at least {counted(at_least, 'token')}; the model's limit is "
                f"{counted(self._window, 'token')}",
                param,
                at_least,
                self._window,
            )


def _characters(content: object) -> int:
    """The length of a message's text, given plain or in parts; 0 for anything else."""
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        return 0
    return sum(_characters(part.get("text")) for part in content if isinstance(part, dict))
