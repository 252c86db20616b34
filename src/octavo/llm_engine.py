"""`LLMEngine`: an LLM whose caller adds requests and steps the engine, as vLLM's.

`LLM.stream` and `AsyncLLM` need no loop of the caller's; this is for programs that have one.
"""

from collections.abc import Iterable
from typing import Any

from octavo.engine.requests import Prompt, check_arguments
from octavo.errors import RequestError
from octavo.llm import LLM, Box
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams


class LLMEngine(LLM):
    """A model, ready to be stepped.

    >>> engine = LLMEngine.from_engine_args(EngineArgs("smollm2"))
    >>> engine.add_request("request-1", "Once upon a time", SamplingParams(max_tokens=8))
    >>> while engine.has_unfinished_requests():
    ...     for output in engine.step():
    ...         print(output.outputs[0].text)
    """

    def _setup(self, *parts: Any) -> None:
        super()._setup(*parts)
        self._box = Box()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        **vllm_arguments: object,
    ) -> None:
        """Queue a request; `step` runs it, and returns outputs as `params.output_kind` says.

        Raises RequestError (RequestTypeError for a wrong type) naming the problem.
        """
        check_arguments("add_request", vllm_arguments)
        self._check_usable()
        if request_id in self._unfinished():
            raise RequestError(f"a request with the id {request_id!r} is in flight", "request_id")
        chosen = self._requests.default_params() if params is None else params
        kind = getattr(chosen, "output_kind", SamplingParams.output_kind)
        request = self._requests.make(request_id, prompt, chosen, kind, priority, deadline)
        with self._steps.exclusive():
            self._waiting.append((request, self._box))

    def step(self) -> list[RequestOutput]:
        """Compute one step; what each request gained in it, or at its end. Empty if none runs."""
        self._check_usable()
        with self._steps.exclusive():
            self._step()
            return list(self._box.take())

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests, whose memory is free at the next step; unknown ids are ignored."""
        ids = dict.fromkeys([request_ids] if isinstance(request_ids, str) else request_ids)
        with self._steps.exclusive():
            self._unqueue(ids)  # at once, so that it no longer counts as unfinished
        self._abort(ids)

    def has_unfinished_requests(self) -> bool:
        return bool(self._unfinished())

    def get_num_unfinished_requests(self) -> int:
        return len(self._unfinished())

    def _unfinished(self) -> set[str]:
        waiting = {entry[0].submission.request_id for entry in self._waiting}
        return waiting | self._boxes.keys()
