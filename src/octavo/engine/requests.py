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
from octavo.outputs import RequestOutput
from octavo.params import RequestOutputKind, SamplingParams
from octavo.text.answer_form import AnswerForm
from octavo.text.answer_reader import AnswerReader
from octavo.text.chat import ChatPrompt, encode_chat, read_chat_template
from octavo.text.grammar import grammar_of
from octavo.text.markers import Markers
from octavo.text.model_formats import Limits, ModelFormats, template_variables
from octavo.text.tokenizer import Tokenizer, bad_words_ids
from octavo.text.tool_request import ToolChoice, described, read_choice, read_tools
from octavo.text.tools.base import Tool
from octavo.vllm_names import Kind, Status, find

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


class Prompted(NamedTuple):
    """A request, and its prompt's text where it came as text. reader: of a conversation's answers;
    None for other prompts, and where there is no text."""

    submission: Submission
    text: str | None
    reader: AnswerReader | None = None

    @property
    def markers(self) -> Markers | None:
        return None if self.reader is None else self.reader.markers


class Chat(NamedTuple):
    """A conversation, rendered, and what its answers may be. formats: how the model writes."""

    prompt: ChatPrompt
    formats: ModelFormats
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True


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
        self._formats = self._formats_of(self._chat_template)

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

    def chat(
        self,
        conversation: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Chat:
        """A conversation to answer; options: the others of `encode_chat`. Raises RequestError."""
        formats = self._formats if chat_template is None else self._formats_of(chat_template)
        # A template of no known format may have tools of a form of its own, and shows them.
        described_freely = bool(tools) and tool_choice is None and formats.tools is None
        read = () if tools is None or described_freely else read_tools(tools)
        choice = read_choice(tool_choice, read)
        formats.check(choice)
        prompt = encode_chat(
            self._tokenizer,
            conversation,
            tools=tools if described_freely else described(read) or None,
            tool_format=None if described_freely else formats.calls,
            chat_template=chat_template or self._chat_template,
            chat_template_kwargs=template_variables(chat_template_kwargs, reasoning_effort),
            **options,
        )
        return Chat(prompt, formats, read, choice, parallel_tool_calls)

    def reader(self, prompt: str, params: SamplingParams) -> AnswerReader | None:
        """Of the answers to a conversation without tools, whose rendered prompt this is; None if
        they are nothing but text."""
        form = self._formats.form(
            self._tokenizer, prompt, (), ToolChoice(), True, params.structured_outputs
        )
        if form is None:
            return None
        return AnswerReader(form, self._tokenizer, params.skip_special_tokens)

    def _formats_of(self, chat_template: str | None) -> ModelFormats:
        config = self._config
        template = self._tokenizer.chat_templates.get(chat_template or "", chat_template)
        return ModelFormats.of(
            self._tokenizer, template, config.tool_call_parser, config.reasoning_parser
        )

    def make(
        self,
        request_id: str,
        prompt: Prompt | Chat,
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
        form: AnswerForm | None = None
        text: str | None
        if isinstance(prompt, Chat):
            form = self._form(prompt, params)
            limits = Limits.of(form, self._tokenizer)
            text, ids = prompt.prompt.text, prompt.prompt.token_ids
        else:
            structured = params.structured_outputs
            limits = Limits(None if structured is None else grammar_of(structured))
            text, ids = self._tokens(prompt)
        words = bad_words_ids(self._tokenizer, params.bad_words) if params.bad_words else ()
        submission = Submission(
            request_id,
            tuple(ids),
            params.with_(output_kind=kind),
            words,
            priority=priority,
            deadline=deadline_at(deadline, self._clock()),
            cache_salt=None if isinstance(prompt, Chat) else _salt(prompt),
            grammar=limits.grammar,
            sections=limits.sections,
            thinking=limits.thinking,
        )
        reader = None
        if form is not None and params.detokenize:
            reader = AnswerReader(form, self._tokenizer, params.skip_special_tokens)
        return Prompted(admit(submission, self._capabilities), text, reader)

    def _form(self, chat: Chat, params: SamplingParams) -> AnswerForm:
        found = chat.formats.form(
            self._tokenizer,
            chat.prompt.text,
            chat.tools,
            chat.choice,
            chat.parallel_tool_calls,
            params.structured_outputs,
        )
        return found or AnswerForm(structured=params.structured_outputs)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            _check_keys(prompt)
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _token_list(prompt["prompt_token_ids"])
            return self._tokens(_text(prompt["prompt"]))
        return None, _token_list(prompt)


def add_messages(reader: AnswerReader | None, output: RequestOutput) -> None:
    """Give the choices of a conversation's output that have ended their messages."""
    if reader is not None:
        for choice in output.outputs:
            reader.add_message(choice)


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
