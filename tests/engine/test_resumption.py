"""Requests outlive the engine processes that compute them.

Each answer is compared with that of an engine in this process that nobody disturbs.
"""

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, field

import msgspec
import pytest

import fake_engine
from engine_threads import Place
from octavo.config import EngineConfig
from octavo.core.policy_registry import create_policy
from octavo.core.submission import Continuation, Submission
from octavo.engine import link as link_module
from octavo.engine import pool as pool_module
from octavo.engine import resumption as module
from octavo.engine.admission import admit
from octavo.engine.client import EngineClient, Observer
from octavo.engine.engine import Engine
from octavo.engine.journal import Journal
from octavo.engine.messages import Add
from octavo.engine.output import OutputProcessor
from octavo.errors import EngineDeadError, EngineError
from octavo.params import RequestOutputKind, SamplingParams
from octavo.text.tokenizer import load_tokenizer
from serving import PYTHONPATH, write_model

DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
SEED = 7
EXECUTOR = "fake_engine:create_hashed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "hashed", step_seconds=0.002)


@pytest.fixture(autouse=True)
def engine_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setattr(pool_module, "RESTART_SECONDS", 0.0)


def config_of(folder, **options):
    return EngineConfig(model=str(folder), swap_space=0, seed=SEED, max_num_seqs=40, **options)


@dataclass
class Answer:
    """A request's whole answer, as its reader put it together. events: how many came."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list] = field(default_factory=dict)
    ends: dict[int, tuple] = field(default_factory=dict)
    prompt_logprobs: list | None = None

    def add(self, output):
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "twice"
            self.prompt_logprobs = output.prompt_logprobs
        for choice in output.outputs:
            at = choice.index
            assert at not in self.ends, "after the end"
            self.texts[at] = self.texts.get(at, "") + choice.text
            self.tokens.setdefault(at, []).extend(choice.token_ids)
            self.logprobs.setdefault(at, []).extend(choice.logprobs or ())
            if choice.finish_reason:
                self.ends[at] = (choice.finish_reason, choice.stop_reason)

    @property
    def count(self):
        return sum(map(len, self.tokens.values()))


def requests(count, seed=0, longest=60):
    rng = random.Random(seed)
    made = []
    for number in range(count):
        sampled = rng.random() < 0.7
        params = SamplingParams(
            n=rng.choice([1, 1, 3]) if sampled else 1,
            temperature=1.0 if sampled else 0.0,
            seed=number if sampled and rng.random() < 0.5 else None,
            max_tokens=rng.randrange(1, longest),
            min_tokens=1 if rng.random() < 0.2 else 0,
            stop=["e", "zz"] if rng.random() < 0.3 else [],
            stop_token_ids=[33, 34] if rng.random() < 0.3 else None,
            ignore_eos=True,
            logprobs=2 if rng.random() < 0.3 else None,
            prompt_logprobs=1 if rng.random() < 0.2 else None,
            presence_penalty=0.5 if rng.random() < 0.2 else 0.0,
            output_kind=rng.choice([DELTA, FINAL_ONLY]),
        )
        prompt = tuple(rng.choices(range(97, 123), k=rng.randrange(1, 60)))
        made.append(Submission(f"x{number}", prompt, params))
    return made


def undisturbed(folder, submissions):
    """The answers of one engine in this process."""
    config = config_of(folder, max_waiting=1000, scheduler="priority")
    engine = Engine(config, fake_engine.create_hashed(config), create_policy(config.scheduler))
    engine.executor.before_step = None
    outputs, answers = OutputProcessor(load_tokenizer(folder)), {}
    for submission in submissions:
        outputs.add(submission, None, 0.0)
        engine.add_request(admit(submission, engine.capabilities))
        answers[submission.request_id] = Answer()
    while engine.has_work():
        done, stops = outputs.process(engine.step(), 0.0)
        for stop in stops:
            engine.finish_choice(*stop)
        for output in done:
            answers[output.request_id].add(output)
    return [answers[submission.request_id] for submission in submissions]


class Watch(Observer):
    def __init__(self):
        self.deaths, self.resumed_on = [], []

    def lost(self, engine):
        self.deaths.append(engine)

    def resumed(self, engine):
        self.resumed_on.append(engine)


class Callers:
    """Reads what a client's engines answer to requests that are submitted in pairs."""

    def __init__(self, client):
        self.client = client
        self.answers = {}
        self.errors = {}
        self._tasks = []

    def submit(self, submissions):
        for at in range(0, len(submissions), 2):
            self._tasks.append(asyncio.create_task(self._read(submissions[at : at + 2])))

    async def _read(self, pair):
        for submission in pair:
            self.answers[submission.request_id] = Answer()
        try:
            batch = await self.client.submit(pair)
            async for position, output in batch:
                self.answers[pair[position].request_id].add(output)
            batch.close()
        except EngineError as error:
            self.errors[tuple(one.request_id for one in pair)] = error

    async def until(self, tokens):
        """Wait for so many tokens in all."""
        await until(lambda: sum(answer.count for answer in self.answers.values()) >= tokens)

    async def all(self):
        await asyncio.gather(*self._tasks)
        return list(self.answers.values())


async def until(condition, seconds=30):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "never"
        await asyncio.sleep(0.002)


class Thread(Place):
    """An engine in a thread, over the executor that the processes have too."""

    def _engine(self):
        config = self.launch.config.with_(max_waiting=1000)
        runner = fake_engine.create_hashed(config)
        runner.before_step = self._wait
        return Engine(config, runner, create_policy(config.scheduler))

    def _wait(self, plan):
        time.sleep(0.002)  # no faster than its client reads
        self.steps.wait()
        if self.exit_code is not None:
            raise SystemExit


def run(folder, body, restart=False, threads=False, **options):
    """`body` with a client over engines in processes, or in threads, which start at once."""

    async def main():
        launchers = (lambda index: Thread()) if threads else None
        client = EngineClient(config_of(folder, **options), EXECUTOR, launchers, restart)
        client.observer = Watch()
        await client.start(lambda: load_tokenizer(folder))
        try:
            await asyncio.wait_for(body(client), 60)
            assert client.in_flight == 0
            assert len(client._resumption) == 0
            assert not client._resumption._timers
            assert len(client._outputs) == 0
            assert all(load == (0, 0) for load in client._loads)
        finally:
            await client.close()

    asyncio.run(main())


def kill(client, index, how=signal.SIGKILL):
    place = client.links[index].launcher
    if isinstance(place, Thread):
        place.die()
    else:
        os.kill(client.links[index].process.pid, how)


def suspects(client):
    records = client._resumption._journal._records
    return [name for name, record in records.items() if record.in_a_row]


def test_200_requests_over_two_engines_of_which_each_is_killed_once(folder, caplog):
    """In between, the first one is started again."""
    asked = requests(200)
    expected = undisturbed(folder, asked)

    async def body(client):
        callers = Callers(client)
        callers.submit(asked[:130])
        await callers.until(800)
        kill(client, 0)
        await until(lambda: client.observer.deaths == [0])
        resumed = client._resumption
        assert len(resumed) > 10
        await until(lambda: len(client._pool.serving) == 2 and not suspects(client))
        callers.submit(asked[130:])
        await until(lambda: client._loads[1].running > 10)
        kill(client, 1)
        answers = await callers.all()
        assert client.observer.deaths == [0, 1]
        assert client.observer.resumed_on.count(0) > 5
        assert client.observer.resumed_on.count(1) > 10
        assert callers.errors == {}
        for number, (got, want) in enumerate(zip(answers, expected, strict=True)):
            assert got == want, number
        await until(lambda: len(client._pool.serving) == 2)

    run(folder, body, restart=True, data_parallel_size=2, max_waiting=100)
    (told,) = [m for m in caplog.messages if m.startswith("engine 0 died")]
    assert "(its process ended with signal SIGKILL): " in told
    assert told.endswith(" requests continue on engine 1")


def test_requests_wait_while_the_only_engine_is_started_again(folder, caplog):
    asked = requests(40)
    expected = undisturbed(folder, asked)

    async def body(client):
        callers = Callers(client)
        callers.submit(asked)
        for deaths in (1, 2):
            await callers.until(150 * deaths)
            await until(lambda: client._pool.serving and not suspects(client))
            kill(client, 0)
            await until(lambda d=deaths: len(client.observer.deaths) == d)
            with pytest.raises(EngineError):
                await client.submit(requests(1, seed=5))
        assert await callers.all() == expected
        assert callers.errors == {}

    run(folder, body, restart=True)
    assert sum("wait for an engine" in m for m in caplog.messages) == 2


LONG = SamplingParams(max_tokens=150, ignore_eos=True, output_kind=DELTA, temperature=1)


def long(*texts):
    return [
        Submission(f"l{i}", tuple(text.encode()), LONG.with_(seed=i))
        for i, text in enumerate(texts)
    ]


def test_a_request_that_kills_engines_fails_alone_after_the_second(folder):
    """It kills at its third token, so the second engine dies before it gains one there."""
    asked = long("one", "two", "three", "four", "!kill five", "six")
    expected = undisturbed(folder, [one for one in asked if b"!" not in bytes(one.token_ids)])

    async def body(client):
        callers = Callers(client)
        callers.submit(asked[:4])
        await callers.until(12)
        for one in asked[4:]:
            callers.submit([one])
        answers = await callers.all()
        assert len(client.observer.deaths) == 2
        ((_, error),) = callers.errors.items()
        assert list(callers.errors) == [("l4",)]
        assert "2 engines in a row have died while they computed this request" in str(error)
        assert "SIGKILL" in str(error)
        assert [*answers[:4], answers[5]] == expected

    run(folder, body, restart=True)


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_whole_whatever_dies_when(folder, seed):
    """Three engines die at random, and their requests go from one to the next."""
    asked = requests(60, seed, longest=40)
    expected = undisturbed(folder, asked)
    rng = random.Random(seed)

    async def body(client):
        callers = Callers(client)
        callers.submit(asked)
        for number in range(1, 5):  # a request with five deaths is given up
            await callers.until(number * 100)
            await until(lambda: client._pool.serving and not suspects(client))
            kill(client, rng.choice(client._pool.serving).index)
            await until(lambda deaths=number: len(client.observer.deaths) == deaths)
        assert await callers.all() == expected
        assert callers.errors == {}

    run(folder, body, restart=True, threads=True, data_parallel_size=3)


def test_the_requests_of_an_engine_that_does_not_answer_go_on_elsewhere(folder, monkeypatch):
    """And back there, once it answers: what it then says of its first time is ignored."""
    silent = set()
    monkeypatch.setattr(
        link_module.EngineLink,
        "unhealthy_reason",
        property(lambda link: "silent" if link.index in silent else link.reason),
    )
    asked = long("one", "two", "three", "four")
    expected = undisturbed(folder, asked)

    async def body(client):
        callers = Callers(client)
        callers.submit(asked)
        await callers.until(40)
        frozen = client.links[1]
        frozen.launcher.steps.clear()
        silent.add(1)
        client.link_silent(frozen, "silent")  # as its watch says it
        await until(lambda: client.observer.resumed_on == [0, 0] and not suspects(client))
        assert client.in_flight == 4
        kill(client, 0)
        await until(lambda: client.observer.deaths)
        silent.clear()
        monkeypatch.setattr(Journal, "has_room", lambda *given: True)  # all before it speaks
        client._resumption.go_on()
        assert client.observer.resumed_on == [0, 0, 1, 1, 1, 1]
        frozen.launcher.steps.set()
        assert await callers.all() == expected

    run(folder, body, threads=True, data_parallel_size=2)


def test_a_request_that_no_engine_has_accepted_yet_is_not_lost(folder, monkeypatch):
    """It arrives at the next one as it was: since when, how urgent, until when, for whom."""
    sent, send = [], link_module.EngineLink.send

    def note(link, command):
        if isinstance(command, Add):
            sent.append((link.index, command.submission))
        send(link, command)

    monkeypatch.setattr(link_module.EngineLink, "send", note)

    async def body(client):
        callers = Callers(client)
        deadline = time.monotonic() + 900
        asked = [
            msgspec.structs.replace(
                one, params=one.params.with_(seed=None), priority=3, deadline=deadline,
                cache_salt="mine",
            )
            for one in long("one", "two", "three", "four")
        ]  # fmt: skip
        for link in client.links:
            link.launcher.steps.clear()
        began = time.monotonic()
        callers.submit(asked[:2])
        await until(lambda: sum(load.waiting for load in client._loads) == 2)
        await until(lambda: all(place.engine.stats.running for place in places(client)))
        callers.submit(asked[2:])
        await until(lambda: client.in_flight == 4)
        ended = time.monotonic()
        assert sum(request.queued for request in client._requests.values()) == 2
        kill(client, 0)
        client.links[1].launcher.steps.set()
        assert await callers.all() == undisturbed(folder, asked)
        assert client.observer.resumed_on == [1, 1]
        first = {one.request_id: one for index, one in sent[:4] if index == 0}
        for index, one in sent[4:]:
            assert index == 1
            assert one.continuation == Continuation()
            assert began <= one.arrival_time <= ended
            same = msgspec.structs.replace(one, continuation=None, arrival_time=None)
            assert same == first.pop(one.request_id)
            assert one.seed is not None

    run(folder, body, threads=True, data_parallel_size=2, scheduler="priority")


def places(client):
    return [link.launcher for link in client.links]


def test_what_ends_while_it_waits_leaves_nothing(folder, monkeypatch):
    """Ended by its caller, aborted, out of time, past its deadline."""
    monkeypatch.setattr(pool_module, "RESTART_SECONDS", 60.0)
    monkeypatch.setattr(module, "RESUME_SECONDS", 1.0)

    async def body(client):
        late = Submission("late", (97,), LONG, deadline=time.monotonic() + 0.01)
        batches = [await client.submit([one]) for one in (*long("one", "two", "three"), late)]
        for batch in batches:
            await anext(batch)
        kill(client, 0)
        await until(lambda: client.observer.deaths)
        client.finish(["l0"])
        batches[1].close()
        assert not {"l0", "l1"} & client._requests.keys()
        *_, (_, last) = [output async for output in batches[0]]
        assert last.outputs[0].finish_reason == "abort"
        for batch in batches[2:]:
            with pytest.raises(EngineError, match="none could continue the request in time"):
                async for _ in batch:
                    pass

    run(folder, body, restart=True, threads=True, scheduler="priority")


def test_a_shutdown_ends_what_waits(folder, monkeypatch):
    monkeypatch.setattr(pool_module, "RESTART_SECONDS", 60.0)

    async def body(client):
        callers = Callers(client)
        callers.submit(long("one"))
        await callers.until(5)
        kill(client, 0)
        await until(lambda: client.observer.deaths)
        closing = asyncio.create_task(client.close())
        await callers.all()
        (error,) = callers.errors.values()
        assert isinstance(error, EngineDeadError)
        await closing

    run(folder, body, restart=True, threads=True)
