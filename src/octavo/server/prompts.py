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
from octavo.log import get_logger
from octavo.models.files import resolve_tokenizer
from octavo.structured_outputs import FIELD, StructuredOutputsParams
from octavo.text.answer_form import AnswerForm
from octavo.text.chat import ChatPrompt, encode_chat, read_chat_template
from octavo.text.grammar import grammar_of
from octavo.text.model_formats import Limits, ModelFormats
from octavo.text.placement import Placement, placement
from octavo.text.tokenizer import Tokenizer, bad_words_ids, load_tokenizer

logger = get_logger(__name__)

GRAMMAR_SECONDS = 5.0  # for what a request says of its answer's form
T = TypeVar("T")


class PromptEncoder:
    """The served model's tokenizer, chat template, and formats of tool calls and reasoning. Use it
    after `load` and `fit`."""

    tokenizer: Tokenizer
    formats: ModelFormats

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
        self.formats = ModelFormats.of(
            self.tokenizer, self._template, config.tool_call_parser, config.reasoning_parser
        )
        logger.info("chats: %s", self.formats.describe())
        ids = range(self.tokenizer.vocab_size)
        self._longest = max((len(self.tokenizer.token_text(i)) for i in ids), default=1)
        return self.tokenizer

    def fit(self, max_model_len: int) -> None:
        """Refuse texts that must be longer than this many tokens."""
        self._window = max_model_len

    @cached_property
    def placement(self) -> Placement:
        """What the chat template does with messages in unusual places."""
        return placement(self.tokenizer, self._template, self.formats.calls)

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
        return await self.in_thread(self._render, messages, options)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ChatPrompt:
        self._check_length(sum(_characters(m.get("content")) for m in messages), "messages")
        self._check_length(_all_characters(options.get("tools")), "tools")
        return encode_chat(self.tokenizer, messages, chat_template=self._template, **options)

    async def bad_words(self, texts: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
        """Each banned text as token sequences."""
        return await self.in_thread(bad_words_ids, self.tokenizer, texts) if texts else ()

    async def grammar(self, form: StructuredOutputsParams | None) -> str | None:
        """What a text of this form must match. Raises RequestError if that cannot be enforced."""
        if form is None:
            return None
        return await self.in_time(form.param, grammar_of, form)

    async def limits(self, form: AnswerForm) -> Limits:
        """What holds an answer to this form. Raises RequestError as `grammar` does."""
        param = "tools" if form.tools else FIELD
        return await self.in_time(param, Limits.of, form, self.tokenizer)

    async def in_time(self, param: str, work: Callable[..., T], *args: Any) -> T:
        """`work` on what a request says in `param`. Raises RequestError where it takes too long."""
        try:
            return await asyncio.wait_for(self.in_thread(work, *args), GRAMMAR_SECONDS)
        except asyncio.TimeoutError:
            raise RequestError(
                f"{param} is too complex: it was not checked within {GRAMMAR_SECONDS:g} s", param
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


def _all_characters(value: object) -> int:
    """The length of all texts in a JSON value, names too."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_all_characters(part) for pair in value.items() for part in pair)
    return sum(map(_all_characters, value)) if isinstance(value, list) else 0
