"""Load on an OpenAI-compatible server: sends requests at their times and gathers the outcomes."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import h11

from octavo.bench.answer import Answer, Outcome, error_message
from octavo.bench.datasets import Sample
from octavo.bench.http import Endpoint, Reply
from octavo.errors import ConfigError, OctavoError

Api = Literal["completions", "chat"]
PATHS: Mapping[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_TOO_LONG = 2000  # characters of an error page that are kept


@dataclass(frozen=True)
class Target:
    """What every request has in common. extra: further fields of the body."""

    model: str
    api: Api = "completions"
    path: str = PATHS["completions"]
    ignore_eos: bool = False
    timeout: float = 6 * 3600.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    request_id_prefix: str = ""

    def body(self, sample: Sample) -> bytes:
        prompt: dict[str, Any] = (
            {"messages": [{"role": "user", "content": sample.prompt}]}
            if self.api == "chat"
            else {"prompt": sample.prompt}
        )
        length = "max_completion_tokens" if self.api == "chat" else "max_tokens"
        fields = {
            "model": self.model,
            **prompt,
            length: sample.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra,
        }
        return json.dumps(fields).encode()


class Run:
    """One run: a clock that starts with it, and a limit on requests in flight.

    clock: monotonic seconds. done: called with each outcome as it is known.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        target: Target,
        max_concurrency: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        done: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self._endpoint = endpoint
        self._target = target
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._clock = clock
        self._done = done
        self._begun = clock()

    async def all(
        self, samples: Sequence[Sample], times: Sequence[float]
    ) -> tuple[list[Outcome], float]:
        """Send each sample at its time. Returns the outcomes in order, and the duration."""
        self._begun = self._clock()
        tasks = []
        for index, (sample, at) in enumerate(zip(samples, times, strict=True)):
            # Against the start and not the previous request: delays do not add up.
            if (wait := self._begun + at - self._clock()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.ensure_future(self.one(sample, index)))
        outcomes = list(await asyncio.gather(*tasks))
        return outcomes, self._clock() - self._begun

    async def one(self, sample: Sample, index: int = 0) -> Outcome:
        if self._slots is None:
            return await self._sent(sample, index)
        async with self._slots:
            return await self._sent(sample, index)

    async def _sent(self, sample: Sample, index: int) -> Outcome:
        """A request is timed from here, not from its turn to wait for `max_concurrency`."""
        body, begun = self._target.body(sample), self._clock()
        outcome = Outcome(sample.prompt_len, sample.output_len, begun - self._begun)
        prefix = self._target.request_id_prefix
        headers = {"X-Request-Id": f"{prefix}{index}"} if prefix else {}
        try:
            work = self._exchange(body, headers, outcome, begun)
            await asyncio.wait_for(work, self._target.timeout)
        except asyncio.TimeoutError:
            outcome.fail("timed out", f"no end within {self._target.timeout:g} s")
        except (OSError, h11.RemoteProtocolError) as error:
            outcome.fail("connection lost", f"{type(error).__name__}: {error}")
        self._done(outcome)
        return outcome

    async def _exchange(
        self, body: bytes, headers: Mapping[str, str], outcome: Outcome, begun: float
    ) -> None:
        async with self._endpoint.request("POST", self._target.path, body, headers) as reply:
            await self._read(reply, outcome, begun)

    async def _read(self, reply: Reply, outcome: Outcome, begun: float) -> None:
        if reply.status != 200:
            page = await reply.read()
            outcome.fail(f"HTTP {reply.status}", _message(page))
            return
        answer = Answer(outcome, begun)
        async for piece in reply.pieces():
            answer.feed(piece, self._clock())
        answer.end(self._target.ignore_eos, self._clock())


def _message(page: bytes) -> str:
    try:
        return error_message(json.loads(page))
    except ValueError:
        return page.decode(errors="replace")[:_TOO_LONG]


async def first_model(endpoint: Endpoint, path: str = "/v1/models") -> str:
    """The first model that the server lists. Raises ConfigError."""
    try:
        async with endpoint.request("GET", path) as reply:
            page = await reply.read()
    except (OSError, h11.RemoteProtocolError) as error:
        address = endpoint.address
        raise ConfigError(f"no server at {address.host}:{address.port}: {error}") from error
    if reply.status != 200:
        raise ConfigError(f"{path} answers {reply.status}: {_message(page)}")
    try:
        return str(json.loads(page)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{path} lists no model; name one with --model") from None


async def wait_until_ready(
    run: Run, sample: Sample, seconds: float, clock: Callable[[], float] = time.monotonic
) -> None:
    """Send one request, again every second, until it succeeds. Raises OctavoError."""
    end = clock() + seconds
    while not (outcome := await run.one(sample)).ok:
        if clock() >= end:
            raise OctavoError(f"the first request fails: {outcome.failure}: {outcome.error}")
        await asyncio.sleep(min(1.0, max(0.0, end - clock())))
