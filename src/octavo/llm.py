"""`LLM`: the offline interface, over an engine in this process."""

import itertools
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from octavo import progress
from octavo.config import OFFLINE_SCHEDULER, EngineConfig, in_our_names
from octavo.core.policy import Policy
from octavo.core.policy_registry import create_policy
from octavo.engine.arg_utils import options_of
from octavo.engine.engine import Engine
from octavo.engine.executor import Executor, create_executor
from octavo.engine.interrupts import interrupts_deferred
from octavo.engine.output import OutputProcessor
from octavo.engine.preflight import check_in_process, check_names, check_options
from octavo.engine.requests import (
    Chat,
    Messages,
    Prompt,
    Prompted,
    RequestMaker,
    add_messages,
    check_arguments,
    conversation_list,
    is_conversation,
    prompt_list,
    spread,
)
from octavo.engine.sharing import SharedSteps
from octavo.engine.trace import create_engine
from octavo.errors import ConfigError, EngineError, RequestError
from octavo.log import can_redraw, get_logger
from octavo.models.files import resolve_tokenizer
from octavo.outputs import RequestOutput
from octavo.params import RequestOutputKind, SamplingParams
from octavo.processes import Owner
from octavo.text.interface import ModelTokenizer
from octavo.text.matcher import Grammars
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.vllm_names import Kind, missing

logger = get_logger(__name__)

LLMT = TypeVar("LLMT", bound="LLM")
_BAR_SECONDS = 0.5  # between two changes of the bar while no prompt ends


class LLM:
    """A model, ready to generate.

    Keywords are the fields of `config.EngineConfig`, in vLLM's names; `scheduler` also takes a
    policy object of `octavo.schedulers`. Inter-token latency matters less offline, so by default
    a step is filled with waiting prompts: 7% more throughput than a server's `fifo`. Raises
    ConfigError for an unknown or invalid keyword, a missing or broken model, or too little memory.

    Threads may share an LLM: their requests run in the same steps. Processes may not: after a
    fork, the child gets an EngineError. Memory is returned by `close`, at the end of a `with`, or
    when the LLM is deleted.

    >>> llm = LLM("smollm2")
    >>> llm.generate("Once upon a time", SamplingParams(max_tokens=8))[0].outputs[0].text
    """

    def __init__(
        self, model: str = "smollm2", *, scheduler: str | Policy = OFFLINE_SCHEDULER, **options: Any
    ) -> None:
        options = in_our_names(EngineConfig, options)
        if (named := options.pop("scheduler", None)) is not None:
            if scheduler != OFFLINE_SCHEDULER:
                raise ConfigError("scheduling_policy is vLLM's name of scheduler; give one of them")
            scheduler = str(named)
        name = scheduler if isinstance(scheduler, str) else "custom"
        config = EngineConfig(model=model, scheduler=name, **options)
        policy = create_policy(scheduler)
        check_in_process(config)
        check_options(config)
        with progress.shown(config.load_progress):
            with progress.phase(f"opening {config.model}"), interrupts_deferred():
                check_names(config)
                # Before the weights, so that what is wrong with it shows at once.
                source = resolve_tokenizer(config.model, config.revision, config.tokenizer)
                tokenizer = load_tokenizer(source)
            self._setup(config, policy, create_executor(config), tokenizer)

    @classmethod
    def from_engine_args(cls: type[LLMT], engine_args: object) -> LLMT:
        """The LLM that `engine_args` describes: EngineArgs, an EngineConfig, or a mapping."""
        return cls(**options_of(engine_args))

    if not TYPE_CHECKING:  # a checker knows what there is

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(missing(Kind.METHOD, self, name), name=name, obj=self)

    @classmethod
    def over(
        cls: type[LLMT],
        executor: Executor,
        tokenizer: Tokenizer,
        config: EngineConfig,
        policy: Policy | None = None,
    ) -> LLMT:
        """An LLM over a given executor, such as `engine.fake.FakeRunner`."""
        check_in_process(config)
        llm = cls.__new__(cls)
        if policy is None:
            policy = create_policy(config.scheduler)
        llm._setup(config, policy, executor, tokenizer)
        return llm

    def _setup(
        self, config: EngineConfig, policy: Policy, executor: Executor, tokenizer: Tokenizer
    ) -> None:
        self.config = config
        limits = executor.limits
        grammars = Grammars(lambda: tokenizer, limits.vocab_size, limits.eos_token_ids)
        self.engine = engine = create_engine(config, executor, policy, grammars=grammars)
        self._tokenizer = tokenizer
        self._outputs = OutputProcessor(tokenizer, time.time() - time.monotonic())
        self._requests = RequestMaker(config, tokenizer, engine.capabilities, engine.clock)
        self._ids = itertools.count()
        self._owner = Owner("this LLM")
        self._closed = False
        this = weakref.ref(self)  # not a cycle: `del llm` returns the memory at once
        self._steps = SharedSteps(lambda: _referent(this)._step())
        self._waiting: deque[tuple[Prompted, Box]] = deque()  # for space in the engine's queue
        self._boxes: dict[str, Box] = {}  # of requests in flight

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        deadline: float | Sequence[float | None] | None = None,
        **vllm_arguments: object,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs come in the order of the prompts.

        A prompt is a text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids":
        ids}`, or a list of those. `sampling_params` is one value for all or one for each;
        None takes the model's own defaults. `priority` (lower is earlier) and `deadline` (seconds
        from now) are for schedulers that support them. Every prompt is checked before any is
        computed. Raises RequestError (RequestTypeError for a wrong type) naming the problem.
        `vllm_arguments`: vLLM's others, with neutral values such as `lora_request=None`.
        """
        check_arguments("generate", vllm_arguments)
        requests = self._admit(
            prompt_list(prompts), sampling_params, RequestOutputKind.FINAL_ONLY, priority, deadline
        )
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        deadline: float | Sequence[float | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **vllm_arguments: object,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list, through the model's chat template.

        Without `sampling_params` the answer may fill the model's window. Each choice has a
        `message` beside its `text`: what was said, reasoning, and calls of `tools`, which are
        described as for OpenAI. `tool_choice` is "auto" (the default), "none", "required" or an
        object that names a function; `reasoning_effort` is handed to the template. `chat_template`
        is jinja source or a template's name; `add_generation_prompt` opens the assistant's turn,
        which is the default unless the final message is continued. Raises RequestError.
        """
        check_arguments("chat", vllm_arguments)
        prompts = [
            self._requests.chat(
                conversation,
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=parallel_tool_calls,
                reasoning_effort=reasoning_effort,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversation_list(messages)
        ]
        if sampling_params is None:
            sampling_params = self._requests.chat_params()
        requests = self._admit(
            prompts, sampling_params, RequestOutputKind.FINAL_ONLY, priority, deadline
        )
        outputs = self._run(requests, use_tqdm)
        for request, output in zip(requests, outputs, strict=True):
            add_messages(request.reader, output)
        return outputs

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Generate for one prompt or one conversation; yields the new output of each step.

        `priority` and `deadline`: as for `generate`. Closing the iterator aborts the request.
        """
        if is_conversation(prompt):
            prompts: list[Prompt] = [self._requests.render(prompt)]
            if sampling_params is None:
                sampling_params = self._requests.chat_params()
        else:
            prompts = prompt_list(prompt)
        if len(prompts) != 1:
            raise RequestError(f"stream takes one prompt, not {len(prompts)}", "prompt")
        (request,) = self._admit(
            prompts, sampling_params, RequestOutputKind.DELTA, priority, deadline
        )
        return self._stream(request)

    def reset_prefix_cache(self, **vllm_arguments: object) -> bool:
        """Drop the cached prefixes. False if running requests still hold some."""
        check_arguments("reset_prefix_cache", vllm_arguments)
        self._check_usable()
        with self._steps.exclusive():
            return self.engine.reset_prefix_cache()

    @property
    def llm_engine(self) -> Engine:
        """vLLM's name of `engine`."""
        return self.engine

    def get_tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, with transformers' names for what scripts use."""
        return ModelTokenizer(self._tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling defaults, or the built-in ones if those are switched off."""
        return self._requests.default_params()

    def close(self) -> None:
        """Return the memory to the system; calls in other threads fail with an EngineError.

        The LLM cannot be used afterwards. May be called again; in a fork, does nothing.
        """
        if self._owner.is_here():
            with self._steps.exclusive():
                self._closed = True
                self.engine.close()

    def __enter__(self) -> "LLM":
        self._check_usable()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if not self._owner.is_here():
            raise EngineError(self._owner.complaint())
        if self._closed:
            raise EngineError("this LLM was closed; make a new one")

    def _admit(
        self,
        prompts: Sequence[Prompt | Chat],
        params: SamplingParams | Sequence[SamplingParams] | None,
        kind: RequestOutputKind,
        priority: int | Sequence[int] = 0,
        deadline: float | Sequence[float | None] | None = None,
    ) -> list[Prompted]:
        """One checked request for each prompt; none is added to the engine yet."""
        self._check_usable()
        count = len(prompts)
        if params is None:
            params = self._requests.default_params()
        each = zip(
            prompts,
            spread("sampling_params", params, count),
            spread("priority", priority, count),
            spread("deadline", deadline, count),
            strict=True,
        )
        return [
            self._requests.make(str(next(self._ids)), prompt, chosen, kind, rank, seconds)
            for prompt, chosen, rank, seconds in each
        ]

    def _run(self, requests: list[Prompted], use_tqdm: bool) -> list[RequestOutput]:
        """Run requests to completion. On any error, including Ctrl-C, all are aborted."""
        ids = [request.submission.request_id for request in requests]
        box, done = Box(), dict[str, RequestOutput]()
        bar = tqdm(total=len(requests), disable=not use_tqdm, unit="prompt", dynamic_ncols=True)
        try:
            with bar:
                with self._steps.exclusive():
                    self._waiting.extend((request, box) for request in requests)
                # In a file the bar changes only where a prompt ends: each change adds to the file.
                moves = not bar.disable and can_redraw(sys.stderr)
                while len(done) < len(requests):
                    due = time.monotonic() + (_BAR_SECONDS if moves else math.inf)
                    self._steps.advance(lambda: box.is_ready() or time.monotonic() >= due)  # noqa: B023
                    finished = {output.request_id: output for output in box.take()}
                    done.update(finished)
                    self._show(bar, len(finished))
        except BaseException:
            self._abort(dict.fromkeys(i for i in ids if i not in done))
            raise
        return [done[request_id] for request_id in ids]

    def _show(self, bar: "tqdm[Any]", finished: int) -> None:
        """Count prompts that are `finished`; the clock and the throughput move without any."""
        if not bar.disable:
            engine = self.engine
            with self._steps.exclusive():
                stats = engine.recorder.snapshot(engine.scheduler, engine.clock(), detailed=False)
            bar.set_postfix_str(f"{stats.throughput:.0f} tok/s", False)
            if finished:
                bar.update(finished)  # draws at most ten times a second
            else:
                bar.refresh()

    def _step(self) -> None:
        """One step of the engine; each output goes into the box of its request."""
        self._feed()
        outputs, stops = self._outputs.process(self.engine.step(), time.monotonic())
        for request_id, index in stops:
            self.engine.finish_choice(request_id, index)
        for output in outputs:
            known = self._boxes.pop if output.finished else self._boxes.__getitem__
            known(output.request_id).outputs.append(output)
        if outputs:
            self._steps.notify()

    def _feed(self) -> None:
        """Add as many requests as the engine's queue accepts: a long list never overfills it."""
        while self._waiting and self.engine.queue_space > 0:
            request, box = self._waiting.popleft()
            try:
                self._add(request, box)
            except BaseException as error:
                box.error = error  # raised by the call that it belongs to
                self._steps.notify()
                if not isinstance(error, Exception):
                    raise

    def _add(self, request: Prompted, box: "Box") -> None:
        submission = request.submission
        self.engine.add_request(submission)
        self._outputs.add(submission, request.text, time.monotonic(), request.markers)
        self._boxes[submission.request_id] = box

    def _abort(self, ids: Collection[str]) -> None:
        """End requests, queued or running, before the next step."""

        def abort() -> None:
            self._unqueue(ids)
            for request_id in ids:
                if self._boxes.pop(request_id, None):
                    self.engine.abort(request_id)
                    self._outputs.abort(request_id)

        self._steps.later(abort)

    def _unqueue(self, ids: Collection[str]) -> None:
        kept = (entry for entry in self._waiting if entry[0].submission.request_id not in ids)
        self._waiting = deque(kept)

    def _stream(self, request: Prompted) -> Generator[RequestOutput, None, None]:
        box, finished = Box(), False
        try:
            with self._steps.exclusive():
                self._waiting.append((request, box))
            while not finished:
                self._check_usable()
                self._steps.advance(box.is_ready)
                for output in box.take():
                    finished = output.finished
                    yield output
        finally:
            if not finished:
                self._abort([request.submission.request_id])


class Box:
    """The outputs of one call that it has not read, or the error that one of its requests met."""

    __slots__ = ("error", "outputs")

    def __init__(self) -> None:
        self.outputs: deque[RequestOutput] = deque()
        self.error: BaseException | None = None

    def is_ready(self) -> bool:
        return bool(self.outputs) or self.error is not None

    def take(self) -> Generator[RequestOutput, None, None]:
        """Each output once. Raises the error."""
        if self.error is not None:
            raise self.error
        while self.outputs:
            yield self.outputs.popleft()


def _referent(reference: "weakref.ref[LLM]") -> LLM:
    """The LLM that a weak reference is to: a thread that steps holds it."""
    llm = reference()
    assert llm is not None
    return llm
