"""One conversation's answer, for each API that has conversations: rendered, submitted, parsed.

An API's own file turns its body into a `Conversation` and `SamplingParams`, and the events of the
`Dialogue` that `start` returns into its answer: a whole answer and a streamed one from the same
events. What HTTP requests have in common beside that is `server.generation`'s part.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.params import SamplingParams
from octavo.server.generation import Generation, make_submission, submit
from octavo.server.replies import Usage
from octavo.server.service import Service
from octavo.text.answer import Content, Event, Reasoning
from octavo.text.answer_reader import AnswerReader
from octavo.text.chat import ChatPrompt
from octavo.text.model_formats import template_variables
from octavo.text.tool_request import ToolChoice, described
from octavo.text.tools.base import Tool

# What is new of one choice: its index, the events, and the output that they were made from.
Part = tuple[int, list[Event], CompletionOutput]


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be answered. `messages` are in the form of OpenAI's chat completions.

    The form of the answer's text, and all else that `SamplingParams` can say, is theirs.
    include_reasoning: whether the events have it; it is generated either way.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    model: str | None = None
    request_id: str | None = None
    priority: int | None = None
    deadline: float | None = None
    cache_salt: str | None = None


async def start(
    service: Service,
    request: Request,
    conversation: Conversation,
    params: SamplingParams,
    kind: str,
) -> "Dialogue":
    """Render and submit. `kind`: what the answer's id begins with, such as `chatcmpl-`.

    Raises RequestError naming a field of `Conversation` or `SamplingParams`, QueueFullError. The
    caller closes the dialogue.
    """
    formats = service.prompts.formats
    choice = conversation.tool_choice
    formats.check(choice)
    prompt = await render(service, conversation)
    form = formats.form(
        service.prompts.tokenizer,
        prompt.text,
        conversation.tools,
        choice,
        conversation.parallel_tool_calls,
        params.structured_outputs,
    )
    try:
        submission = await make_submission(service, prompt.token_ids, params, conversation, form)
    except RequestError as error:
        if error.param == "prompt":  # which is made of these
            error.param = "messages"
        raise
    prompted = [(submission, prompt.text)]
    if form is None:
        made = await submit(service, request, conversation, kind, prompted)
        return Dialogue(made, prompt)
    tokenizer = service.prompts.tokenizer
    reader = AnswerReader(form, tokenizer, params.skip_special_tokens)
    made = await submit(service, request, conversation, kind, prompted, reader.markers)
    return Dialogue(made, prompt, reader, conversation.include_reasoning)


async def render(service: Service, conversation: Conversation) -> ChatPrompt:
    """The prompt that `start` submits. Raises RequestError."""
    tools = conversation.tools
    if conversation.tool_choice.mode == "none":
        tools = () if service.options.exclude_tools_when_tool_choice_none else tools
    return await service.prompts.render(
        conversation.messages,
        tools=described(tools) or None,
        tool_format=service.prompts.formats.calls,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        chat_template_kwargs=template_variables(
            conversation.chat_template_kwargs, conversation.reasoning_effort
        ),
    )


class Dialogue:
    """An answer that is being generated.

    prompt_logprobs: once the first step has come, if they were asked for.
    """

    def __init__(
        self,
        generation: Generation,
        prompt: ChatPrompt,
        reader: AnswerReader | None = None,
        include_reasoning: bool = True,
    ) -> None:
        self.generation = generation
        self.prompt = prompt
        self._reader = reader
        self._include_reasoning = include_reasoning
        self._may_call = reader is not None and reader.form.choice != "none"
        self.prompt_logprobs: Sequence[PositionLogprobs | None] | None = None

    async def steps(self) -> AsyncGenerator[list[Part], None]:
        """What each step adds, of all choices that gained something. Raises EngineError."""
        async for _, output in self.generation.deltas():
            # They come once, maybe with a delta that has no text.
            self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
            yield self._parts(output)

    async def events(self) -> AsyncGenerator[Part, None]:
        """The same, one choice after the other. A part may have no events: text may be held back,
        and the end comes with a `finish_reason` alone."""
        async for parts in self.steps():
            for part in parts:
                yield part

    def usage(self) -> Usage:
        """What was used so far."""
        usage = self.generation.usage()
        if self._reader is not None and (count := self._reader.reasoning_tokens) is not None:
            usage.completion_tokens_details = {"reasoning_tokens": count}
        return usage

    def close(self, error: Exception | None = None) -> None:
        """Abort what still runs, and log. `error`: what the client was answered, if anything."""
        self.generation.close(error)

    def _parts(self, output: RequestOutput) -> list[Part]:
        return [(choice.index, self._read(choice), choice) for choice in output.outputs]

    def _read(self, choice: CompletionOutput) -> list[Event]:
        if self._reader is None:
            return [Content(choice.text)] if choice.text else []
        events = self._reader.read(choice)
        if choice.finished and self._may_call:
            self.generation.parsed(self._reader.calls(choice.index) > 0)
        if self._include_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]
