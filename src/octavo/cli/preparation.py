"""The engine of a command: its options and its prompts are checked, and only then it is loaded."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from octavo import progress
from octavo.config import OFFLINE_SCHEDULER, EngineConfig
from octavo.core.policy_registry import create_policy
from octavo.core.submission import Submission
from octavo.engine.admission import admit
from octavo.engine.preflight import check_in_process, check_names, check_options, outlook
from octavo.engine.requests import RequestMaker, is_conversation
from octavo.models.files import resolve_tokenizer
from octavo.outputs import CompletionOutput
from octavo.params import SamplingParams
from octavo.text.answer import Content, Event
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from octavo.llm import LLM

Encoded = Mapping[str, Any]


class Preparation:
    """A model of which only the description has been read. Imports torch, which takes a moment.

    Raises ConfigError for a mistake in the options, or between them and the model.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        config = EngineConfig.from_options({"scheduler": OFFLINE_SCHEDULER, **options})
        check_in_process(config)
        check_options(config)  # before torch is imported
        with progress.shown(config.load_progress), progress.phase(f"opening {config.model}"):
            self._policy = create_policy(config.scheduler)
            check_names(config)
            self.capabilities = outlook(config, self._policy)
            source = resolve_tokenizer(config.model, config.revision, config.tokenizer)
            self._tokenizer = load_tokenizer(source)
        self.config = config
        self._requests = RequestMaker(
            config, self._tokenizer, self.capabilities, clock=time.monotonic
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """As LLM's."""
        return self._requests.default_params()

    def encode(self, content: str | list[int] | Sequence[Mapping[str, Any]]) -> Encoded:
        """A text, token ids or a conversation as what `LLM.generate` takes."""
        if isinstance(content, str):
            return {"prompt": content, "prompt_token_ids": self._tokenizer.encode(content)}
        if is_conversation(content):
            return self._requests.render(content)
        return {"prompt_token_ids": content}

    def reasoning_apart(
        self, encoded: Encoded, params: SamplingParams
    ) -> Callable[[CompletionOutput], list[Event]]:
        """A function that takes the streamed outputs of a conversation's answer apart."""
        reader = self._requests.reader(encoded.get("prompt", ""), params)
        if reader is None:
            return lambda output: [Content(output.text)]
        ends = {*self.capabilities.limits.eos_token_ids, *(params.stop_token_ids or ())}
        prompt = encoded["prompt_token_ids"]
        text = Detokenizer(self._tokenizer, params, prompt, ends, reader.markers)

        def read(output: CompletionOutput) -> list[Event]:
            text.append(output.token_ids)
            if output.finished:
                text.finish()
            return reader.read(replace(output, text=text.take_delta()))

        return read

    def fit(self, encoded: Encoded, params: SamplingParams) -> SamplingParams:
        """`params`, whose `max_tokens` is a default, for a window with less room than that."""
        left = self.capabilities.limits.max_model_len - len(encoded["prompt_token_ids"])
        return params.with_(max_tokens=None) if (params.max_tokens or 0) > left else params

    def check(self, encoded: Encoded, params: SamplingParams) -> None:
        """Raise RequestError where the model could not serve this request."""
        ids = tuple(encoded["prompt_token_ids"])
        admit(Submission("0", ids, params), self.capabilities)

    def load(self) -> "LLM":
        """Read the weights."""
        from octavo.engine.executor import create_executor
        from octavo.llm import LLM

        with progress.shown(self.config.load_progress):
            executor = create_executor(self.config)
        return LLM.over(executor, self._tokenizer, self.config, self._policy)
