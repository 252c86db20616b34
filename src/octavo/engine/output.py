"""Converts the engine's updates to the outputs that a caller receives.

For each request in flight it keeps the ids, the text, and how much of them was delivered. It
returns one `RequestOutput` per request and step, of the requested kind. It also finds stop
strings, which the engine cannot, since it handles ids only: `process` returns the choices that one
has ended, and the caller informs the engine. The state of a request is dropped when its last
choice ends.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from octavo.core.plan import TokenLogprobs
from octavo.core.scheduler import Update
from octavo.core.submission import Continuation, Submission
from octavo.errors import RequestError
from octavo.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from octavo.params import RequestOutputKind
from octavo.text.detokenizer import Detokenizer
from octavo.text.markers import Markers
from octavo.text.tokenizer import Tokenizer

StoppedChoice = tuple[str, int]  # request id, choice


class OutputProcessor:
    """Turns updates into outputs. Reads no clock: times are the caller's.

    epoch: the wall clock's time at 0 of the caller's clock; times in outputs are the wall clock's.
    """

    def __init__(self, tokenizer: Tokenizer, epoch: float = 0.0) -> None:
        self._tokenizer = tokenizer
        self._epoch = epoch
        self._states: dict[str, _State] = {}

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._states)

    def add(
        self,
        submission: Submission,
        prompt: str | None,
        arrival_time: float,
        markers: Markers | None = None,
    ) -> None:
        """Expect updates of a request. Raises RequestError if its id is in flight.

        prompt: its text, if it was given as text, for the outputs. markers: of the parser that the
        text is for.
        """
        request_id = submission.request_id
        if request_id in self._states:
            raise RequestError(
                f"a request with the id {request_id[:128]!r} is in flight", "request_id"
            )
        self._states[request_id] = _State(
            self._tokenizer, submission, prompt, arrival_time, self._epoch, markers
        )

    def process(
        self, updates: Iterable[Update], now: float
    ) -> tuple[list[RequestOutput], list[StoppedChoice]]:
        """(outputs to deliver, choices that a stop string has ended while the engine goes on).

        Updates of requests that are not, or no longer, in flight are ignored, and so are those
        of a choice after its end.
        """
        touched: dict[str, _State] = {}
        stops: list[StoppedChoice] = []
        for update in updates:
            state = self._states.get(update.request_id)
            if state is None:
                continue
            choice = state.choices[update.index]
            if choice.finish_reason is not None:
                continue
            ended = state.take(choice, update, now)
            touched[update.request_id] = state
            if ended and update.finish_reason is None:
                stops.append((update.request_id, update.index))
        return self._deliver(touched, now), stops

    def interrupted(self, request_id: str) -> Continuation:
        """How far a request in flight had come when its engine died, for another one to continue.

        From what `process` was given, and nothing else, so no token is lost or doubled.
        """
        state = self._states[request_id]
        for choice in state.choices:
            # The next engine counts its own.
            choice.earlier_preemptions += choice.preemptions
            choice.preemptions = 0
        if not any(choice.token_ids or choice.finished for choice in state.choices):
            return Continuation()
        return Continuation(
            tuple([None if c.finished else tuple(c.token_ids) for c in state.choices])
        )

    def abort(self, request_id: str, now: float | None = None) -> RequestOutput | None:
        """End a request; its last output, with the text so far. None if it is not in flight."""
        state = self._states.pop(request_id, None)
        if state is None:
            return None
        for choice in state.choices:
            if not choice.finished:
                state.end(choice, "abort", None)
        return state.output(now)

    def _deliver(self, touched: dict[str, "_State"], now: float) -> list[RequestOutput]:
        outputs = []
        for request_id, state in touched.items():
            if not state.live:
                del self._states[request_id]
            if not state.live or state.kind is not RequestOutputKind.FINAL_ONLY:
                outputs.append(state.output(now))
        return outputs


class _Choice:
    """One choice so far. `detokenizer` is None if text is decoded at the end, or not at all."""

    __slots__ = ("changed", "complete", "cumulative", "delivered", "detokenizer",
                 "earlier_preemptions", "finish_reason", "index", "logprobs", "preemptions",
                 "stop_reason", "text",
                 "token_ids")  # fmt: skip

    def __init__(self, index: int, detokenizer: Detokenizer | None, with_logprobs: bool) -> None:
        self.index = index
        self.detokenizer = detokenizer
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = [] if with_logprobs else None
        self.cumulative: float | None = 0.0 if with_logprobs else None
        self.text = ""  # where there is no detokenizer
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.preemptions = 0
        self.earlier_preemptions = 0  # by engines that have died
        self.delivered = 0  # tokens that earlier outputs of kind DELTA held
        self.changed = False  # since the last output
        self.complete = False  # a grammar ended it, whose last token is text

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def whole(self) -> CompletionOutput:
        return CompletionOutput(
            self.index,
            self.text if self.detokenizer is None else self.detokenizer.text,
            self.token_ids.copy(),
            self.cumulative,
            None if self.logprobs is None else self.logprobs.copy(),
            self.finish_reason,
            self.stop_reason,
        )

    def delta(self) -> CompletionOutput:
        begin, self.delivered = self.delivered, len(self.token_ids)
        return CompletionOutput(
            self.index,
            "" if self.detokenizer is None else self.detokenizer.take_delta(),
            self.token_ids[begin:],
            self.cumulative,
            None if self.logprobs is None else self.logprobs[begin:],
            self.finish_reason,
            self.stop_reason,
        )


class _State:
    """One request in flight."""

    __slots__ = ("cached", "choices", "epoch", "error", "error_param", "kind", "live", "markers",
                 "metrics", "params", "prompt", "prompt_ids", "prompt_logprobs", "request_id",
                 "tokenizer")  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        submission: Submission,
        prompt: str | None,
        arrival_time: float,
        epoch: float,
        markers: Markers | None,
    ) -> None:
        params = submission.params
        self.tokenizer = tokenizer
        self.markers = markers
        self.request_id = submission.request_id
        self.prompt = prompt
        self.prompt_ids = list(submission.token_ids)
        self.params = params
        self.kind = params.output_kind
        self.live = params.n
        self.cached = 0
        self.error: str | None = None
        self.error_param: str | None = None
        self.epoch = epoch
        self.metrics = RequestMetrics(arrival_time + epoch)
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        # Stop strings and streams need the text of each step; otherwise it is decoded once,
        # when the choice ends.
        eager = params.detokenize and (
            bool(params.stop_strings) or self.kind is not RequestOutputKind.FINAL_ONLY
        )
        self.choices = [
            _Choice(i, self._detokenizer() if eager else None, params.logprobs is not None)
            for i in range(params.n)
        ]

    def take(self, choice: _Choice, update: Update, now: float) -> bool:
        """Add what `choice` gained; returns whether the engine or a stop string ended it."""
        ids: Sequence[int] = update.token_ids
        choice.changed = True
        choice.preemptions = update.num_preemptions
        if ids and self.metrics.first_token_time is None:
            scheduled = update.scheduled_time
            self.metrics = RequestMetrics(
                self.metrics.arrival_time,
                None if scheduled is None else scheduled + self.epoch,
                now + self.epoch,
            )
            self.cached = update.num_cached_tokens
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *map(self._position, update.prompt_logprobs)]
        if update.error is not None:
            self.error, self.error_param = update.error, update.error_param
        stopped, reason = None, update.finish_reason
        choice.complete = update.complete
        if choice.detokenizer is not None:
            hides_last = reason is not None and self._hides_last(choice, reason)
            ids, stopped = self._follow(choice.detokenizer, ids, hides_last)
        choice.token_ids += ids
        if choice.logprobs is not None:
            self._add_logprobs(choice, update.logprobs[: len(ids)])
        if stopped is not None:
            self.end(choice, "stop", stopped)
        elif reason is not None:
            self.end(choice, reason, update.stop_reason)
        return choice.finish_reason is not None

    def end(self, choice: _Choice, reason: FinishReason, stop_reason: int | str | None) -> None:
        choice.changed = True
        choice.finish_reason = reason
        choice.stop_reason = stop_reason
        self.live -= 1
        if choice.detokenizer is not None:
            choice.detokenizer.finish()
        elif self.params.detokenize and choice.token_ids:
            detokenizer = self._detokenizer()
            hides_last = self._hides_last(choice, reason)
            detokenizer.append(choice.token_ids[:-1] if hides_last else choice.token_ids)
            detokenizer.finish()
            choice.text = detokenizer.text

    def output(self, now: float | None) -> RequestOutput:
        """The output to deliver now."""
        finished = not self.live
        if finished:
            self.metrics = replace(
                self.metrics,
                finished_time=None if now is None else now + self.epoch,
                preemptions=sum(c.preemptions + c.earlier_preemptions for c in self.choices),
            )
        prompt_logprobs = self.prompt_logprobs
        if self.kind is RequestOutputKind.DELTA:
            choices = [choice.delta() for choice in self.choices if choice.changed]
            self.prompt_logprobs = None  # delivered
        else:
            choices = [choice.whole() for choice in self.choices]
        for choice in self.choices:
            choice.changed = False
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_ids,
            choices,
            finished,
            prompt_logprobs,
            self.cached,
            self.metrics,
            self.error,
            self.error_param,
        )

    def _detokenizer(self) -> Detokenizer:
        # The engine decides which id ends a choice (`_hides_last`), so the detokenizer hides none.
        return Detokenizer(self.tokenizer, self.params, self.prompt_ids, (), self.markers)

    def _hides_last(self, choice: _Choice, reason: FinishReason | None) -> bool:
        """Whether the last id has no text: the end-of-text or stop id that ended the choice."""
        ends = reason == "stop" and not choice.complete
        return ends and not self.params.include_stop_str_in_output

    def _follow(
        self, detokenizer: Detokenizer, ids: Sequence[int], hides_last: bool
    ) -> tuple[Sequence[int], str | None]:
        """Decode new ids; returns (the ids that count, the stop string that was completed)."""
        before = detokenizer.count
        detokenizer.append(ids[:-1] if hides_last else ids)
        if detokenizer.stopped is None:
            return ids, None
        return ids[: detokenizer.count - before], detokenizer.stopped

    def _add_logprobs(self, choice: _Choice, entries: Sequence[TokenLogprobs | None]) -> None:
        assert choice.logprobs is not None
        assert choice.cumulative is not None
        for entry in entries:
            assert entry is not None, f"no logprobs for {self.request_id!r}, which asked"
            choice.logprobs.append(self._position(entry))
            choice.cumulative += entry.logprobs[0]

    def _position(self, entry: TokenLogprobs) -> PositionLogprobs:
        """One position's entries, the token itself first."""
        text = self.tokenizer.token_text
        found: PositionLogprobs = {}
        for token, logprob, rank in zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True):
            if token not in found:
                found[token] = Logprob(logprob, rank, text(token))
        return found
