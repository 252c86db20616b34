"""Several engines behind one client: routed, refused, aborted, lost and started again together."""

import asyncio
import contextlib
import os
import signal
import time
from functools import partial

import pytest

from engine_threads import Place
from octavo.config import EngineConfig
from octavo.core.submission import Submission
from octavo.engine import link, pool
from octavo.engine.client import EngineClient, Observer
from octavo.engine.messages import Stats
from octavo.engine.preflight import check_options
from octavo.engine.stats import EngineStats, Observations
from octavo.errors import CheckpointError, ConfigError, EngineDeadError, EngineError, QueueFullError
from octavo.params import SamplingParams
from octavo.text.tokenizer import load_tokenizer
from serving import PYTHONPATH, write_model

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)
SIZE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


class Seen(Observer):
    def __init__(self):
        self.routes, self.up, self.down = [], [], []

    def routed(self, engine, reason):
        self.routes.append((engine, reason))

    def loaded(self, engine, capabilities):
        self.up.append(engine)

    def lost(self, engine):
        self.down.append(engine)


class Run:
    """A client over engines in threads. places: of all that were started, in order."""

    def __init__(self, tokenizer, *places, restart=False, **options):
        self.tokenizer = tokenizer
        self.places, self.given = [], list(places)
        count = options.setdefault("data_parallel_size", len(places) or 2)
        config = EngineConfig(model="fake", swap_space=0, **options)
        self.client = EngineClient(config, "none", self._place, restart)
        self.seen = self.client.observer = Seen()
        self.count = count

    def _place(self, engine):
        self.places.append(self.given.pop(0) if self.given else Place())
        return self.places[-1]

    async def __aenter__(self):
        await asyncio.wait_for(self.client.start(lambda: self.tokenizer), 20)
        return self

    async def __aexit__(self, *error):
        for place in self.places:
            place.loads.set()
            place.steps.set()
        await self.client.close()
        assert all(place.exit_code is not None for place in self.places)

    async def submit(self, *prompts, params=PARAMS, **fields):
        client = self.client
        return await client.submit(
            [Submission(client.new_id(), tuple(prompt), params, **fields) for prompt in prompts]
        )


def over(tokenizer, body, *places, **options):
    async def main():
        async with Run(tokenizer, *places, **options) as run:
            await asyncio.wait_for(body(run), 20)

    asyncio.run(main())


async def ids(batch):
    found = {}
    async for position, output in batch:
        for choice in output.outputs:
            found.setdefault((position, choice.index), []).extend(choice.token_ids)
    return found


def note(sent, engine, send, command):
    sent.append((engine, command))
    send(command)


async def until(true):
    while not true():
        await asyncio.sleep(0.005)


def prompt(letter, blocks=3):
    return [ord(letter)] * (blocks * SIZE)


def test_requests_go_where_their_prefix_is_else_by_turns(tokenizer):
    async def body(run):
        first = await run.submit(*map(prompt, "abc"))
        places = [first.engine_of(i) for i in range(3)]
        assert places == [0, 1, 0]
        answers = await ids(first)
        again = await run.submit(*[prompt(letter, 4) for letter in "bca"])
        assert [again.engine_of(i) for i in range(3)] == [1, 0, 0]
        assert await ids(again) != answers
        assert run.seen.routes == [(0, "load"), (1, "load"), (0, "load"), (1, "prefix"),
                                   (0, "prefix"), (0, "prefix")]  # fmt: skip
        cached = [place.engine.stats.cached_tokens for place in run.places]
        assert cached == [2 * 3 * SIZE, 3 * SIZE]
        salted = await run.submit(prompt("b", 4), cache_salt="mine")
        await ids(salted)
        assert run.seen.routes[-1][1] == "load"

    over(tokenizer, body)


def test_an_answer_is_the_same_wherever_it_is_computed(tokenizer):
    found = []

    async def body(run):
        drawn = SamplingParams(max_tokens=8, ignore_eos=True, seed=5, n=2)
        batches = [await run.submit(prompt(letter), params=drawn) for letter in "aabb"]
        found.append([sorted((await ids(batch)).items()) for batch in batches])

    for count in (1, 3):
        over(tokenizer, body, data_parallel_size=count, enable_prefix_caching=False)
    assert found[0] == found[1]


def test_the_choices_of_a_request_stay_together_and_count_each(tokenizer):
    async def body(run):
        for place in run.places:
            place.steps.clear()
        # An engine accepts nothing during a step: nobody waits for it here.
        many = asyncio.create_task(run.submit(prompt("a"), params=PARAMS.with_(n=4)))
        await asyncio.sleep(0)
        others = asyncio.create_task(run.submit(*map(prompt, "bcdef")))
        await asyncio.sleep(0)
        assert [engine for engine, _ in run.seen.routes] == [0, 1, 1, 1, 1, 0]
        for place in run.places:
            place.steps.set()
        assert len(await ids(await many)) == 4
        await ids(await others)
        assert run.places[0].engine.stats.finished == {"length": 2}

    over(tokenizer, body)


def test_a_slow_engine_gets_fewer(tokenizer):
    async def body(run):
        run.places[0].steps.clear()
        stuck = await run.submit(prompt("a"))
        taken = []
        for letter in "bcdefg":
            batch = await run.submit(prompt(letter))
            await ids(batch)
            taken.append(batch.engine_of(0))
        assert taken == [1] * 6
        run.places[0].steps.set()
        await ids(stuck)
        assert [load.requests for load in run.client._loads] == [0, 0]

    over(tokenizer, body)


def test_an_abort_reaches_the_engine_that_computes(tokenizer):
    async def body(run):
        for place in run.places:
            place.steps.clear()
        # Long enough that the abort comes before the end, however late its engine reads it.
        batches = [await run.submit(prompt(letter), params=LONG) for letter in "ab"]
        sent = []
        for i, one in enumerate(run.client.links):
            one.send = partial(note, sent, i, one.send)
        batches[1].close()
        (engine, command), *rest = sent
        assert (engine, len(command.request_ids), rest) == (1, 1, [])
        for place in run.places:
            place.steps.set()
        assert len(await ids(batches[0])) == 1
        await until(lambda: run.places[1].engine.recorder.finished == {"abort": 1})

    over(tokenizer, body)


def test_the_queue_is_as_long_as_those_of_all(tokenizer):
    async def body(run):
        for place in run.places:
            place.steps.clear()
        full = asyncio.create_task(run.submit(*map(prompt, "abcdefgh")))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match=r"limit of 8 \(2 engines x \(max_num_seqs"):
            await run.submit(prompt("x"))
        assert [run.client._loads[i].requests for i in (0, 1)] == [4, 4]
        full.cancel()
        await until(full.done)
        assert [run.client._loads[i].requests for i in (0, 1)] == [0, 0]
        run.places[0].die()
        await until(lambda: 0 in run.client.down)
        with pytest.raises(QueueFullError, match="limit of 4 "):
            await run.submit(*map(prompt, "abcde"))

    over(tokenizer, body, max_num_seqs=1, max_waiting=3)


def test_a_reset_is_of_all_engines(tokenizer):
    async def body(run):
        for letter in "ab":
            await ids(await run.submit(prompt(letter)))
        assert await run.client.reset_prefix_cache()
        for letter in "ab":
            await ids(await run.submit(prompt(letter)))
        assert {reason for _, reason in run.seen.routes} == {"load"}
        assert [place.engine.stats.cached_tokens for place in run.places] == [0, 0]
        run.places[1].steps.clear()
        for letter in "xy":
            await run.submit(prompt(letter))
        run.places[1].steps.set()

    over(tokenizer, body)


# Starts


def test_nothing_is_served_before_all_are_loaded(tokenizer):
    async def main():
        slow = Place()
        slow.loads.clear()
        run = Run(tokenizer, Place(), slow)
        starting = asyncio.create_task(run.__aenter__())
        await until(lambda: run.client.links[0].capabilities)
        await asyncio.sleep(0.05)
        assert not starting.done()
        with pytest.raises(EngineError, match="the model is being loaded"):
            run.client.check_queue(1)
        slow.loads.set()
        await starting
        assert run.seen.up == [0, 1]
        await run.__aexit__()

    asyncio.run(main())


@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_cannot_load_ends_the_start_of_all(tokenizer, failing):
    """At once: the other one's load is not waited for."""

    async def main():
        places = [Place(), Place()]
        places[failing].fails = CheckpointError("no such tensor")
        places[1 - failing].loads.clear()
        run = Run(tokenizer, *places)
        with pytest.raises(CheckpointError, match="no such tensor"):
            await run.__aenter__()
        assert all(place.exit_code is not None for place in places)
        assert run.client.unhealthy_reason

    asyncio.run(main())


def test_one_that_dies_after_its_load_ends_the_start_too(tokenizer):
    async def main():
        slow = Place()
        slow.loads.clear()
        run = Run(tokenizer, Place(), slow)
        starting = asyncio.create_task(run.__aenter__())
        await until(lambda: run.client.links[0].capabilities)
        run.places[0].die()
        with pytest.raises(
            EngineDeadError, match="engine 0: its process ended with signal SIGKILL"
        ):
            await starting
        assert slow.exit_code is not None

    asyncio.run(main())


def test_one_that_has_no_process_ends_the_start_of_all(tokenizer):
    class Full(Place):
        async def start(self, launch, exited):
            raise OSError(11, "Resource temporarily unavailable")

    async def main():
        run = Run(tokenizer, Place(), Full())
        with pytest.raises(EngineDeadError, match=r"could not be started.*temporarily unavail"):
            await run.__aenter__()
        assert run.places[0].exit_code is not None
        assert not any(os.path.exists(place.folder) for place in run.places)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"max_model_len": 512}, "set max_model_len to 512, which fits all engines"),
        ({"device": "cuda"}, "engine 1 has device 'cuda', not 'none' as the others have; all"),
        ({"vocab_size": 300}, "the same model"),
    ],
)
def test_engines_that_differ_are_refused(tokenizer, limits, says):
    async def main():
        run = Run(tokenizer, Place(), Place(**limits))
        with pytest.raises(ConfigError, match=says):
            await run.__aenter__()
        assert all(place.exit_code is not None for place in run.places)

    asyncio.run(main())


def test_engines_may_differ_in_the_size_of_their_caches(tokenizer):
    async def body(run):
        assert len(await ids(await run.submit(prompt("a")))) == 1

    over(tokenizer, body, Place(), Place(num_blocks=100))


def test_one_gpu_is_not_for_several():
    config = EngineConfig(device="cuda:1", data_parallel_size=2)
    with pytest.raises(ConfigError, match="each engine has GPUs of its own; set device='cuda'"):
        check_options(config)


# Ends


def test_an_end_that_was_asked_for_is_no_loss(tokenizer, caplog):
    over(tokenizer, lambda run: asyncio.sleep(0))
    assert "engines serve" not in caplog.text
    assert "died" not in caplog.text


def test_the_others_go_on_without_one_until_none_is_left(tokenizer, caplog):
    async def body(run):
        client = run.client
        run.places[1].die()
        await until(lambda: run.seen.down == [1])
        assert client.down == {1: "its process ended with signal SIGKILL"}
        assert "1 of 2 engines serve" in caplog.text
        assert client.unhealthy_reason is None
        batch = await run.submit(*map(prompt, "abc"))
        assert {batch.engine_of(i) for i in range(3)} == {0}
        assert len(await ids(batch)) == 3
        run.places[0].steps.clear()
        lost = await run.submit(prompt("a"))
        run.places[0].die()
        with pytest.raises(EngineDeadError, match=r"engine 0: .*; engine 1: its process ended"):
            await ids(lost)
        assert client.died.is_set()
        assert client.in_flight == 0
        with pytest.raises(EngineDeadError):
            client.check_queue(1)

    over(tokenizer, body)


def test_one_that_died_is_started_again_and_its_cache_forgotten(tokenizer, monkeypatch):
    monkeypatch.setattr(pool, "RESTART_SECONDS", 0.01)

    async def body(run):
        await ids(await run.submit(prompt("a")))
        new = run.given
        new.append(Place())
        new[0].loads.clear()
        run.places[0].die()
        await until(lambda: len(run.places) == 3)
        assert run.client.down == {0: "the engine has died and is being started again"}
        assert not run.client.died.is_set()
        one = await run.submit(prompt("a"))
        assert one.engine_of(0) == 1
        run.places[2].loads.set()
        await until(lambda: not run.client.down)
        assert run.seen.up == [0, 1, 0]
        await ids(one)
        other = await run.submit(prompt("z"))
        assert other.engine_of(0) == 0
        await ids(other)

    over(tokenizer, body, Place(), Place(), restart=True)


@pytest.mark.parametrize(
    "what", [{"fails": CheckpointError("gone")}, {"max_model_len": 100}], ids=["fails", "other"]
)
def test_one_that_cannot_be_started_again_stays_down(tokenizer, monkeypatch, what):
    monkeypatch.setattr(pool, "RESTART_SECONDS", 0.01)

    async def body(run):
        run.given.append(Place(**what))
        run.places[0].die()
        says = "gone" if "fails" in what else "set max_model_len to 100"
        await until(lambda: says in run.client.down.get(0, ""))
        assert len(await ids(await run.submit(prompt("a")))) == 1
        assert not run.client.died.is_set()
        run.given.append(Place(fails=CheckpointError("gone too")))
        run.places[1].die()
        await run.client.died.wait()
        assert "gone too" in run.client.reason

    over(tokenizer, body, Place(), Place(), restart=True)


def test_engines_that_die_at_once_are_no_fault_of_requests(tokenizer, monkeypatch):
    """What is left of an engine is a message at most: no request is sent to it, or blamed."""
    monkeypatch.setattr(pool, "RESTART_SECONDS", 0.01)

    async def body(run):
        many = SamplingParams(max_tokens=200, ignore_eos=True)
        batch = await run.submit(*map(prompt, "abcdef"), params=many)
        for place in tuple(run.places):
            place.die()
        assert len(await ids(batch)) == 6

    over(tokenizer, body, Place(), Place(), restart=True)


def test_an_engine_whose_process_has_ended_gets_nothing(tokenizer, monkeypatch):
    monkeypatch.setattr(link, "_LAST_MESSAGE_SECONDS", 60)

    async def body(run):
        run.places[0].die()
        await until(lambda: 0 in run.client.down)
        assert "SIGKILL" in run.client.down[0]
        batch = await run.submit(*map(prompt, "abcd"))
        assert {batch.engine_of(i) for i in range(4)} == {1}
        assert len(await ids(batch)) == 4
        run.client.links[0].fail(EngineDeadError("its last message"))

    over(tokenizer, body, Place(), Place())


def test_statistics_of_a_dead_engine_are_too_late(tokenizer):
    async def body(run):
        seen = []
        run.seen.update = lambda engine, report: seen.append(engine)
        run.places[0].die()
        await until(lambda: run.seen.down == [0])
        report = Stats(EngineStats(), Observations())
        seen.clear()
        run.client.received(run.client.links[0], report)
        assert 0 not in seen
        run.client.received(run.client.links[1], report)
        assert 1 in seen

    over(tokenizer, body, Place(), Place())


def test_a_client_that_closes_starts_none_again(tokenizer, monkeypatch):
    monkeypatch.setattr(pool, "RESTART_SECONDS", 60)

    async def body(run):
        run.places[0].die()
        await until(lambda: 0 in run.client.down)

    over(tokenizer, body, restart=True)


# Processes


@contextlib.asynccontextmanager
async def processes(folder, monkeypatch, count):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    config = EngineConfig(model=str(folder), swap_space=0, data_parallel_size=count)
    client = EngineClient(config, "fake_engine:create")
    try:
        yield client
    finally:
        await client.close()


def test_a_frozen_engine_gets_nothing_until_it_answers_again(folder, monkeypatch):
    monkeypatch.setattr(link, "FREEZE_SECONDS", 1.0)

    async def main():
        async with processes(folder, monkeypatch, 2) as client:
            await client.start(lambda: load_tokenizer(folder))
            frozen = client.links[0].process.pid
            allowed = [os.sched_getaffinity(one.process.pid) for one in client.links]
            if len(os.sched_getaffinity(0)) > 1:
                assert not allowed[0] & allowed[1]
            os.kill(frozen, signal.SIGSTOP)
            try:
                await until(lambda: 0 in client.down)
                assert "silent" in client.down[0]
                assert not await client.reset_prefix_cache()  # that one keeps its own
                for _ in range(3):
                    ask = Submission(client.new_id(), (99,), PARAMS)
                    batch = await client.submit([ask])
                    assert batch.engine_of(0) == 1
                    assert len(await ids(batch)) == 1
            finally:
                os.kill(frozen, signal.SIGCONT)
            await until(lambda: not client.down)
            batch = await client.submit([Submission(client.new_id(), (98,), PARAMS)])
            assert batch.engine_of(0) == 0
            assert len(await ids(batch)) == 1

    asyncio.run(main())


def test_a_kill_during_the_start_is_one_error_and_leaves_nothing(tmp_path, monkeypatch):
    slow = write_model(tmp_path / "slow", load_seconds=60)

    async def main():
        async with processes(slow, monkeypatch, 2) as client:
            starting = asyncio.create_task(client.start(lambda: load_tokenizer(slow)))
            await until(lambda: all(one.process for one in client.links))
            folders = [one.launcher.folder for one in client.links]
            os.kill(client.links[1].process.pid, signal.SIGKILL)
            begun = time.monotonic()
            with pytest.raises(
                EngineDeadError, match="engine 1: its process ended with signal SIG"
            ):
                await starting
            assert time.monotonic() - begun < 30  # not the time of the load
            assert [one.process.exit_code for one in client.links] == [-9, -9]
            assert not any(map(os.path.exists, folders))

    asyncio.run(main())
