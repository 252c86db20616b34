"""From what a caller passes to what the engine takes: one checked `Submission` for each prompt.

Shared by `LLM` and `AsyncLLM`, in their caller's process. Nothing is queued here. HTTP requests are
read by `octavo.server`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

from octavo.config import EngineConfig
from octavo.core.submission import Submission
from octavo.engine.admission import admit, deadline_at
from octavo.engine.capabilities import EngineCapabilities
from octavo.errors import RequestError, RequestTypeError, counted, shown
from octavo.params import RequestOutputKind, SamplingParams
from octavo.text.chat import encode_chat, read_chat_template
from octavo.text.grammar import grammar_of
from octavo.text.tokenizer import Tokenizer, bad_words_ids
from octavo.vllm_names import Kind, Status, find

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


class Prompted(NamedTuple):
    """A request, and its prompt's text where it came as text."""

    submission: Submission
    text: str | None


def check_arguments(method: str, given: Mapping[str, object]) -> None:
    """Check arguments that only vLLM's `method` has: only neutral values are accepted.

    Raises RequestTypeError for an unknown name, RequestError for any other value.
    """
    for name, value in given.items():
        entry = find(Kind.ARGUMENT, name)
        if entry is None or entry.status is Status.SUPPORTED:
            raise RequestTypeError(f"{method} has no argument {name!r}", name)
        if not entry.is_neutral(value):
            raise RequestError(f"{name} is not supported: {entry.refusal()}", name)


class RequestMaker:
    """Makes the requests of one loaded engine. `clock` is the engine's."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        capabilities: EngineCapabilities,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._capabilities = capabilities
        self._clock = clock
        given = config.chat_template
        self._chat_template = read_chat_template(given) if given else None

    def default_params(self) -> SamplingParams:
        """The model's own sampling defaults, or the built-in ones if those are switched off."""
        if self._config.generation_config == "octavo":
            return SamplingParams()
        return SamplingParams(**self._capabilities.limits.generation_defaults)

    def chat_params(self) -> SamplingParams:
        """The same, for an answer that may fill the window."""
        return self.default_params().with_(max_tokens=None)

    def render(self, conversation: Messages, **options: Any) -> Mapping[str, Any]:
        """The prompt of a conversation; options: those of `text.chat.encode_chat`."""
        options["chat_template"] = options.get("chat_template") or self._chat_template
        prompt = encode_chat(self._tokenizer, conversation, **options)
        return {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids}

    def make(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        kind: RequestOutputKind,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Prompted:
        """A request that the engine can serve. Raises RequestError naming the problem.

        deadline: seconds from now.
        """
        if not isinstance(params, SamplingParams):
            raise RequestTypeError(
                f"sampling_params must be SamplingParams, not {type(params).__name__}",
                "sampling_params",
            )
        text, ids = self._tokens(prompt)
        form = params.structured_outputs
        words = bad_words_ids(self._tokenizer, params.bad_words) if params.bad_words else ()
        submission = Submission(
            request_id,
            tuple(ids),
            params.with_(output_kind=kind),
            words,
            priority=priority,
            deadline=deadline_at(deadline, self._clock()),
            cache_salt=_salt(prompt),
            grammar=None if form is None else grammar_of(form),
        )
        return Prompted(admit(submission, self._capabilities), text)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            _check_keys(prompt)
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _token_list(prompt["prompt_token_ids"])
            return self._tokens(_text(prompt["prompt"]))
        return None, _token_list(prompt)


def is_conversation(value: object) -> TypeGuard[Messages]:
    """Whether `value` is one list of messages, and not of prompts or of conversations."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and isinstance(value[0], Mapping)
        and not value[0].keys() & {"prompt", "prompt_token_ids"}
    )


def conversation_list(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """One conversation, or several, as a list. An empty one is one, which no template accepts."""
    if is_conversation(messages) or not messages:
        return [cast(Messages, messages)]
    return list(cast(Sequence[Messages], messages))


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestTypeError(
            f"prompts must be a text, token ids, a dict, or a list of those, not "
            f"{type(prompts).__name__}",
            "prompt",
        )
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # token ids of one prompt
    return list(prompts)  # type: ignore[arg-type]


def spread(name: str, value: Any, count: int) -> list[Any]:
    """One value for each of `count` prompts."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{name} has {counted(len(value), 'value')} for {counted(count, 'prompt')}", name
        )
    return list(value)


def _check_keys(prompt: Mapping[str, Any]) -> None:
    for key, value in prompt.items():
        entry = find(Kind.PROMPT, key)
        if entry is not None and entry.status is Status.REFUSED:
            if not entry.is_neutral(value):
                raise RequestError(f"{key} in a prompt: {entry.refusal()}", key)
        elif entry is None:
            raise RequestError(
                f"a prompt dict has 'prompt' or 'prompt_token_ids', not {sorted(prompt)}", "prompt"
            )
    if not prompt.keys() & {"prompt", "prompt_token_ids"}:
        raise RequestError(
            f"a prompt dict has 'prompt' or 'prompt_token_ids', not {sorted(prompt)}", "prompt"
        )


def _salt(prompt: Prompt) -> str | None:
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestTypeError(f"cache_salt must be a string, not {shown(salt)}", "cache_salt")
    return salt


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise RequestTypeError(f"a prompt's text must be a string, not {value!r}", "prompt")
    return value


def _token_list(value: object) -> list[int]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestTypeError(
            f"a prompt must be a text or token ids, not {type(value).__name__}", "prompt"
        )
    return list(value)
