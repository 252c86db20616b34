"""What answers in `octavo chat`: the interface for it, and the engine in this process.

Not here: a running server (chat_server.py), the conversation itself (chat_session.py).
"""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from octavo.errors import RequestError
from octavo.params import SamplingParams
from octavo.text.answer import Content, Reasoning

if TYPE_CHECKING:
    from octavo.cli.preparation import Preparation
    from octavo.llm import LLM

Message = Mapping[str, str]

# Where the checkpoint says nothing, sampling from the whole distribution makes small models
# ramble. These are llama.cpp's defaults; Ollama's differ little (top_p 0.9, no min_p).
SAMPLING: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as the backend reads it. num_tokens: None where it cannot be counted."""

    num_tokens: int | None
    content: Any


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step adds to an answer; the last piece has a finish reason. reasoning: what the
    model thinks before it answers."""

    text: str
    num_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    reasoning: str = ""


class Backend(Protocol):
    """A model that answers conversations.

    window: its tokens, None where that is not known. knows_defaults: whether `default_params` are
    what is sampled with; else settings left out are the server's, and not known.
    """

    knows_defaults: bool

    @property
    def name(self) -> str: ...

    @property
    def window(self) -> int | None: ...

    def default_params(self, given: Mapping[str, Any]) -> tuple[SamplingParams, str]:
        """The settings to start with, `given` over all others, and whose the others are."""
        ...

    def prepare(self, messages: Sequence[Message]) -> Prompt:
        """Render and count a conversation. Raises RequestError if the template refuses it."""
        ...

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Raise RequestError where the model could not serve this."""
        ...

    def load(self) -> None:
        """What takes long, and must precede `stream`."""
        ...

    def stream(
        self, prompt: Prompt, params: SamplingParams, given: frozenset[str]
    ) -> Generator[Piece, None, None]:
        """The answer in pieces. Closing the generator aborts the request.

        given: the settings that the user gave.
        """
        ...


class EngineBackend:
    """The engine in this process."""

    knows_defaults = True

    def __init__(self, prepared: "Preparation") -> None:
        self._prepared = prepared
        self.name = prepared.config.model
        self._llm: LLM | None = None

    @property
    def window(self) -> int:
        known = self._llm.engine.limits if self._llm else self._prepared.capabilities.limits
        return known.max_model_len

    def default_params(self, given: Mapping[str, Any]) -> tuple[SamplingParams, str]:
        own: Mapping[str, Any] = self._prepared.capabilities.limits.generation_defaults
        if self._prepared.config.generation_config != "auto":
            own = {}
        rest: Mapping[str, Any] = {} if own.keys() & SAMPLING.keys() else SAMPLING
        source = "Octavo's defaults" if rest else "the checkpoint's defaults"
        return SamplingParams(**{**rest, **own, "max_tokens": None, **given}), source

    def prepare(self, messages: Sequence[Message]) -> Prompt:
        content = self._prepared.encode(messages)
        return Prompt(len(content["prompt_token_ids"]), content)

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        self._prepared.check(prompt.content, params)

    def load(self) -> None:
        self._llm = self._prepared.load()

    def stream(
        self, prompt: Prompt, params: SamplingParams, given: frozenset[str]
    ) -> Generator[Piece, None, None]:
        assert self._llm is not None, "load() comes first"
        read = self._prepared.reasoning_apart(prompt.content, params)
        with contextlib.closing(self._llm.stream(prompt.content, params)) as outputs:
            for output in outputs:
                if output.error:
                    raise RequestError(output.error)
                choice = output.outputs[0]
                events = read(choice)
                yield Piece(
                    "".join(event.text for event in events if isinstance(event, Content)),
                    len(choice.token_ids),
                    len(output.prompt_token_ids),
                    output.num_cached_tokens,
                    choice.finish_reason,
                    "".join(event.text for event in events if isinstance(event, Reasoning)),
                )
